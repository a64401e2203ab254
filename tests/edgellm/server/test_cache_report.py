"""What the server says about its prefix cache, in the log and to clients; and the line of a client
that would make every prompt new."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

SYSTEM = "You are of help, and brief. " * 6
Build = Callable[[str, str], dict[str, Any]]


def _messages(system: str, user: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def _parts(system: str, user: str) -> list[dict[str, Any]]:
    texts = [{"type": "text", "text": line} for line in system.split("\n")]
    return [{"role": "system", "content": texts}, {"role": "user", "content": user}]


CHATS: dict[str, tuple[str, Build]] = {
    "chat": ("/v1/chat/completions", lambda s, u: {"messages": _messages(s, u)}),
    "chat of parts": ("/v1/chat/completions", lambda s, u: {"messages": _parts(s, u)}),
    "messages": ("/v1/messages", lambda s, u: {
        "system": s, "messages": [{"role": "user", "content": u}]}),
    "messages of parts": ("/v1/messages", lambda s, u: {
        "system": _parts(s, u)[0]["content"], "messages": [{"role": "user", "content": u}]}),
    "responses": ("/v1/responses", lambda s, u: {"instructions": s, "input": u}),
    "responses of items": ("/v1/responses", lambda s, u: {
        "input": [{"type": "message", "role": "developer", "content": s},
                  {"type": "message", "role": "user", "content": u}]}),
    "ollama chat": ("/api/chat", lambda s, u: {"messages": _messages(s, u)}),
    "ollama generate": ("/api/generate", lambda s, u: {"system": s, "prompt": u}),
}  # fmt: skip
ALL = pytest.mark.parametrize(("path", "build"), CHATS.values(), ids=CHATS)


def ask(server: Any, path: str, body: dict[str, Any], stream: bool) -> dict[str, Any]:
    """The report of a reply."""
    limit: dict[str, Any] = {"max_tokens": 2}
    if path == "/v1/responses":
        limit = {"max_output_tokens": 2}
    elif path.startswith("/api/"):
        limit = {"options": {"num_predict": 2}}
    asked = {"model": "tiny", **body, **limit, "stream": stream, "return_cache_report": True}
    if not stream:
        whole = server.post(path, asked)
        assert whole.status_code == 200, whole.text
        return dict(whole.json()["cache_report"])
    with server.http.stream("POST", path, json=asked) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines()]
    chunks = [json.loads(line) for line in lines if line.startswith("{")]
    chunks = [chunk.get("response", chunk) if path == "/v1/responses" else chunk
              for chunk in chunks]  # fmt: skip
    [report] = [chunk["cache_report"] for chunk in chunks if "cache_report" in chunk]
    return dict(report)


@pytest.fixture(scope="module")
def fresh(start: Callable[..., Any]) -> Any:
    return start(n_ctx=1024)


@ALL
def test_a_changing_header_line_does_not_cost_the_cache(
    fresh: Any, path: str, build: Build, request: pytest.FixtureRequest
) -> None:
    """Claude Code's billing line differs in every request."""
    user = f"hello from {request.node.callspec.id}"

    def system(cch: str) -> str:
        line = f"x-anthropic-billing-header: cc_version=2.1.{cch}; cc_entrypoint=cli; cch={cch};"
        return f"{line}\n{SYSTEM}"

    first = ask(fresh, path, build(system("aaaaa"), user), stream=False)
    for stream, cch in ((False, "b"), (True, "cccccccc")):
        again = ask(fresh, path, build(system(cch), user), stream)
        assert again["prompt_tokens"] == first["prompt_tokens"]
        assert again["cached_tokens"] == first["prompt_tokens"] - 1
    plain = ask(fresh, path, build(SYSTEM, user), stream=False)
    assert plain["cached_tokens"] == first["prompt_tokens"] - 1
    # the same line in what a user says is his
    said = ask(fresh, path, build(SYSTEM, system("d")), stream=False)
    assert said["prompt_tokens"] > first["prompt_tokens"] + 60


@ALL
@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_says_where_its_prompt_departs(
    fresh: Any, path: str, build: Build, stream: bool, request: pytest.FixtureRequest
) -> None:
    system = f"{request.node.callspec.id}: {SYSTEM}"
    ask(fresh, path, build(system, "the day is Monday, be brief"), stream)
    second = ask(fresh, path, build(system, "the day is Sunday, be brief"), stream)
    assert (second["message"], second["role"]) == (1, "user")
    assert second["common_tokens"] > 160 and second["cached_tokens"] > 120
    assert "Sunday" in second["explanation"] and "Monday" in second["explanation"]
    third = ask(fresh, path, build("now: " + system, "the day is Sunday, be brief"), stream)
    assert (third["message"], third["role"]) == (0, "system")


@ALL
def test_the_log_has_a_line_without_words(
    fresh: Any, path: str, build: Build, caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    system = f"{request.node.callspec.id}: {SYSTEM}"
    with caplog.at_level(logging.INFO, "edgellm.server"):
        for i, user in enumerate(("my secret is 1234", "my secret is 9876")):
            ask(fresh, path, build(system, user), stream=bool(i))
    fresh.until(fresh.is_idle)
    lines = [record.getMessage() for record in caplog.records if record.name == "edgellm.server"]
    assert len(lines) == 2 and all(line.startswith(f"{path}: ") for line in lines)
    assert all("prompt tokens were cached" in line for line in lines)
    assert lines[1].endswith(", in message 1 (user)") and "departs from" in lines[1]
    assert not any(word in line for line in lines for word in ("secret", "1234", "help"))


def test_a_first_request_has_nothing_to_depart_from(
    start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    server = start(n_ctx=512)
    path, build = CHATS["chat"]
    with caplog.at_level(logging.INFO, "edgellm.server"):
        first = ask(server, path, build(SYSTEM, "hello"), stream=False)
    assert first["common_tokens"] == first["cached_tokens"] == 0 and first["message"] is None
    [line] = [r.getMessage() for r in caplog.records if r.name == "edgellm.server"]
    assert "; 0 of " in line and line.endswith("no earlier request begins like it")


def test_prompts_that_are_no_chat(
    start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    server = start(n_ctx=1024, controls=("<fim_prefix>", "<fim_suffix>", "<fim_middle>"))
    for path, field in (("/v1/completions", "prompt"), ("/infill", "input_prefix")):
        with caplog.at_level(logging.INFO, "edgellm.server"):
            for stream in (False, True):
                ask(server, path, {field: f"{path} " * 9 + "one"}, stream)
                report = ask(server, path, {field: f"{path} " * 9 + f"two {stream}"}, stream)
                assert report["cached_tokens"] > 60 and report["message"] is None
        lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith(path)]
        assert len(lines) == 4 and all("prompt tokens were cached" in line for line in lines)


def test_messages_are_found_in_what_a_template_wrote() -> None:
    from edgellm.server.explained import Rendered

    text = "<s>[default]<u>ab</u><a></a><u>ab</u><a>"
    chat = Rendered(text, [], [("user", " ab\n"), ("assistant", ""), ("user", "ab")])
    places = {0: 0, text.index("ab"): 0, text.index("</u>"): 2, text.rindex("ab") + 1: 2}
    assert {place: chat.message_at(place) for place in places} == places
    assert chat.message_at(len(text)) == 2
