"""The recipes of docs/deploy: that they name what exists, and nginx before two servers."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from typer.models import OptionInfo

from edgellm.cli import serve
from edgellm.server.routes import ROUTES
from edgellm.server.run import DRAIN_SECONDS, listen
from edgellm.server.safety import PUBLIC

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/deploy.md"
RECIPES = ROOT / "docs/deploy"
UNIT, DOCKERFILE, NGINX = (
    (RECIPES / name).read_text() for name in ("edgellm.service", "Dockerfile", "nginx.conf")
)
HOST = "llm.example.org"


# ---- what is named exists ------------------------------------------------------------------------


def flags() -> set[object]:
    """Of `edgellm serve`."""
    found: set[object] = set()
    for parameter in inspect.signature(serve.command, eval_str=True).parameters.values():
        for option in parameter.annotation.__metadata__:
            if isinstance(option, OptionInfo):  # what it is given first may be its only name
                found.update([option.default, *(option.param_decls or ())])
    return found


def test_flags_and_endpoints_exist() -> None:
    text = PAGE.read_text()
    known = flags()
    assert "--max-queue" in known
    named = set(re.findall(r"`(--[a-z-]+)", text))
    for command in re.findall(r"edgellm serve[^\n`]*", text + UNIT):
        named.update(re.findall(r"(?<= )--?[a-z-]+", command))
    named.update(re.findall(r'"(--[a-z-]+)"', DOCKERFILE.replace('"--help"', "")))
    assert len(named) > 5 and named <= known
    paths = set(re.findall(r"`(/[a-z/]+)`", text)) - {"/cache", "/var/cache/edgellm"}
    assert {"/readyz", "/livez", "/metrics"} <= paths <= {each.path for each in ROUTES}


def test_the_unit_waits_for_the_drain() -> None:
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
    assert int(seconds) > DRAIN_SECONDS


def test_the_page_names_the_files() -> None:
    text = PAGE.read_text()
    assert {path.name for path in RECIPES.iterdir()} == set(re.findall(r"\(deploy/([^)]+)\)", text))


def test_the_dockerfile_names_what_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert re.findall(r"/source\[(\w+)\]", DOCKERFILE) == ["server"]
    assert "server" in project["optional-dependencies"] and "edgellm" in project["scripts"]
    (asked,) = re.findall(r"127.0.0.1:8080(/\w+)", DOCKERFILE)
    assert asked in PUBLIC and asked in {each.path for each in ROUTES}
    assert "ENV EDGELLM_CACHE=/cache" in DOCKERFILE and "VOLUME /cache" in DOCKERFILE


@pytest.mark.slow
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("there is no systemd-analyze here")
    unit = tmp_path / "edgellm.service"
    unit.write_text(UNIT.replace("/opt/edgellm/bin/edgellm", sys.executable))
    done = subprocess.run([analyze, "verify", unit], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# ---- nginx ---------------------------------------------------------------------------------------


class Server:
    """`edgellm serve` on a tiny model. ``name`` is what its replies call the model."""

    def __init__(self, model: Path, name: str) -> None:
        command = [sys.executable, "-m", "edgellm", "serve", model, "-a", name, "--port", "0",
                   "-np", "2", "--max-queue", "1", "-t", "1", "--allowed-host", HOST]  # fmt: skip
        self.name = name
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        line = next(line for line in self.process.stderr if "http://" in line)
        self.address = line.split("http://")[1].split("/")[0]
        until(self.is_ready, 20)

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"http://{self.address}/readyz").status_code == 200
        except httpx.HTTPError:
            return False

    def n_running(self) -> float:
        text = httpx.get(f"http://{self.address}/metrics").text
        (value,) = re.findall(r"^edgellm:num_requests_running\{.*\} (\S+)$", text, re.MULTILINE)
        return float(value)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


def until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def nginx() -> str:
    found = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin")
    if found is None:
        pytest.skip("there is no nginx here")
    return found


@pytest.fixture(scope="module")
def servers(tiny_model: Callable[..., Path], nginx: str) -> Iterator[dict[str, Server]]:
    model = tiny_model("llama", n_ctx=8192)
    started: dict[str, Server] = {}
    try:
        for name in ("one", "two"):
            started[name] = Server(model, name)
        yield started
    finally:
        for server in started.values():
            server.stop()


@pytest.fixture(scope="module")
def front(
    nginx: str, servers: dict[str, Server], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """Asks nginx."""
    folder = tmp_path_factory.mktemp("nginx")
    with listen("127.0.0.1", 0) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    text = NGINX
    for old, new in {
        "listen 80;": f"listen {address};", "192.0.2.11:8080": servers["one"].address,
        "192.0.2.12:8080": servers["two"].address,
    }.items():  # fmt: skip
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "edgellm.conf").write_text(text)
    user = "user root;" if os.geteuid() == 0 else ""
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off; {user} pid {folder}/pid; error_log {folder}/error.log; events {{}}\n"
        f"http {{ access_log off; {temporary} include {folder}/edgellm.conf; }}\n"
    )
    command = [nginx, "-c", folder / "nginx.conf", "-e", folder / "error.log"]
    with subprocess.Popen(command) as process:
        with httpx.Client(base_url=f"http://{address}", headers={"host": HOST}, timeout=30) as http:
            until(lambda: (folder / "pid").exists() and bool((folder / "pid").read_text()), 10)
            yield http
        process.send_signal(signal.SIGTERM)


def body(max_tokens: int, **more: object) -> dict[str, object]:
    return {"prompt": "Once", "max_tokens": max_tokens, "temperature": 0, **more}


def server_of(front: httpx.Client, session: str | None) -> str:
    headers = {} if session is None else {"x-session-id": session}
    reply = front.post("/v1/completions", json=body(1), headers=headers)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["model"])


def session_at(front: httpx.Client, name: str) -> dict[str, str]:
    """The header of a session that a server has."""
    return {"x-session-id": next(f"s{n}" for n in range(64) if server_of(front, f"s{n}") == name)}


@pytest.mark.slow
def test_sessions_stay(front: httpx.Client) -> None:
    homes = {f"s{n}": {server_of(front, f"s{n}") for _ in range(3)} for n in range(12)}
    assert all(len(home) == 1 for home in homes.values())
    assert set.union(*homes.values()) == {"one", "two"}
    assert len({server_of(front, None) for _ in range(6)}) == 1  # all of this address


@pytest.mark.slow
def test_tokens_come_as_they_are_made(front: httpx.Client) -> None:
    pieces: list[bytes] = []
    times = []
    with front.stream("POST", "/v1/completions", json=body(4000, stream=True)) as reply:
        for piece in reply.iter_raw():
            pieces.append(piece)
            times.append(time.monotonic())
    n_events = b"".join(pieces).count(b"data: {")
    assert n_events > 1000
    # gathered by a buffer or a compressor they would be few, and late
    assert len(pieces) > n_events / 8
    assert times[len(times) // 2] - times[0] > 0.25 * (times[-1] - times[0])


@pytest.mark.slow
def test_who_leaves_is_missed_and_who_is_too_many_is_told(
    front: httpx.Client, servers: dict[str, Server]
) -> None:
    headers = session_at(front, "one")
    held = [
        front.stream("POST", "/v1/completions", json=body(8000, stream=True), headers=headers)
        for _ in range(2)
    ]
    assert [each.__enter__().status_code for each in held] == [200, 200]
    assert servers["one"].n_running() == 2
    over = front.post("/v1/completions", json=body(1, n=2, temperature=1), headers=headers)
    assert over.status_code == 429 and int(over.headers["retry-after"]) > 0
    assert over.json()["error"]["type"] == "rate_limit_error"
    for each in held:
        each.__exit__(None, None, None)
    until(lambda: servers["one"].n_running() == 0, 3)


@pytest.mark.slow
def test_the_other_server_answers_when_one_is_killed(
    front: httpx.Client, servers: dict[str, Server]
) -> None:
    headers = session_at(front, "one")
    servers["one"].stop()
    for _ in range(5):
        reply = front.post("/v1/completions", json=body(1), headers=headers)
        assert (reply.status_code, reply.json()["model"]) == (200, "two")
