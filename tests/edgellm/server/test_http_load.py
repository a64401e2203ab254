"""`edgellm bench http` against a real server, and against servers that misbehave."""

import asyncio
import csv
import io
import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from edgellm import serving_records
from edgellm.cli.main import run
from edgellm.http_bench import Plan, facts, measure
from edgellm.http_load import Load, Server
from edgellm.serving_records import SLO
from edgellm.workloads import Ask, Speed

FAST = Speed(2e4, 2e3)


def send(url, asks, clients=None, seconds=math.inf, **more):
    load = Load(Server(url, "tiny", **more))
    return asyncio.run(load.run(asks, clients, seconds)), load


def http(url, *more):
    return run(["bench", "http", url, "--speed", "20000,2000", "-c", "256", *more])


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_records_say_what_the_server_counted(server, endpoint):
    before = server.llm.metrics.generation_tokens
    asks = [Ask(0.02 * i, [i, 7, i * i, 3], 5 + i, "few") for i in range(6)]
    done, load = send(server.url, asks, endpoint=endpoint)
    assert not load.errors and len(done.records) == 6
    assert sorted(r.n_output for r in done.records) == [5, 6, 7, 8, 9, 10]
    assert server.llm.metrics.generation_tokens - before == sum(r.n_output for r in done.records)
    for r in done.records:
        assert r.is_complete and r.n_prompt > 4
        assert r.tokens == sorted(r.tokens) and r.arrived <= (r.finished or 0)


def test_times_are_those_of_the_plan(server):
    asks = [Ask(0.3, [1], 2, "late"), Ask(0.0, [2], 2, "early")]
    done, _ = send(server.url, asks)
    arrived = {r.kind: r.arrived for r in done.records}
    assert arrived == {"late": 0.3, "early": 0.0}
    assert all(r.tokens[0] >= r.arrived for r in done.records if r.tokens)


def test_a_closed_loop_keeps_its_clients_busy(server):
    asks = [Ask(0.0, [k, k + 1], 12, "any") for k in range(20)]
    done, _ = send(server.url, asks, clients=3)
    changes = [(r.arrived, 1) for r in done.records] + [(r.finished, -1) for r in done.records]
    at_once = np.cumsum([step for _, step in sorted(changes)])
    assert len(done.records) == 20 and max(at_once) == 3
    none, _ = send(server.url, asks, clients=3, seconds=0.0)
    assert none.records == []


def test_a_conversation_goes_on_from_its_answers(server):
    asked = []
    done, _ = send(server.url, [])

    def then(output):
        asked.append(output)
        return Ask(math.nan, [1, 2, 3, 4, 5, 6], 3, "turn 2", turn=2)

    done, _ = send(server.url, [Ask(0.0, [1, 2, 3], 3, "turn 1", turn=1, then=then)])
    first, second = sorted(done.records, key=lambda r: r.turn)
    assert asked == [[]] and second.arrived >= first.finished
    assert second.n_prompt > first.n_prompt + 3


def test_clients_that_leave_are_no_failures(server):
    asks = [Ask(0.0, [3] * 10, 400, "leaves", cancel_after=0.15) for _ in range(3)]
    done, load = send(server.url, asks)
    assert {r.finish_reason for r in done.records} == {"abort"} and not load.errors
    server.until(server.is_idle)


def test_every_scenario_is_sent(server):
    for name in ("burst", "periodic", "prefix-high", "chat5", "structured", "priorities"):
        plan = Plan(name, n_requests=4, rate=100.0, n_ctx=256, speed=FAST)
        load = Load(Server(server.url))
        report, config = asyncio.run(measure(load, plan, SLO(ttft=60)))
        assert not load.errors and report.rows[0]["completed"] == report.rows[0]["requests"]
        assert report.rows[0]["of_good"] == 1.0 and config["model"] == "tiny"
        json.dumps([report.rows, report.facts, config])
    assert report.rows[0]["requests"] == 4


def test_the_speed_is_measured_where_none_is_given(server):
    report, config = asyncio.run(
        measure(Load(Server(server.url)), Plan(n_requests=3, rate=50.0), SLO())
    )
    assert report.facts["speed_prefill"] > 0 < report.facts["speed_decode"]
    assert config["n_ctx"] == 512  # what the server says
    assert asyncio.run(facts(Server(server.url))) == ("tiny", 512)


def test_reports_records_pictures(server, tmp_path, capsys):
    kept, picture = tmp_path / "r.jsonl", tmp_path / "p.png"
    flags = ["--requests", "10", "--rate", "inf", "--records", str(kept)]
    assert http(server.url, *flags, "--picture", str(picture), "-o", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"][0]["requests"] == 10 == len(serving_records.read(kept))
    assert found["rows"][0]["e2e"]["p99"] >= found["rows"][0]["ttft"]["p99"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000
    assert http(server.url + "/v1", "--requests", "4", "--rate", "inf", "-o", "csv") == 0
    assert list(csv.DictReader(io.StringIO(capsys.readouterr().out)))[0]["requests"] == "4"
    assert http(server.url, "--clients", "2", "--requests", "4") == 0
    assert "2 clients in a closed loop" in capsys.readouterr().out
    assert run(["bench", "compare", str(kept), str(kept)]) == 0
    assert "1.00" in capsys.readouterr().out


def test_a_missed_slo_is_exit_code_1(server, tmp_path, capsys):
    slo = tmp_path / "slo.toml"
    slo.write_text("tpot = 60000\nttft = {p50 = 0.001, p95 = 60000}\n")
    assert http(server.url, "--requests", "3", "--rate", "inf", "--slo", str(slo)) == 1
    assert "SLO missed: TTFT P50 is" in capsys.readouterr().err
    slo.write_text("tpot = 60000\n")
    assert http(server.url, "--requests", "3", "--rate", "inf", "--slo", str(slo)) == 0


@pytest.mark.parametrize(
    "text", ["ttft = 0", "ttft = true", "ttft = {p42 = 3}", "speed = 3", "ttft = 'x'", "ttft ="]
)
def test_a_bad_slo_is_named(tmp_path, text, capsys):
    slo = tmp_path / "slo.toml"
    slo.write_text(text)
    assert run(["bench", "http", "http://127.0.0.1:9", "--slo", str(slo)]) == 2
    said = capsys.readouterr().err
    assert "slo.toml (--slo)" in said and "Traceback" not in said


@pytest.mark.parametrize(
    "flags, named",
    [
        (["ftp://x"], "http://"),
        (["http://127.0.0.1:9"], "No server answers at http://127.0.0.1:9"),
        (["http://127.0.0.1:9", "--body", "[1]"], "--body"),
        (["http://127.0.0.1:9", "--speed", "3"], "--speed"),
        (["http://127.0.0.1:9", "--rate", "0"], "--rate"),
        (["http://127.0.0.1:9", "--endpoint", "x"], "--endpoint"),
        (["http://127.0.0.1:9", "--picture", "x.jpg"], "--picture"),
        (["http://127.0.0.1:9", "--picture", "/nowhere/x.png"], "--picture"),
        (["http://127.0.0.1:9", "--scenario", "x"], "--scenario"),
        (["http://[", "--requests", "1"], "No server answers"),
    ],
)
def test_bad_flags_are_refused(flags, named, capsys):
    assert run(["bench", "http", *flags]) == 2
    said = capsys.readouterr().err
    assert named in said and "Traceback" not in said


# ---- servers that misbehave ---------------------------------------------------------------------

GOOD = b'data: {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": null}]}\n\n'
ANSWERS = {
    "error": (200, GOOD + b'data: {"error": {"message": "out of luck"}}\n\n'),
    "cut": (200, GOOD),
    "garbage": (200, b"data: {nonsense\n\n"),
    "shape": (200, b'data: {"choices": [[1]]}\n\n'),
    "full": (429, b'{"error": {"message": "later"}}'),
    "loading": (503, b"{}"),
    "wrong": (400, b'{"error": {"message": "no such field"}}'),
}


@pytest.fixture
def misbehaving():
    """A server that answers as the model it is asked for says."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status, data = ANSWERS[body["model"]]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": []}')

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("name", ANSWERS)
def test_what_went_wrong_is_counted(misbehaving, name):
    load = Load(Server(misbehaving, name))
    done = asyncio.run(load.run([Ask(0.0, [1], 3, "any")] * 2))
    rejected = name in ("full", "loading")
    assert {r.finish_reason for r in done.records} == {"rejected" if rejected else "error"}
    assert sum(load.errors.values()) == (0 if rejected else 2)
    assert name != "error" or "out of luck" in next(iter(load.errors))
    assert name != "wrong" or "HTTP 400" in next(iter(load.errors))
    summary = serving_records.summary(done.records, done.seconds)
    assert (summary["rejected"], summary["failed"]) == ((2, 0) if rejected else (0, 2))


def test_a_server_without_models_is_named(misbehaving, capsys):
    assert http(misbehaving) == 2
    assert "names no model; name one with --model-name" in capsys.readouterr().err
