"""/v1/messages as Anthropic's own client sees it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from anthropic import Anthropic, BadRequestError, NotFoundError
from offers import CITY, HERMES

from edgellm.server.anthropic import chat_request
from edgellm.server.anthropic_schemas import MessagesRequest
from edgellm.server.safety import Guard

ASK: Any = [{"role": "user", "content": "hello"}]
GREEDY = {"temperature": 0}  # which the client itself no longer has
MESSAGES = "/v1/messages"
WEATHER: Any = {"name": "weather", "input_schema": CITY}
THINKING = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}<think>\n"


def client_of(server: Any) -> Anthropic:
    return Anthropic(base_url=server.url, api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def client(server: Any) -> Anthropic:
    return client_of(server)


def test_a_message_streamed_and_whole(client: Anthropic) -> None:
    asked: Any = {"model": "tiny", "messages": ASK, "max_tokens": 12, "extra_body": GREEDY}
    whole = client.messages.create(**asked)
    assert whole.id.startswith("msg_") and whole.stop_reason in ("end_turn", "max_tokens")
    assert 0 < whole.usage.output_tokens <= 12
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert [b.to_dict() for b in streamed.content] == [b.to_dict() for b in whole.content]
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    n = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    assert streamed.usage.input_tokens == 1 and streamed.usage.cache_read_input_tokens == n - 1
    counted = client.messages.count_tokens(model="tiny", messages=ASK)
    assert counted.input_tokens == n


def test_the_wire_of_a_stream(server: Any) -> None:
    body = {"messages": ASK, "max_tokens": 4, "stream": True}
    with server.http.stream("POST", MESSAGES, json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    names, events = lines[::2], [json.loads(line[6:]) for line in lines[1::2]]
    assert names == [f"event: {event['type']}" for event in events]
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start" and kinds[1] == "content_block_start"
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[-2]["delta"]["stop_reason"] and events[-2]["usage"]["output_tokens"] <= 4


def test_thinking_is_a_block_of_its_own(start: Callable[..., Any]) -> None:
    client = client_of(start(template=THINKING))
    asked: Any = {"model": "tiny", "messages": ASK, "max_tokens": 40, "extra_body": GREEDY,
                  "thinking": {"type": "enabled", "budget_tokens": 8}}  # fmt: skip
    whole = client.messages.create(**asked)
    assert [block.type for block in whole.content] == ["thinking", "text"]
    with client.messages.stream(**asked) as stream:
        assert stream.get_final_message().to_dict()["content"] == whole.to_dict()["content"]


def test_a_stop_sequence_is_named(client: Anthropic) -> None:
    asked: Any = {"model": "tiny", "messages": ASK, "max_tokens": 30, "extra_body": GREEDY}
    [block] = client.messages.create(**asked).content
    stop = block.to_dict()["text"][4:6]  # type: ignore[index]
    cut = client.messages.create(**asked, stop_sequences=[stop])
    assert cut.stop_reason == "stop_sequence" and cut.stop_sequence == stop


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_call_that_has_to_be(start: Callable[..., Any], choice: dict[str, Any]) -> None:
    client = client_of(start(template=HERMES, n_ctx=2048))
    asked: Any = {
        "model": "tiny", "messages": ASK, "tools": [WEATHER], "max_tokens": 300,
        "extra_body": GREEDY, "tool_choice": {**choice, "disable_parallel_tool_use": True},
    }  # fmt: skip
    whole = client.messages.create(**asked)
    [call] = whole.content
    assert whole.stop_reason == "tool_use" and call.type == "tool_use"
    assert call.name == "weather" and list(call.input) == ["city"]
    with client.messages.stream(**asked) as stream:
        [streamed] = stream.get_final_message().content
    assert streamed.type == "tool_use" and streamed.input == call.input
    back: Any = [
        *ASK,
        {"role": "assistant", "content": [call.to_dict()]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]},
    ]  # fmt: skip
    more = client.messages.create(model="tiny", messages=back, tools=[WEATHER], max_tokens=5)
    assert more.usage.output_tokens


def test_blocks_become_messages() -> None:
    body = MessagesRequest.model_validate({
        "max_tokens": 1, "system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "u"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": "x"},
                {"type": "text", "text": "v"},
                {"type": "tool_use", "id": "i", "name": "f", "input": {"k": 1}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "i",
                 "content": [{"type": "text", "text": "r"}]},
                {"type": "text", "text": "w"}]},
        ],
    })  # fmt: skip
    call = {"id": "i", "type": "function", "function": {"name": "f", "arguments": '{"k": 1}'}}
    assert [m.model_dump(exclude_none=True) for m in chat_request(body).messages] == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "v", "tool_calls": [call], "reasoning_content": "t"},
        {"role": "tool", "content": "r", "name": "f", "tool_call_id": "i"},
        {"role": "user", "content": "w"},
    ]


def test_a_changing_billing_line_does_not_cost_the_cache(server: Any) -> None:
    def ask(cch: str, blocks: bool) -> Any:
        line = f"x-anthropic-billing-header: cc_version=2.1.{cch}; cc_entrypoint=cli; cch={cch};"
        rest = "You are of help." * 8
        parts = [{"type": "text", "text": line}, {"type": "text", "text": rest}]
        body = {"messages": ASK, "max_tokens": 1, "system": parts if blocks else f"{line}\n{rest}"}
        return server.post(MESSAGES, body).json()["usage"]

    first = ask("aaaaa", True)
    for usage in (ask("b1b1b", True), ask("c", False)):
        assert usage["input_tokens"] == 1
        assert usage["cache_read_input_tokens"] > 100
        assert sum(usage.values()) == sum(first.values())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 2}, "temperature"), ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [
            {"type": "image"}]}]}]}, "messages.0.content.0.content.0"),
        ({"tools": [{"name": ""}]}, "tools.0.name"), ({"tool_choice": {"type": "tool"}}, "name"),
        ({"tools": [{"type": "web_search", "name": "w"}]}, "tools.0"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ],
)  # fmt: skip
def test_a_field_at_fault_is_named(server: Any, change: dict[str, Any], named: str) -> None:
    answer = server.post(MESSAGES, {"messages": ASK, "max_tokens": 1, **change})
    found = answer.json()
    assert answer.status_code == 400 and found["type"] == "error"
    assert found["error"]["type"] == "invalid_request_error" and named in found["error"]["message"]


def test_errors_in_their_shape(client: Anthropic, start: Callable[..., Any]) -> None:
    with pytest.raises(NotFoundError) as caught:
        client.messages.create(model="other", messages=ASK, max_tokens=1)
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(BadRequestError, match="invalid_request_error"):
        client.messages.create(
            model="tiny", messages=[{"role": "user", "content": "x" * 600}], max_tokens=1
        )
    guarded = start(Guard(keys=("secret",)))
    answer = guarded.post(MESSAGES, {"messages": ASK, "max_tokens": 1})
    assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
    keyed = guarded.post(
        MESSAGES, {"messages": ASK, "max_tokens": 1}, headers={"x-api-key": "secret"}
    )
    assert keyed.status_code == 200
