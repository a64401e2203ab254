"""One server, several models: real ones, tiny, in a folder."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import httpx
import psutil
import pytest
from contract import Contract

from edgellm import LLM
from edgellm.conversation import template_of
from edgellm.engine import AsyncLLM
from edgellm.server.app import make_app
from edgellm.server.models import Models
from edgellm.server.run import _Server, configured, listen
from edgellm.server.safety import Caps, Guard
from edgellm.server.service import Service
from edgellm.turns import Turns

CHAT = "/v1/chat/completions"
ASK = [{"role": "user", "content": "hello"}]
SHORT = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


class Server:
    """Models of a folder, in this process; ``pause``: seconds that loading takes besides;
    ``stall``: those without progress that make an engine stuck."""

    def __init__(self, folder, first=None, guard=None, pause=0.0, stall=9.0, **options):
        self.folder, self.pause, self.turns, self.stall = folder, pause, Turns(stall / 2), stall
        self.models = Models(self._load, lambda path: 0, folder, **options)
        if first:
            self.models.add(first, folder / f"{first}.gguf")
        self.ready = threading.Event()
        app = make_app(self.models, guard or Guard(), drain_seconds=0)
        self._server = _Server(configured(app), self.models, self.ready.set)
        self._server.capture_signals = _nothing
        self._socket = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)
        contract = Contract(app.state.openapi)
        self.http = httpx.Client(
            base_url=self.url, timeout=60, event_hooks={"response": [_read, contract.check]}
        )

    def _load(self, name, path):
        time.sleep(self.pause)
        llm = LLM(path, n_threads=2, n_ctx=512, max_num_seqs=4)
        engine = AsyncLLM(llm, stall_seconds=self.stall, turns=self.turns)
        return Service(engine, name, template_of(llm, None))

    def chat(self, model=None, **more):
        body = {"messages": ASK, **SHORT, **more} | ({"model": model} if model else {})
        return self.http.post(CHAT, json=body)

    def text(self, model):
        answer = self.chat(model)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]["content"]

    def states(self):
        return {m["id"]: m["status"]["value"] for m in self.http.get("/v1/models").json()["data"]}

    def stop(self):
        self.http.close()
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


def _nothing():
    """Signals are the tests' own."""
    return contextlib.nullcontext()


def _read(reply):
    if reply.headers.get("content-type") == "application/json":
        reply.read()


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    found = tmp_path_factory.mktemp("models")
    for name in ("llama", "qwen2", "gemma3"):
        shutil.copy(tiny_model(name, template=TEMPLATE, n_ctx=512), found / f"{name}.gguf")
    (found / "broken.gguf").write_bytes(b"GGUF" + bytes(60))
    return found


@pytest.fixture
def start(folder):
    running = []

    def begin(**options):
        running.append(Server(folder, **options))
        return running[-1]

    yield begin
    for server in running:
        server.stop()


def test_models_are_loaded_when_requests_name_them(start, folder):
    server = start()
    assert server.ready.wait(10)
    assert set(server.states().values()) == {"unloaded"}
    assert server.http.get("/readyz").status_code == 200
    texts = {name: server.text(name) for name in ("llama", "qwen2")}
    assert server.states() == {
        "broken": "unloaded", "gemma3": "unloaded", "llama": "loaded", "qwen2": "loaded",
    }  # fmt: skip
    for name, text in texts.items():  # the same as alone
        alone = start(first=name)
        alone.ready.wait(10)
        assert alone.text(None) == text
    answer = server.chat("other")
    assert answer.status_code == 404 and "'gemma3'" in answer.json()["error"]["message"]
    assert server.chat().status_code == 400  # none is named, and there are several
    answer = server.chat("broken")
    assert answer.status_code == 503 and "cannot be loaded" in answer.json()["error"]["message"]
    assert server.text("llama") == texts["llama"]


def test_every_api_names_models(start):
    server = start()
    http = server.http
    assert http.post("/tokenize", json={"content": "a", "model": "qwen2"}).status_code == 200
    assert http.get("/props?model=qwen2").json()["model_alias"] == "qwen2"
    assert len(http.get("/slots?model=qwen2").json()) == 4
    assert http.post("/apply-template", json={"messages": ASK, "model": "llama"}).json() == {
        "prompt": "<user>hello<assistant>"
    }
    asked = {
        "model": "llama:latest",
        "messages": ASK,
        "stream": False,
        "options": {"num_predict": 2},
    }
    assert http.post("/api/chat", json=asked).json()["done"]
    assert [m["name"] for m in http.get("/api/tags").json()["models"]] == [
        "gemma3",
        "llama",
        "qwen2",
    ]
    assert {m["name"] for m in http.get("/api/ps").json()["models"]} == {"llama", "qwen2"}
    assert http.post("/api/show", json={"model": "llama"}).json()["capabilities"] == ["completion"]
    body = {"model": "gemma3", "messages": ASK, "max_tokens": 2}
    assert http.post("/v1/messages", json=body).json()["model"] == "gemma3"
    names = {m["name"]: m["state"] for m in http.get("/status").json()["models"]}
    assert names == {"broken": "unloaded", "gemma3": "ready", "llama": "ready", "qwen2": "ready"}
    metrics = http.get("/metrics").text
    assert 'num_requests_running{model_name="gemma3"}' in metrics
    assert 'num_requests_running{model_name="llama"}' in metrics


def test_loading_and_unloading_by_hand(start):
    server = start(first="llama")
    assert server.ready.wait(10)
    do = lambda what, name: server.http.post(f"/models/{what}", json={"model": name})  # noqa: E731
    assert do("load", "qwen2").json() == {"success": True}
    assert server.states()["qwen2"] == "loaded"
    body = {
        "model": "qwen2",
        "messages": ASK,
        "stream": True,
        "max_tokens": 400,
        "ignore_eos": True,
    }
    remove = server.models.find("qwen2").service.engine.llm.on("output", lambda _: time.sleep(0.02))
    with server.http.stream("POST", CHAT, json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert do("unload", "qwen2").status_code == 409  # a model in use is never unloaded
    for _ in range(200):
        if not server.models.find("qwen2").is_in_use:
            break
        time.sleep(0.01)
    remove()
    assert do("unload", "qwen2").status_code == 200 and server.states()["qwen2"] == "unloaded"
    assert do("unload", "llama").status_code == 409  # pinned
    assert do("load", "nothing").status_code == 404
    assert server.chat().status_code == 200  # the one of the command line is the default


def test_ollamas_keep_alive(start):
    server = start()
    ask = lambda **body: server.http.post("/api/generate", json={"model": "llama", **body})  # noqa: E731
    assert ask().json()["done_reason"] == "load" and server.states()["llama"] == "loaded"
    assert ask(keep_alive=0).json()["done_reason"] == "unload"
    assert server.states()["llama"] == "unloaded"
    assert ask(keep_alive="5m").json()["done_reason"] == "load"
    assert 290 < server.models.seconds_left(server.models.find("llama")) <= 300
    assert ask(keep_alive=-1).json()["done_reason"] == "load"
    assert server.http.get("/api/ps").json()["models"][0]["expires_at"] > "2200"
    assert ask(keep_alive="soon").status_code == 400
    assert ask(keep_alive=0).json()["done_reason"] == "unload"
    shown = server.http.post("/api/show", json={"model": "llama"})  # loads nothing
    assert shown.json()["template"] == TEMPLATE and server.states()["llama"] == "unloaded"
    assert server.http.post("/api/show", json={"model": "broken"}).status_code == 503


def test_idle_models_go(start):
    server = start(idle_seconds=0.3)
    server.text("llama")
    left = server.http.get("/api/ps").json()["models"][0]["expires_at"]
    assert left < "9999"
    for _ in range(60):
        if server.states()["llama"] == "unloaded":
            break
        time.sleep(0.1)
    assert server.states()["llama"] == "unloaded"
    assert server.text("llama")


def test_an_engine_that_fails_takes_no_others_down(start):
    server = start()
    texts = {name: server.text(name) for name in ("llama", "qwen2")}
    failing = server.models.find("llama").service.engine

    answers = []
    asking = threading.Thread(target=lambda: answers.append(server.chat("llama", max_tokens=300)))
    failing.llm.on("output", lambda rows: time.sleep(0.01))
    asking.start()
    while not failing.n_open:
        time.sleep(0.001)
    failing.close()  # its thread ends under the request
    asking.join()
    assert answers[0].status_code in (200, 503)
    assert server.text("qwen2") == texts["qwen2"]
    assert server.text("llama") == texts["llama"]  # with an engine that was made anew
    assert server.models.find("llama").service.engine is not failing
    assert server.http.get("/readyz").status_code == 200


def test_a_stuck_engine_is_told_of_and_others_go_on(start):
    """RF15: not ready, its requests end with an error, the other model answers; and back."""
    server = start(stall=0.8)
    texts = {name: server.text(name) for name in ("llama", "qwen2")}
    stuck, go_on = server.models.find("llama").service.engine, threading.Event()
    remove = stuck.llm.on("output", lambda rows: go_on.wait(30))
    try:
        answers = []
        body = {"model": "llama", "messages": ASK, **SHORT}
        asks = [{**body, "stream": stream} for stream in (False, True)]

        def ask(body):
            answers.append(httpx.post(server.url + CHAT, json=body, timeout=30))

        threads = [threading.Thread(target=ask, args=(body,)) for body in asks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert sorted(a.status_code for a in answers) == [200, 503]
        assert all("makes no progress" in a.text for a in answers)
        assert [server.http.get(p).status_code for p in ("/readyz", "/livez")] == [503, 503]
        assert server.text("qwen2") == texts["qwen2"]
    finally:
        remove()
        go_on.set()
    for _ in range(300):
        if server.http.get("/readyz").status_code == 200 and not stuck.n_open:
            break
        time.sleep(0.02)
    assert server.text("llama") == texts["llama"]
    assert server.models.find("llama").service.engine is stuck


def test_the_stages_of_a_request_are_all_of_its_time(start, caplog):
    """A19"""
    server = start(first="llama")
    assert server.ready.wait(10)
    caplog.set_level("INFO", logger="edgellm.server")
    for stream in (False, True):
        caplog.clear()
        begun = time.perf_counter()
        assert server.chat(stream=stream, max_tokens=50).text
        seconds = time.perf_counter() - begun
        for _ in range(100):
            if records := [r for r in caplog.records if hasattr(r, "prefill_ms")]:
                break
            time.sleep(0.01)
        [record] = records
        stages = [
            record.prepare_ms,
            record.queue_ms,
            record.prefill_ms,
            record.decode_ms,
            record.send_ms,
        ]
        assert all(stage >= 0 for stage in stages)
        assert sum(stages) == pytest.approx(record.total_ms, rel=0.01)
        assert record.total_ms <= 1e3 * seconds and record.completion_tokens == 50
        assert record.model == "llama" and record.path == CHAT
        assert "hello" not in record.getMessage()


def test_while_the_first_model_loads(start):
    """As llama-server: 503, with the words that its clients know."""
    server = start(first="llama", pause=0.6)
    assert not server.ready.is_set()
    for path in ("/health", "/readyz"):
        assert server.http.get(path).status_code == 503
    assert server.http.get("/health").json()["error"]["message"] == "Loading model"
    assert server.http.get("/livez").status_code == 200
    answer = server.chat()
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
    assert server.ready.wait(10)
    assert server.http.get("/health").status_code == 200 and server.chat().status_code == 200


def test_a_first_model_that_cannot_be_loaded_ends_the_server(start):
    server = start(first="broken")
    server._thread.join(10)
    assert not server._thread.is_alive() and isinstance(server._server.failure, ValueError)


def test_what_a_key_may_ask_for(start):
    guard = Guard(keys=("a", "b"), caps={"a": Caps(max_tokens=5, concurrency=1)})
    server = start(first="llama", guard=guard)
    assert server.ready.wait(10)

    def ask(key, **more):
        body = {"messages": ASK, "temperature": 0, "ignore_eos": True, **more}
        return server.http.post(CHAT, json=body, headers={"authorization": f"Bearer {key}"})

    answer = ask("a", max_tokens=6)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "max_tokens"
    assert ask("a").json()["usage"]["completion_tokens"] == 5
    assert ask("b", max_tokens=6).json()["usage"]["completion_tokens"] == 6
    engine = server.models.find("llama").service.engine
    remove = engine.llm.on("output", lambda rows: time.sleep(0.05))
    first = threading.Thread(target=lambda: ask("a", max_tokens=5))
    first.start()
    while not engine.n_open:
        time.sleep(0.001)
    refused = ask("a", max_tokens=1)
    assert refused.status_code == 429 and "at once" in refused.json()["error"]["message"]
    assert ask("b", max_tokens=1).status_code == 200
    first.join()
    remove()
    assert ask("a", max_tokens=1).status_code == 200


# ---- the command -------------------------------------------------------------------------------


@pytest.fixture
def start_process():
    processes = []

    def begin(*arguments):
        run = [sys.executable, *arguments]
        processes.append(subprocess.Popen(run, stderr=subprocess.PIPE, text=True))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.fixture
def command(start_process):
    run = ("-m", "edgellm", "serve", "--port", "0", "-c", "512")
    return lambda *arguments: start_process(*run, *arguments)


def address(process):
    line = next(line for line in process.stderr if "http://" in line)
    return "http://" + line.split("http://")[1].split("/v1")[0]


def unload(url, name):
    """As soon as the last answer is on its way."""
    for _ in range(100):
        answer = httpx.post(url + "/models/unload", json={"model": name})
        if answer.status_code != 409:
            break
        time.sleep(0.01)
    assert answer.status_code == 200, answer.text


def test_a_folder_is_served_and_left_in_peace(command, folder):
    process = command("--models-dir", str(folder), "--pin", "llama", "--log-json")
    url = address(process)
    body = {"model": "llama", "messages": ASK, **SHORT}
    assert httpx.post(url + CHAT, json=body, timeout=60).status_code == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    records = [json.loads(line) for line in process.stderr if line.startswith("{")]
    assert any(record.get("completion_tokens") == 6 for record in records)
    assert any("llama is loaded" in record["message"] for record in records)
    assert {"time", "level", "logger", "message"} <= set(records[0])


def test_a_request_under_way_is_finished_and_a_second_signal_does_not_wait(command, folder):
    for signals in (1, 2):
        process = command(str(folder / "llama.gguf"))
        url = address(process)
        body = {"messages": ASK, "max_tokens": 450, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url + CHAT, json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            if signals == 2:
                time.sleep(0.02)
                begun = time.monotonic()
                process.send_signal(signal.SIGTERM)
                process.wait(10)
                assert time.monotonic() - begun < 5
                break
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and process.wait(10) == 0


def test_answers_are_not_held_back(command, folder):
    """Many small requests on one connection: with Nagle's algorithm each would wait for 40 ms."""
    url = address(command(str(folder / "llama.gguf")))
    with httpx.Client(base_url=url) as http:
        http.get("/livez")
        times = []
        for _ in range(40):
            begun = time.perf_counter()
            http.get("/livez")
            times.append(time.perf_counter() - begun)
    assert sorted(times)[4] < 0.03


def test_a_broken_file_is_told_of_as_such(command, folder, tmp_path):
    for name in ("llama", "cut"):
        shutil.copy(folder / "llama.gguf", tmp_path / f"{name}.gguf")
    os.truncate(tmp_path / "cut.gguf", 2000)
    process = command("--models-dir", str(tmp_path))
    url = address(process)
    for path in (CHAT, "/models/load"):
        answer = httpx.post(url + path, json={"model": "cut", "messages": ASK}, timeout=60)
        message = answer.json()["error"]["message"]
        assert answer.status_code == 503 and message.startswith("The model 'cut' cannot be loaded")
        assert str(tmp_path) not in message
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0 and "Traceback" not in process.stderr.read()


def test_a_log_that_nobody_reads_holds_nothing_up(command, folder):
    """The pipe of stderr is full after some hundred lines."""
    process = command(str(folder / "llama.gguf"))
    with httpx.Client(base_url=address(process), timeout=30) as http:
        for _ in range(1500):
            body = {"prompt": "a", "max_tokens": 1, "ignore_eos": True}
            assert http.post("/v1/completions", json=body).status_code == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0


def test_an_idle_server_rests(command, folder):
    """Less than 1 % of a core."""
    process = command(str(folder / "llama.gguf"))
    url = address(process)
    assert httpx.post(url + CHAT, json={"messages": ASK, **SHORT}, timeout=60).status_code == 200
    time.sleep(0.5)
    seen = psutil.Process(process.pid)
    before = sum(seen.cpu_times()[:2])
    time.sleep(4)
    assert sum(seen.cpu_times()[:2]) - before <= 0.041  # clocks of 10 ms


LOSES_ITS_GPU = """
from edgellm.cli.main import main
from edgellm.kernels.cuda.device import DeviceError
from edgellm.kernels.cuda.program import DeviceProgram

def fail(self, part, step, whole=DeviceProgram._pass):
    if step.phase == "decode":
        raise DeviceError("cuda0 failed: illegal address.")
    whole(self, part, step)

DeviceProgram._pass = fail
main()
"""


def test_a_lost_gpu_ends_the_requests_and_the_server(start_process, folder, monkeypatch, emulator):
    monkeypatch.setenv("EDGELLM_DEVICE", "emulated")
    arguments = ["serve", str(folder / "llama.gguf"), "--port", "0", "-c", "512", "--ngl", "all"]
    process = start_process("-c", LOSES_ITS_GPU, *arguments)
    answer = httpx.post(address(process) + CHAT, json={"messages": ASK, **SHORT}, timeout=60)
    assert answer.status_code == 500
    assert process.wait(30) == 3
    said = process.stderr.read()
    assert "emulated GPU failed: the server ends" in said.splitlines()[-1]


@pytest.mark.parametrize(
    "flags, named",
    [
        (["--cors-origin", "*"], "--cors-origin"),
        (["--cors-origin", "https://a.b/c"], "--cors-origin"),
        (["--models-dir", "/nowhere"], "--models-dir"),
        (["--pin", "nobody"], "'nobody' to --pin"),
        (["broken.gguf"], "broken.gguf"),
        (["nothing.gguf"], "nothing.gguf"),
        (["--api-key-file", "keys"], "'speed=3'"),
    ],
)
def test_bad_starts_are_one_sentence(command, folder, flags, named):
    (folder / "keys").write_text("abc speed=3\n")
    flags = [str(folder / f) if f in ("broken.gguf", "keys") else f for f in flags]
    more = (
        []
        if flags[0].endswith(".gguf") or flags[0] == "--models-dir"
        else ["--models-dir", str(folder)]
    )
    process = command(*flags, *more)
    assert process.wait(30) == 2
    said = process.stderr.read()
    assert named in said and "Traceback" not in said


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.real
@pytest.mark.slow
def test_unloading_gives_the_memory_back(command, real_model, tmp_path):
    for name in ("SmolLM2", "Qwen2.5-Coder-0.5B"):
        os.symlink(real_model(name), tmp_path / f"{name}.gguf")
    process = command("--models-dir", str(tmp_path))
    url = address(process)

    def own() -> int:
        maps = psutil.Process(process.pid).memory_maps()
        return sum(m.private_dirty + m.swap for m in maps)

    left = []
    for is_warm in (False, True, True):  # what compiles kernels comes once and stays
        for name in ("SmolLM2", "Qwen2.5-Coder-0.5B"):
            before = own()
            body = {"model": name, "messages": ASK, **SHORT}
            assert httpx.post(url + CHAT, json=body, timeout=120).status_code == 200
            loaded = own()
            unload(url, name)
            left.append(own())
            if is_warm:
                assert loaded - before > 50 << 20
                assert loaded - left[-1] > 0.7 * (loaded - before)
    assert left[5] - left[3] < 64 << 20  # of the more than 500 MB that came and went
