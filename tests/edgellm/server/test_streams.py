"""What the streams of all protocols have in common: silence, and ends that are errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from edgellm.server import sse

ASK = [{"role": "user", "content": "hello"}]
LONG: list[Any] = [
    ("/v1/chat/completions", {"messages": ASK, "temperature": 0}),
    ("/v1/messages", {"messages": ASK, "temperature": 0, "max_tokens": 1500}),
    ("/v1/responses", {"input": "hello", "temperature": 0}),
    ("/api/chat", {"model": "tiny", "messages": ASK, "options": {"temperature": 0}}),
    ("/infill", {"input_prefix": "hello", "temperature": 0}),
]
CONTROLS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")


@pytest.fixture(scope="module")
def slow(start: Callable[..., Any]) -> Any:
    """A server whose requests run out of time."""
    server = start(n_ctx=2048, controls=CONTROLS)
    server.service.request_seconds = 0.08
    return server


def objects(answer: Any) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.iter_lines()]
    return [json.loads(line) for line in lines if line.lstrip().startswith("{")]


def says(path: str, found: dict[str, Any]) -> str:
    """The message of an error in its protocol's form."""
    if path == "/v1/messages":
        assert found["type"] == "error" and found["error"]["type"] == "timeout_error"
        return str(found["error"]["message"])
    if path == "/api/chat":
        return str(found["error"])
    assert found["error"]["code"] == "timeout"
    return str(found["error"]["message"])


@pytest.mark.parametrize(("path", "body"), LONG)
def test_an_answer_that_fails_on_its_way(slow: Any, path: str, body: dict[str, Any]) -> None:
    with slow.http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        last = objects(answer)[-1]
    if path == "/v1/responses":
        assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
        last = last["response"]
    assert says(path, last)
    whole = slow.post(path, {**body, "stream": False})
    assert whole.status_code == 408 and says(path, whole.json())
    slow.until(slow.is_idle)


@pytest.mark.parametrize(("path", "body"), LONG)
def test_silence_is_filled(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """A long prompt keeps the stream silent; what fills it is no part of the answer."""
    server = start(n_ctx=2048, controls=CONTROLS, prefix_cache=False)
    text = json.dumps({**body, "stream": True, "max_tokens": 2}).replace("hello", "x" * 1900)
    headers = {"content-type": "application/json"}
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.005)
    with server.http.stream("POST", path, content=text, headers=headers) as answer:
        raw = "".join(answer.iter_text())
    filling = {"/v1/messages": 'data: {"type": "ping"}\n', "/api/chat": " {"}.get(path, "\n:\n")
    assert filling in "\n" + raw
    if path == "/api/chat":
        assert all(json.loads(line) for line in raw.splitlines() if line.strip())
