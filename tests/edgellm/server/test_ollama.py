"""/api/… as Ollama's own client sees it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from ollama import Client, ResponseError

from edgellm import __version__
from edgellm.server.safety import Guard

ASK: Any = [{"role": "user", "content": "hello"}]
GREEDY: Any = {"temperature": 0, "num_predict": 12}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}},
            "required": ["city"],
        },
    },
}
LLAMA = (
    '{% if tools %}"parameters": dictionary of argument name{{ tools }}{% endif %}'
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}<|assistant|>"
)
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if enable_thinking != false %}<think>\n{% endif %}"
)


@pytest.fixture(scope="session")
def client(server: Any) -> Client:
    return Client(host=server.url)


def test_a_chat_streamed_and_whole(client: Client) -> None:
    whole = client.chat(model="tiny:latest", messages=ASK, options=GREEDY)
    assert whole.done and whole.done_reason in ("stop", "length") and whole.eval_count
    assert whole.total_duration and whole.prompt_eval_duration
    assert whole.total_duration > 1000 * (whole.eval_count or 0)  # nanoseconds
    parts = list(client.chat(model="tiny", messages=ASK, options=GREEDY, stream=True))
    assert "".join(p.message.content or "" for p in parts) == whole.message.content
    assert [p.done for p in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == whole.eval_count
    assert parts[-1].prompt_eval_count == whole.prompt_eval_count


def test_lines_are_what_is_streamed_unless_asked_otherwise(server: Any) -> None:
    answer = server.post("/api/chat", {"model": "tiny", "messages": ASK, "options": GREEDY})
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert lines[-1]["done"] and lines[0]["message"]["role"] == "assistant"
    loaded = server.post("/api/generate", {"model": "tiny"}).json()
    assert loaded["done_reason"] == "load" and loaded["response"] == ""


def test_generate_with_the_template_and_without(client: Client, server: Any) -> None:
    chat = client.chat(
        model="tiny", messages=[{"role": "system", "content": "s"}, *ASK], options=GREEDY
    )
    mine = client.generate(model="tiny", prompt="hello", system="s", options=GREEDY)
    assert mine.response == chat.message.content
    raw = client.generate(model="tiny", prompt="hello", raw=True, options=GREEDY)
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 12}
    assert raw.response == server.post("/v1/completions", body).json()["choices"][0]["text"]
    parts = client.generate(model="tiny", prompt="hello", raw=True, options=GREEDY, stream=True)
    assert "".join(p.response or "" for p in parts) == raw.response


def test_answers_in_a_form(client: Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    options = {"num_predict": 200}
    done = client.chat(model="tiny", messages=ASK, format=schema, options=options)
    assert isinstance(json.loads(done.message.content or "")["a"], bool)
    assert client.generate(model="tiny", prompt="x", format="json", options=options).response


def test_thinking_by_request(start: Callable[..., Any]) -> None:
    client = Client(host=start(template=THINKING).url)
    options = {"temperature": 0, "num_predict": 30}
    yes = client.chat(model="tiny", messages=ASK, think=True, options=options).message
    assert yes.thinking and not yes.content
    no = client.chat(model="tiny", messages=ASK, think=False, options=options).message
    assert no.content and not no.thinking
    parts = client.chat(model="tiny", messages=ASK, think=True, options=options, stream=True)
    assert "".join(p.message.thinking or "" for p in parts) == yes.thinking


def test_tools(start: Callable[..., Any]) -> None:
    client = Client(host=start(template=LLAMA, n_ctx=2048).url)
    # a random model calls when nothing else is let through
    form: Any = {
        "type": "object",
        "properties": {
            "name": {"const": "weather"},
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 8}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
    asked: Any = {"model": "tiny", "messages": ASK, "tools": [WEATHER], "format": form,
                  "options": {"temperature": 0, "num_predict": 300}}  # fmt: skip
    message = client.chat(**asked).message
    [call] = message.tool_calls or []
    assert call.function.name == "weather" and list(call.function.arguments) == ["city"]
    parts = list(client.chat(**asked, stream=True))
    assert [c for p in parts for c in p.message.tool_calls or []] == [call]
    back = [*ASK, message, {"role": "tool", "tool_name": "weather", "content": "sunny"}]
    more = client.chat(model="tiny", messages=back, tools=[WEATHER], options=GREEDY)
    assert more.prompt_eval_count and more.message.role == "assistant"


def test_logprobs(client: Client) -> None:
    done = client.chat(model="tiny", messages=ASK, options=GREEDY, logprobs=True, top_logprobs=2)
    assert len(done.logprobs or []) == done.eval_count
    assert all(len(one.top_logprobs or []) == 2 for one in done.logprobs or [])


def test_small_endpoints(client: Client, server: Any) -> None:
    [model] = client.list().models
    assert model.model == "tiny" and model.size and model.details
    assert model.details.family == "llama" and model.details.format == "gguf"
    shown = client.show("tiny")
    assert shown.capabilities == ["completion"] and shown.template
    assert (shown.modelinfo or {})["llama.context_length"] == 2048
    [running] = client.ps().models
    assert running.model == "tiny" and running.context_length == 512
    assert server.http.get("/api/version").json() == {"version": __version__}


def test_embeddings_need_an_encoder(client: Client) -> None:
    with pytest.raises(ResponseError, match="encoder"):
        client.embed(model="tiny", input=["a", "b"])


@pytest.mark.parametrize(
    ("path", "change", "named"),
    [
        ("chat", {"options": {"temperature": -1}}, "options.temperature"),
        ("chat", {"options": {"num_predict": "7"}}, "options.num_predict"),
        ("chat", {"messages": [{"role": "x", "content": ""}]}, "messages.0.role"),
        ("chat", {"messages": [{"role": "user", "content": "", "images": ["aa"]}]}, "images"),
        ("chat", {"format": "xml"}, "format"), ("chat", {"top_logprobs": 2}, "top_logprobs"),
        ("chat", {"format": {"type": "nonsense"}}, ""),
        ("generate", {"prompt": "x", "context": [1, 2]}, "context"),
        ("show", {"model": 7}, "model"),
    ],
)  # fmt: skip
def test_a_field_at_fault_is_named(
    server: Any, path: str, change: dict[str, Any], named: str
) -> None:
    answer = server.post(f"/api/{path}", {"model": "tiny", "messages": ASK, **change})
    assert answer.status_code == 400 and list(answer.json()) == ["error"]
    assert named in answer.json()["error"]


def test_errors_in_their_shape(client: Client, start: Callable[..., Any]) -> None:
    with pytest.raises(ResponseError) as caught:
        client.chat(model="other", messages=ASK)
    assert caught.value.status_code == 404
    guarded = start(Guard(keys=("secret",)))
    answer = guarded.http.get("/api/tags")
    assert answer.status_code == 401 and isinstance(answer.json()["error"], str)
