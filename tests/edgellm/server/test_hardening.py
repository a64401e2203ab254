"""What the server bears from clients that are slow, many or malformed (S08 to S10, S17, S21, S23 of
the security checks, RF18)."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest

from edgellm.server.safety import Guard

CHAT = "/v1/chat/completions"
ASK = [{"role": "user", "content": "hello"}]
BODY = b'{"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}'
HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n".encode()
SECOND = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


def connect(server: Any) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=10)


def until_closed(connection: socket.socket) -> bytes:
    """What the server says until it closes the connection."""
    found = b""
    try:
        while part := connection.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return found


def exchange(server: Any, raw: bytes) -> bytes:
    with closing(connect(server)) as connection:
        connection.sendall(raw)
        return until_closed(connection)


# ---- S10, RF18: requests that two readers could understand differently ---------------------------

N = str(len(BODY)).encode()
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
SMUGGLED: dict[str, bytes] = {
    "CL.TE": HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "TE.CL": HEAD + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n" + CHUNKS,
    "TE.TE": HEAD + b"transfer-encoding: chunked\r\ntransfer-encoding: x\r\n\r\n" + CHUNKS,
    "TE of two": HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n" + CHUNKS,
    "TE with a tab": HEAD + b"transfer-encoding: \x0bchunked\r\n\r\n" + CHUNKS,
    "CL and another": HEAD + b"content-length: " + N + b"\r\ncontent-length: 5\r\n\r\n" + BODY,
    "CL twice": HEAD + (b"content-length: " + N + b"\r\n") * 2 + b"\r\n" + BODY,
    "CL as a list": HEAD + b"content-length: " + N + b", " + N + b"\r\n\r\n" + BODY,
    "CL with a sign": HEAD + b"content-length: +" + N + b"\r\n\r\n" + BODY,
    "CL below zero": HEAD + b"content-length: -1\r\n\r\n" + BODY,
    "CL in hex": HEAD + b"content-length: 0x10\r\n\r\n" + BODY,
    "space before colon": HEAD + b"content-length : " + N + b"\r\n\r\n" + BODY,
    "folded": HEAD + b"x-a: b\r\n c\r\ncontent-length: " + N + b"\r\n\r\n" + BODY,
    "folded length": HEAD + b"content-length:\r\n " + N + b"\r\n\r\n" + BODY,
    "bare LF": HEAD.replace(b"\r\n", b"\n") + b"content-length: " + N + b"\n\n" + BODY,
    "one bare LF": HEAD + b"x-a: b\ncontent-length: " + N + b"\r\n\r\n" + BODY,
    "bare CR": HEAD + b"x-a: b\rcontent-length: 0\r\ncontent-length: " + N + b"\r\n\r\n" + BODY,
    "NUL": HEAD + b"x-a: b\0c\r\ncontent-length: " + N + b"\r\n\r\n" + BODY,
    "no name": HEAD + b": x\r\ncontent-length: " + N + b"\r\n\r\n" + BODY,
    "chunk of no size": HEAD
    + b"transfer-encoding: chunked\r\n\r\nzz\r\n"
    + BODY
    + b"\r\n0\r\n\r\n",
    "chunk of -1": HEAD + b"transfer-encoding: chunked\r\n\r\n-1\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk of 2^88": HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"f" * 22 + b"\r\n" + BODY,
    "chunk too short": HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk bare LF": HEAD + b"transfer-encoding: chunked\r\n\r\n" + CHUNKS.replace(b"\r\n", b"\n"),
    "two hosts": HEAD + b"host: localhost\r\ncontent-length: " + N + b"\r\n\r\n" + BODY,
    "no host": HEAD.replace(b"host: localhost\r\n", b"") + b"content-length: 0\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/1.2": HEAD.replace(b"HTTP/1.1", b"HTTP/1.2") + b"content-length: 0\r\n\r\n",
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
}


@pytest.mark.parametrize("raw", SMUGGLED.values(), ids=SMUGGLED)
def test_a_request_of_two_readings_is_the_last(
    server: Any, raw: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """S10, RF18: 400, and what stands behind it on the connection is never read."""
    said = exchange(server, raw + SECOND)
    assert said.startswith(b"HTTP/1.1 400 ") and said.count(b"HTTP/1.1 ") == 1
    head, _, body = said.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower() and json.loads(body)["error"]["message"]
    assert not [r for r in caplog.records if r.exc_info]


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_good_requests_arrive_in_any_pieces(server: Any, size: int) -> None:
    raw = HEAD + b"content-length: " + N + b"\r\n\r\n" + BODY
    raw += HEAD + b"transfer-encoding: chunked\r\n\r\n" + CHUNKS
    raw += SECOND.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    with closing(connect(server)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(raw), size):
            connection.sendall(raw[at : at + size])
        said = until_closed(connection)
    assert said.count(b"HTTP/1.1 200 ") == 3


def test_a_bad_request_behind_a_good_one(server: Any) -> None:
    """Also where both came at once, and where the first was answered before its body was read."""
    bad = SECOND.replace(b"\r\n", b"\n")
    for first, status in (
        (SECOND, b"200"),
        (HEAD.replace(b"localhost", b"evil") + b"content-length: 5\r\n\r\n12345", b"403"),
    ):
        said = exchange(server, first + bad + SECOND)
        assert said.startswith(b"HTTP/1.1 " + status) and said.count(b"HTTP/1.1 ") == 2
        assert b"HTTP/1.1 400 " in said


# ---- S08: sizes ----------------------------------------------------------------------------------


def test_heads_and_bodies_have_limits(server: Any) -> None:
    """S08: 64 headers, 16 KiB of them, 8 KiB of URL, 8 MiB of body, nothing compressed."""
    http = server.http
    assert http.get("/health", headers={f"x-{i}": "a" for i in range(40)}).status_code == 200
    for headers in ({f"x-{i}": "a" for i in range(70)}, {"x-long": "a" * (17 << 10)}):
        answer = http.get("/health", headers=headers)
        assert answer.status_code == 400 and "headers" in answer.json()["error"]["message"]
    assert exchange(server, b"GET / HTTP/1.1\r\nx: " + b"a" * (40 << 10)).startswith(
        b"HTTP/1.1 400 "
    )
    long = http.get("/health?" + "a" * (9 << 10))
    assert long.status_code == 400 and "URL" in long.json()["error"]["message"]
    raw = HEAD + b"content-length: %d\r\n\r\n" % ((8 << 20) + 1)
    with closing(connect(server)) as connection:
        connection.sendall(raw)
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")
    for coding in ("gzip", "deflate", "br"):
        coded = {"content-type": "application/json", "content-encoding": coding}
        assert http.post(CHAT, content=BODY, headers=coded).status_code == 415


# ---- S09: time -----------------------------------------------------------------------------------


def test_a_body_that_does_not_come(start: Callable[..., Any]) -> None:
    """S09: the whole body has a deadline, and a rate below which it is not waited for."""
    impatient = start(Guard(body_seconds=0.4, body_grace_seconds=5.0))
    demanding = start(Guard(body_seconds=60, body_grace_seconds=0.4, least_body_rate=1000))
    for server in (impatient, demanding):
        with closing(connect(server)) as connection:
            connection.sendall(HEAD + b"content-length: 100000\r\n\r\n{")
            stop, begun = threading.Event(), time.perf_counter()

            def drip(to: socket.socket = connection, until: threading.Event = stop) -> None:
                while not until.wait(0.05):
                    try:
                        to.sendall(b" ")
                    except OSError:
                        return

            dripping = threading.Thread(target=drip)
            dripping.start()
            said = until_closed(connection)
            stop.set()
            dripping.join()
            assert said.startswith(b"HTTP/1.1 408 ") and b"connection: close" in said
            assert 0.3 < time.perf_counter() - begun < 5
    # who is fast enough is waited for beyond the grace
    with closing(connect(demanding)) as connection:
        connection.sendall(HEAD + b"connection: close\r\ncontent-length: 4070\r\n\r\n")
        connection.sendall(BODY.ljust(2070))
        time.sleep(1.0)
        connection.sendall(b" " * 2000)
        assert until_closed(connection).startswith(b"HTTP/1.1 200 ")


def test_an_idle_connection_is_closed(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S09: keep-alive has an end."""
    from edgellm.server import run

    assert run.configured(lambda: None).timeout_keep_alive == 30  # type: ignore[arg-type]
    monkeypatch.setattr(run, "_KEEP_ALIVE_SECONDS", 1)
    server = start()
    with closing(connect(server)) as connection:
        connection.sendall(SECOND)
        begun = time.perf_counter()
        assert until_closed(connection).startswith(b"HTTP/1.1 200 ")
        assert 0.5 < time.perf_counter() - begun < 5


@pytest.mark.parametrize("limits", [(3, None), (1000, 3)])
def test_connections_are_counted(
    start: Callable[..., Any], limits: tuple[int | None, int | None]
) -> None:
    """S09: of all clients together, and of each."""
    server = start(connections=limits)
    server.http.get("/health")  # holds one
    held = [connect(server), connect(server)]
    with closing(connect(server)) as connection:
        said = until_closed(connection)
    assert said.startswith(b"HTTP/1.1 503 ") and b"retry-after: " in said
    assert "connections" in json.loads(said.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert server.http.get("/health").status_code == 200
    for connection in held:
        connection.close()
    with closing(connect(server)) as connection:
        connection.sendall(SECOND)
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")


# ---- S23: readers that stop reading --------------------------------------------------------------


@pytest.fixture
def stalled(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Any, socket.socket]]:
    """A server with a client that asks for a long stream and reads nothing of it."""
    monkeypatch.setattr("edgellm.server.protocol.STALLED_SECONDS", 1.5)
    server = start(n_ctx=65536, max_num_seqs=3)
    # much to say of each token, and little room for it on the way
    body = {"messages": ASK, "stream": True, "logprobs": True, "top_logprobs": 20,
            "ignore_eos": True, "max_tokens": 60000}  # fmt: skip
    data = json.dumps(body).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(data) + data)
    yield server, connection
    connection.close()
    server.until(server.is_idle)


def test_a_stalled_reader_is_given_up(stalled: tuple[Any, socket.socket]) -> None:
    """S23: what is not read is not computed, others go on, and after a while that is the end."""
    server, connection = stalled
    server.until(lambda: bool(server.engine.running))
    [sequence] = server.engine.running
    server.until(lambda: sequence.is_resting, seconds=30)
    assert len(sequence.pieces) <= 256 and not sequence.is_cancelled
    n = len(sequence.tokens)
    other = server.post("/v1/completions", {"prompt": "abc", "max_tokens": 20})
    assert other.json()["usage"]["completion_tokens"] > 0
    assert server.http.get("/readyz").status_code == 200 and not server.engine.is_stalled
    server.until(lambda: sequence.finish_reason is not None, seconds=10)
    assert sequence.finish_reason == "abort" and len(sequence.tokens) - n < 500
    server.until(server.is_idle)
    until_closed(connection)


def test_a_slow_reader_gets_everything(start: Callable[..., Any]) -> None:
    """Who reads again in time misses nothing."""
    server = start(n_ctx=4096)
    body = {"prompt": "abc", "max_tokens": 2500, "ignore_eos": True, "temperature": 0}
    whole = server.post("/v1/completions", body).json()["choices"][0]["text"]
    with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        texts = []
        for i, line in enumerate(answer.iter_lines()):
            if i in (10, 1000):
                time.sleep(0.5)
            if line.startswith("data: {"):
                texts.append(json.loads(line[6:])["choices"][0]["text"])
    assert "".join(texts) == whole


# ---- S17, S21: what others may read --------------------------------------------------------------


def test_logs_and_metrics_hold_nothing_that_clients_wrote(
    start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """S17: no words of a prompt, no raw control characters. S21: no labels of a client's."""
    server = start(n_ctx=512, max_num_seqs=2)
    odd = "secret\x1b[31m\nline\u202e"
    before = server.http.get("/metrics").text
    labels = {line.partition(" ")[0] for line in before.splitlines() if line[:1] != "#"}
    with caplog.at_level(logging.DEBUG):
        for body in (
            {"messages": [{"role": "user", "content": odd}], "max_tokens": 2},
            {"messages": [{"role": odd, "content": odd}]},
            {"messages": ASK, "model": odd},
            {"messages": ASK, odd: 1, "user": odd, "max_tokens": 2, "cache_salt": odd},
            {"messages": ASK, "stop": [odd], "max_tokens": 2, "stream": True},
            {"messages": ASK, "response_format": {"type": "grammar", "grammar": odd}},
        ):
            server.post(CHAT, body)
        server.http.get("/v1/models/" + "secret%1b%5b31m")
        server.http.get("/nothing?" + "secret%0a", headers={"x-secret": "secret"})
    own = [r for r in caplog.records if r.name.startswith(("edgellm", "uvicorn"))]
    lines = [r.getMessage() for r in own]
    assert lines and not any(c in line for line in lines for c in "\x1b\n\u202e")
    named = [line for line in lines if "secret" in line]
    assert all(line.startswith("unknown field") for line in named)
    after = server.http.get("/metrics").text
    new = {line.partition(" ")[0] for line in after.splitlines() if line[:1] != "#"} - labels
    assert not any("secret" in label for label in new) and len(new) < 40


def test_a_fault_of_ours_tells_the_client_nothing(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """S15, S17: it gets a fixed sentence, the log the reason, with the path made harmless."""
    server = start(n_ctx=512)

    def fail(self: Any, name: str | None) -> str:
        raise RuntimeError("inner /secret/path")

    monkeypatch.setattr("edgellm.server.models.Models.find", fail)
    answer = httpx.get(server.url + "/v1/models/a%1bb")
    assert answer.status_code == 500 and "secret" not in answer.text
    [record] = [r for r in caplog.records if r.name == "edgellm.server"]
    assert record.exc_info and not any(c in record.getMessage() for c in "\x1b\n")


# ---- S01, S07: how it is started -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--host", "0.0.0.0"), "--api-key-file"), (("--host", "::"), "--insecure"),
        (("--api-key-file", "none.txt"), "--api-key-file"),
        (("--slot-save-path", "none"), "--slot-save-path"),
    ],
)  # fmt: skip
def test_what_it_is_not_started_with(
    tiny_model: Callable[..., Any], tmp_path: Any, flags: tuple[str, ...], said: str
) -> None:
    """S01: other machines are let in with a key only. S07: keys are no argument."""
    run = [sys.executable, "-m", "edgellm", "serve", str(tiny_model("llama")), "--port", "0"]
    environment = {k: v for k, v in os.environ.items() if k != "LLAMA_API_KEY"}
    done = subprocess.run(
        [*run, *flags], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    refused = subprocess.run(
        [*run, "--api-key", "secret"], cwd=tmp_path, env=environment, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert refused.returncode == 2
