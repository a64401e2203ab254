"""Two replicas of a tiny model under Ray Serve, started by the file that docs/deploy.md shows."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import site
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

import edgellm
from edgellm import LLM, SamplingParams
from edgellm.server.run import listen

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
HERE = Path(__file__).parent
RECIPE = HERE.parent.parent / "docs/deploy/ray.yaml"
KEY, SEATS, QUEUE = "key-of-a-test", 4, 24
ROOM = SEATS + QUEUE  # of one replica
LONG = {"prompt": "Once", "stream": True, "temperature": 0, "max_tokens": 4000}


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama", n_ctx=4096)


@pytest.fixture(scope="module")
def python(python_of: Callable[..., Path]) -> Path:
    """With Ray, and all that these tests run with."""
    return python_of("ray", (str(Path(edgellm.__file__).parent.parent), *site.getsitepackages()))


class Cluster:
    """``process`` is `serve run`, ``folder`` Ray's own."""

    def __init__(self, url: str, process: psutil.Process, folder: Path) -> None:
        self.url, self.process, self.folder = url, process, folder
        self.headers = {"authorization": f"Bearer {KEY}"}
        self.http = httpx.Client(base_url=url, timeout=60, headers=self.headers)

    def replicas(self) -> set[int]:
        """Their process ids."""
        found = set()
        for child in self.process.children(recursive=True):
            try:
                if child.cmdline()[0].startswith("ray::ServeReplica"):
                    found.add(child.pid)
            except (psutil.Error, IndexError):
                pass
        return found

    def sessions(self) -> list[str]:
        """One for each of the replicas that answer now."""
        names: dict[str, str] = {}
        for n in range(20):
            where = self.asked(f"find-{time.monotonic_ns()}", f"session-{n}")
            names.setdefault(where, f"session-{n}")
        return list(names.values())

    def has_both(self) -> bool:
        return len(self.sessions()) == 2

    def asked(self, request: str, session: str) -> str:
        """Ask for a little; the replica that answered, by the logs of Ray."""
        reply = self.http.post(
            "/v1/completions", json={"prompt": session, "max_tokens": 2, "temperature": 0},
            headers={"x-session-id": session, "x-request-id": request},
        )  # fmt: skip
        assert reply.status_code == 200, reply.text
        for _ in range(100):
            for log in self.folder.glob("ray/session_latest/logs/serve/replica_*.log"):
                if f" {request} " in log.read_text(errors="replace"):
                    return log.stem
            time.sleep(0.02)
        raise AssertionError(f"no replica has logged {request}")

    def metrics(self, session: str) -> dict[str, float]:
        """Of the replica of a session."""
        text = self.http.get("/metrics", headers={"x-session-id": session}).text
        found = re.findall(r"^edgellm:(\w+)\{(.*?),?model_name.*\} (\S+)$", text, re.MULTILINE)
        return {name + label: float(value) for name, label, value in found}


@pytest.fixture(scope="module")
def cluster(model: Path, python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("ray")
    (folder / "keys").write_text(KEY)
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    text = RECIPE.read_text()
    for old, new in {
        "host: 0.0.0.0": "host: 127.0.0.1", "port: 8080": f"port: {port}",
        "/srv/models/model.gguf": str(model), "/etc/edgellm/keys": str(folder / "keys"),
        "num_cpus: 8": "num_cpus: 0.5", "parallel: 8": f"parallel: {SEATS}",
        "max_queue: 64": f"max_queue: {QUEUE}",
    }.items():  # fmt: skip
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "ray.yaml").write_text(text)
    temporary = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))  # Ray's sockets need short paths
    log = (folder / "log").open("w")
    process = subprocess.Popen(
        [python.parent / "serve", "run", folder / "ray.yaml"], stdout=log, stderr=log,
        env={**os.environ, "RAY_TMPDIR": str(temporary), "RAY_USAGE_STATS_ENABLED": "0"},
    )  # fmt: skip
    running = Cluster(f"http://127.0.0.1:{port}", psutil.Process(process.pid), temporary)
    try:
        until(lambda: len(running.replicas()) == 2 and is_ready(running), 90)
        until(running.has_both, 30)
        yield running
    finally:
        running.http.close()
        children = running.process.children(recursive=True)
        process.send_signal(signal.SIGTERM)
        _, left = psutil.wait_procs([running.process, *children], timeout=30)
        for child in left:
            child.kill()
        log.close()
        print((folder / "log").read_text()[-3000:])
        shutil.rmtree(temporary, ignore_errors=True)


def is_ready(cluster: Cluster) -> bool:
    try:
        return cluster.http.get("/readyz").status_code == 200
    except httpx.HTTPError:
        return False


def until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)


def pieces(reply: httpx.Response) -> Iterator[str]:
    for line in reply.iter_lines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                yield choice["text"]


def test_a_stream_is_that_of_one_process(cluster: Cluster, model: Path) -> None:
    with LLM(model, n_threads=1) as llm:
        for sampling in ({"temperature": 0}, {"temperature": 1, "seed": 7}):
            wanted = llm.generate("Once upon a time", SamplingParams(max_tokens=40, **sampling))
            body = {"prompt": "Once upon a time", "max_tokens": 40, "stream": True, **sampling}
            with cluster.http.stream("POST", "/v1/completions", json=body) as reply:
                got = list(pieces(reply))
            assert len(got) > 5
            assert "".join(got) == wanted.text


def test_who_asks_is_checked(cluster: Cluster) -> None:
    keyless = httpx.get(cluster.url + "/v1/models")
    assert keyless.status_code == 401
    assert cluster.http.get("/v1/models", headers={"host": "llm.example.org"}).status_code == 200
    assert cluster.http.get("/v1/models", headers={"host": "other.example"}).status_code == 403


def test_a_session_stays_where_it_is(cluster: Cluster) -> None:
    homes = {
        session: {cluster.asked(f"{session}-{i}", session) for i in range(3)}
        for session in (f"stay-{n}" for n in range(10))
    }
    assert all(len(home) == 1 for home in homes.values())
    assert len(set.union(*homes.values())) == 2


async def crowd(cluster: Cluster, n: int, session: str) -> tuple[list[httpx.Response], float]:
    """All ask at once, and leave when all have an answer; the answers, and when they left."""
    answers: list[httpx.Response] = []
    headers = {"x-session-id": session}

    async def ask(http: httpx.AsyncClient) -> None:
        async with http.stream("POST", "/v1/completions", json=LONG, headers=headers) as reply:
            if reply.status_code != 200:
                await reply.aread()
            answers.append(reply)
            async for _ in reply.aiter_bytes():
                pass

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=cluster.url, headers=cluster.headers, timeout=60, limits=limits
    ) as http:
        tasks = [asyncio.create_task(ask(http)) for _ in range(n)]
        async with asyncio.timeout(30):
            while len(answers) < n:
                await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return answers, time.monotonic()


def test_full_replicas_spill_then_refuse_and_are_free_when_left(cluster: Cluster) -> None:
    sessions = cluster.sessions()
    answers, left = asyncio.run(crowd(cluster, 2 * ROOM + 20, sessions[0]))

    refused = [answer for answer in answers if answer.status_code != 200]
    assert refused and {answer.status_code for answer in refused} == {429}
    assert all(int(answer.headers["retry-after"]) > 0 for answer in refused)
    assert {answer.json()["error"]["type"] for answer in refused} == {"rate_limit_error"}

    n_held = len(answers) - len(refused)
    assert n_held >= 50
    given_up = [0.0, 0.0]

    def are_free() -> bool:
        """Both replicas, all that was asked of them being counted."""
        now = [cluster.metrics(session) for session in sessions]
        given_up[:] = (m.get('request_success_totalfinished_reason="abort"', 0) for m in now)
        busy = sum(m["num_requests_running"] + m["num_requests_waiting"] for m in now)
        return busy == 0 and sum(given_up) == n_held

    until(are_free, 3 - (time.monotonic() - left))
    # the session is that of the first, and what it had no room for went to the second
    assert min(given_up) > 0 and n_held > ROOM


def test_a_proxy_that_has_too_much_refuses_alike(cluster: Cluster) -> None:
    answers, _ = asyncio.run(crowd(cluster, 400, "s"))
    refused = [answer for answer in answers if answer.status_code != 200]
    assert {answer.status_code for answer in refused} == {429}
    assert all(int(answer.headers["retry-after"]) > 0 for answer in refused)
    assert {200} == {answer.status_code for answer in answers} - {429}


def test_a_killed_replica_is_replaced(cluster: Cluster) -> None:
    before = cluster.replicas()
    assert len(before) == 2
    victim = min(before)
    os.kill(victim, signal.SIGKILL)

    def answers() -> bool:
        body = {"prompt": "Hi", "max_tokens": 2}
        statuses = []
        for n in range(8):
            headers = {"x-session-id": f"after-{n}"}
            statuses.append(
                cluster.http.post("/v1/completions", json=body, headers=headers).status_code
            )
        return set(statuses) == {200}

    until(answers, 30)
    until(lambda: len(cluster.replicas() - before) == 1 and len(cluster.replicas()) == 2, 60)
    until(cluster.has_both, 30)
    assert answers()


def test_settings_health_and_limits(python: Path, model: Path) -> None:
    done = subprocess.run(
        [python, HERE / "ray_replica.py", model], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().endswith("ok")
