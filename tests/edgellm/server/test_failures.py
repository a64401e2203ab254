"""What users of other servers report as the worst failures (D6, D7, D9, D11; the others are in
test_server, D15 in test_model_file)."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASK = [{"role": "user", "content": "hello"}]
PROMPTS: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "hello"}, CHAT: {"messages": ASK}}
BOTH = pytest.mark.parametrize("path", PROMPTS)
STREAMED = pytest.mark.parametrize("stream", [False, True])


def pieces_of(server: Any, path: str, body: dict[str, Any]) -> tuple[list[str], str]:
    """The texts of an answer, streamed if it is, and its finish_reason."""

    def text(choice: dict[str, Any]) -> str:
        said = choice.get("delta", choice.get("message", choice))
        return str(said.get("content") or "" if path == CHAT else choice["text"])

    asked = {**PROMPTS[path], **body}
    if not asked.get("stream"):
        [choice] = server.post(path, asked).json()["choices"]
        return [text(choice)], choice["finish_reason"]
    with server.http.stream("POST", path, json=asked) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
    choices = [chunk["choices"][0] for chunk in map(json.loads, lines) if chunk["choices"]]
    [reason] = [c["finish_reason"] for c in choices if c["finish_reason"]]
    return [text(choice) for choice in choices], reason


@BOTH
@STREAMED
def test_an_answer_that_ends_inside_a_character(server: Any, path: str, stream: bool) -> None:
    """D6: one replacement character, once, at the end."""
    whole = "€😀é"  # 3, 4 and 2 bytes, each a token
    for n in range(1, len(whole.encode()) + 1):
        body = {"regex": whole, "max_tokens": n, "stream": stream}
        texts, reason = pieces_of(server, path, body)
        part = whole.encode()[:n].decode(errors="ignore")
        is_cut = len(part.encode()) < n
        assert "".join(texts) == part + "\ufffd" * is_cut
        assert reason == ("stop" if n == len(whole.encode()) else "length")


@BOTH
@STREAMED
@pytest.mark.parametrize("length", [2, 3, 7])
def test_a_stop_string_over_several_tokens(
    server: Any, path: str, stream: bool, length: int
) -> None:
    """D7: nothing of it is ever shown; also where it ends with the last token there may be."""
    body = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "stream": stream}
    [text], _ = pieces_of(server, path, {**body, "regex": "[a-z]{40}", "stream": False})
    body["regex"] = "[a-z]{40}"
    for at in (0, 5, 17, 40 - length):
        stop = text[at : at + length]
        first = text.index(stop)
        for most in (40, first + length):
            texts, reason = pieces_of(server, path, {**body, "stop": stop, "max_tokens": most})
            assert "".join(texts) == text[:first] and reason == "stop"
    # what only begins like a stop string is shown in the end
    texts, _ = pieces_of(server, path, {**body, "stop": text[-1] + "0"})
    assert "".join(texts) == text


@BOTH
def test_usage_in_a_stream(server: Any, path: str) -> None:
    """D9: one chunk more, with usage and without choices, behind chunks without usage; then the
    end."""
    asked = {**PROMPTS[path], "max_tokens": 5, "ignore_eos": True, "stream": True}
    for options, is_wanted in (({"include_usage": True}, True), ({"include_usage": False}, False),
                               (None, False)):  # fmt: skip
        body = {**asked, "stream_options": options} if options else asked
        with server.http.stream("POST", path, json=body) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]" and lines.count("data: [DONE]") == 1
        chunks = [json.loads(line[6:]) for line in lines[:-1]]
        empty = [chunk for chunk in chunks if not chunk["choices"]]
        if not is_wanted:
            assert not empty and not any(chunk.get("usage") for chunk in chunks)
            continue
        assert empty == chunks[-1:] and empty[0]["usage"]["completion_tokens"] == 5
        assert all("usage" in chunk and chunk["usage"] is None for chunk in chunks[:-1])


def nested(kind: str, depth: int) -> str:
    """A body whose schema or grammar is that deep, as text: json.dumps would not write it."""
    schema = '{"type":"array","items":' * depth + "{}" + "}" * depth
    forms = {
        "json_schema": f'"json_schema":{schema}',
        "response_format": '"response_format":{"type":"json_schema","json_schema":{"name":"x",'
        f'"schema":{schema}}}}}',
        "tools": '"tools":[{"type":"function","function":{"name":"f","parameters":'
        f'{schema}}}}}],"tool_choice":"required"',
        "grammar": f'"grammar":"root ::= {"(" * depth}\\"a\\"{")" * depth}"',
        "regex": f'"regex":"{"(" * depth}a{")" * depth}"',
    }
    return f'{{"messages":[{{"role":"user","content":"hello"}}],"max_tokens":2,{forms[kind]}}}'


DEPTHS = [("json_schema", 60_000), ("response_format", 60_000), ("tools", 60_000),
          ("json_schema", 300), ("grammar", 30_000), ("regex", 8_000)]  # fmt: skip


@pytest.mark.parametrize(("kind", "depth"), DEPTHS)
def test_a_form_that_is_nested_without_end(server: Any, kind: str, depth: int) -> None:
    """D11: refused in a second, and who streams meanwhile notices nothing."""
    body = {"prompt": "hello", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
    expected = server.post(COMPLETIONS, body).json()["choices"][0]["text"]
    texts: list[str] = []

    def listen() -> None:
        texts.extend(pieces_of(server, COMPLETIONS, {**body, "stream": True})[0])

    other = threading.Thread(target=listen)
    other.start()
    begun = time.perf_counter()
    headers = {"content-type": "application/json"}
    answer = server.http.post(CHAT, content=nested(kind, depth), headers=headers)
    assert time.perf_counter() - begun < 5  # a second, on a machine that does nothing else
    assert answer.status_code == 400 and answer.json()["error"]["message"].endswith(".")
    other.join()
    assert "".join(texts) == expected
    assert server.http.get("/readyz").status_code == 200


def test_a_stream_that_leaves_the_queue_is_never_read(start: Callable[..., Any]) -> None:
    """D2, of a stream: it has its head already, but its prompt is never read."""
    one = start(n_ctx=2048, max_num_seqs=1)
    busy = {"prompt": "a", "ignore_eos": True, "max_tokens": 1500}
    holder = threading.Thread(target=one.post, args=(COMPLETIONS, busy))
    holder.start()
    one.until(lambda: bool(one.engine.running))
    prompts = one.llm.metrics.prompt_tokens
    body = {"prompt": "z" * 500, "stream": True}
    with one.http.stream("POST", COMPLETIONS, json=body) as answer:
        assert answer.status_code == 200
    one.until(lambda: one.engine.n_open == 1)
    holder.join()
    one.until(one.is_idle)
    assert one.llm.metrics.prompt_tokens == prompts


@STREAMED
def test_what_never_fits_is_refused_before_a_stream_begins(
    start: Callable[..., Any], stream: bool
) -> None:
    """D4"""
    small = start(n_ctx=512, cache_tokens=128)
    answer = small.post(COMPLETIONS, {"prompt": "x" * 300, "max_tokens": 5, "stream": stream})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "exceed_context_size_error"
    assert small.post(COMPLETIONS, {"prompt": "xy", "max_tokens": 5}).status_code == 200
