"""/v1/responses as OpenAI's own client sees it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from offers import CITY, HERMES
from openai import BadRequestError, OpenAI

from edgellm.server.responses import chat_request
from edgellm.server.responses_schemas import ResponsesRequest

WEATHER: Any = {"type": "function", "name": "weather", "parameters": CITY}
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if enable_thinking != false %}<think>\n{% endif %}"
)


def client_of(server: Any) -> OpenAI:
    return OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def client(server: Any) -> OpenAI:
    return client_of(server)


def without_ids(response: Any) -> Any:
    found = response.to_dict()
    for item in found["output"]:
        del item["id"]
        item.pop("call_id", None)
    return found["output"]


def test_a_response_streamed_and_whole(client: OpenAI, server: Any) -> None:
    asked: Any = {"model": "tiny", "input": "hello", "max_output_tokens": 12, "temperature": 0,
                  "instructions": "s"}  # fmt: skip
    whole = client.responses.create(**asked)
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]
    body = {"messages": chat, "max_tokens": 12, "temperature": 0}
    same = server.post("/v1/chat/completions", body).json()
    assert whole.output_text == same["choices"][0]["message"]["content"]
    assert whole.usage and whole.usage.total_tokens == same["usage"]["total_tokens"]
    assert whole.status in ("completed", "incomplete")
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[:4] == ["response.created", "response.in_progress",
                         "response.output_item.added", "response.content_part.added"]  # fmt: skip
    assert kinds[-4:] == ["response.output_text.done", "response.content_part.done",
                          "response.output_item.done", f"response.{whole.status}"]  # fmt: skip
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert without_ids(events[-1].response) == without_ids(whole)


def test_the_wire_of_a_stream(server: Any) -> None:
    body = {"input": "hello", "max_output_tokens": 2, "stream": True}
    with server.http.stream("POST", "/v1/responses", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    events = [json.loads(line[6:]) for line in lines[1::2]]
    assert lines[::2] == [f"event: {event['type']}" for event in events]


def test_thinking_is_an_item_of_its_own(start: Callable[..., Any]) -> None:
    client = client_of(start(template=THINKING))
    asked: Any = {"model": "tiny", "input": "hello", "max_output_tokens": 20, "temperature": 0}
    whole = client.responses.create(**asked)
    assert [item.type for item in whole.output] == ["reasoning"]
    assert whole.usage and whole.usage.output_tokens_details.reasoning_tokens == 20
    assert whole.incomplete_details and whole.incomplete_details.reason == "max_output_tokens"
    events = list(client.responses.create(**asked, stream=True))
    assert events[-1].type == "response.incomplete"
    assert without_ids(events[-1].response) == without_ids(whole)
    plain = client.responses.create(**asked, reasoning={"effort": "none"})
    assert [item.type for item in plain.output] == ["message"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_call_that_has_to_be(start: Callable[..., Any], choice: Any) -> None:
    client = client_of(start(template=HERMES, n_ctx=2048))
    asked: Any = {
        "model": "tiny", "input": [{"role": "user", "content": "hello"}], "tools": [WEATHER],
        "tool_choice": choice, "parallel_tool_calls": False, "max_output_tokens": 300,
        "temperature": 0,
    }  # fmt: skip
    whole = client.responses.create(**asked)
    [call] = whole.output
    assert call.type == "function_call" and call.name == "weather" and call.call_id
    assert list(json.loads(call.arguments)) == ["city"]
    events = list(client.responses.create(**asked, stream=True))
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    assert without_ids(events[-1].response) == without_ids(whole)  # type: ignore[union-attr]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    back: Any = [*asked["input"], call.to_dict(), result]
    more = client.responses.create(model="tiny", input=back, tools=[WEATHER], max_output_tokens=5)
    assert more.usage and more.usage.output_tokens


def test_answers_in_a_form(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    done = client.responses.create(
        model="tiny", input="x", max_output_tokens=200,
        text={"format": {"type": "json_schema", "name": "x", "schema": schema}},
    )  # fmt: skip
    assert isinstance(json.loads(done.output_text)["a"], bool)


def test_items_become_messages() -> None:
    body = ResponsesRequest.model_validate({"input": [
        {"role": "developer", "content": [{"type": "input_text", "text": "d"}]},
        {"type": "message", "role": "user", "content": "u"},
        {"type": "reasoning", "id": "r", "summary": [],
         "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "message", "role": "assistant", "content": [
            {"type": "output_text", "text": "v"}]},
        {"type": "function_call", "call_id": "i", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "j", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "j", "output": "r"},
        {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"},
    ]})  # fmt: skip
    calls = [
        {"id": i, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for i, name in (("i", "f"), ("j", "g"))
    ]
    assert [m.model_dump(exclude_none=True) for m in chat_request(body).messages] == [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "v", "tool_calls": calls, "reasoning_content": "t"},
        {"role": "tool", "content": "r", "name": "g", "tool_call_id": "j"},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"), ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"), ({"input": [{"content": "x"}]}, "input.0.role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input.0.content.0.type"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)  # fmt: skip
def test_a_field_at_fault_is_named(client: OpenAI, change: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.responses.create(**{"model": "tiny", "input": "hello", **change})
    assert caught.value.param == param
