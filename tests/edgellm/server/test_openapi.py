"""What the server says and does is what /openapi.json says that it does. Besides, every other test
that asks a server has its replies checked (see conftest)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import architectures
import pytest
from contract import Contract, items
from offers import CITY, HERMES, WEATHER

from edgellm.server.routes import ROUTES
from edgellm.server.safety import Guard

ASK = [{"role": "user", "content": "hello"}]
SHORT = {"max_tokens": 6, "temperature": 0}
OLLAMA = {"model": "tiny", "options": {"num_predict": 6, "temperature": 0}}
THINKING = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}<think>\n"
TOOLS: Any = {"tools": [WEATHER], "tool_choice": "required"}
ANTHROPIC_TOOLS: Any = {
    "tools": [{"name": "weather", "input_schema": CITY}], "tool_choice": {"type": "any"},
    "max_tokens": 300, "temperature": 0,
}  # fmt: skip
RESPONSES_TOOLS: Any = {
    "tools": [{"type": "function", "name": "weather", "parameters": CITY, "strict": True}],
    "tool_choice": {"type": "function", "name": "weather"}, "max_output_tokens": 300,
}  # fmt: skip
# What makes replies of all shapes, by path; each is asked for whole and, where it can be, streamed.
ASKED: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"messages": ASK, **SHORT, "return_cache_report": True},
        {"messages": ASK, **SHORT, "n": 2, "stream_options": {"include_usage": True}},
        {"messages": ASK, **SHORT, "logprobs": True, "top_logprobs": 3},
        {"messages": ASK, **TOOLS, "max_tokens": 300, "seed": 4},
    ],
    "/v1/completions": [
        {"prompt": "hello", **SHORT, "return_cache_report": True},
        {"prompt": "hello", **SHORT, "n": 2, "stream_options": {"include_usage": True}},
        {"prompt": "hello", **SHORT, "logprobs": 3, "echo": True},
        {"prompt": "hello", "max_tokens": 0, "logprobs": 1, "echo": True},
        {"prompt": "hello", "max_tokens": 0, "echo": True},
        {"prompt": "hello", **SHORT, "return_cache_report": True, "return_progress": True},
    ],
    "/v1/messages": [
        {"messages": ASK, **SHORT},
        {"messages": ASK, **SHORT, "thinking": {"type": "enabled", "budget_tokens": 3}},
        {"messages": ASK, **SHORT, "return_cache_report": True},
        {"messages": ASK, **ANTHROPIC_TOOLS},
    ],
    "/v1/messages/count_tokens": [{"messages": ASK}],
    "/v1/responses": [
        {"input": "hello", "max_output_tokens": 6, "metadata": {"a": "b"}, "instructions": "x",
         "reasoning": {"effort": "low"}, "text": {"verbosity": "low", "format": {"type": "text"}}},
        {"input": "hello", **RESPONSES_TOOLS, "return_cache_report": True},
    ],
    "/v1/embeddings": [{"input": "hello"}, {"input": ["a", "b"], "encoding_format": "base64"}],
    "/api/chat": [
        {"messages": ASK, **OLLAMA},
        {"messages": ASK, **OLLAMA, "logprobs": True, "top_logprobs": 2, "think": True},
        {"messages": [], **OLLAMA}, {"messages": ASK, **OLLAMA, "return_cache_report": True},
    ],
    "/api/generate": [
        {"prompt": "hello", **OLLAMA}, {"prompt": "hello", **OLLAMA, "raw": True, "logprobs": True},
        {"prompt": "", **OLLAMA}, {"prompt": "hello", **OLLAMA, "suffix": "x"},
    ],
    "/api/embed": [{"model": "tiny", "input": ["a", "b"]}],
    "/api/show": [{"model": "tiny"}],
    "/infill": [
        {"input_prefix": "a", "input_suffix": "b", **SHORT},
        {"input_prefix": "a", "input_suffix": "b", **SHORT, "return_cache_report": True,
         "return_progress": True},
    ],
    "/tokenize": [{"content": "hé"}, {"content": "hé", "with_pieces": True}, {"prompt": "hé"}],
    "/detokenize": [{"tokens": [104, 105]}],
    "/apply-template": [{"messages": ASK}],
    "/models/load": [{"model": "tiny"}],
    "/models/unload": [{"model": "tiny"}],
}  # fmt: skip


@pytest.fixture(scope="module")
def servers(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """One that calls tools, one that thinks, one that fills gaps, one that embeds."""
    bert = architectures.write(tmp_path_factory.mktemp("models") / "bert.gguf", "bert")
    marks = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    encoder = start(path=bert)
    encoder.llm.tokenize = lambda text: [len(word) for word in text.split()]  # it has no vocabulary
    caller = start(template=HERMES, n_ctx=2048, slot_dir=tmp_path_factory.mktemp("slots"))
    return [caller, start(template=THINKING, controls=marks), encoder]


def asked(server: Any) -> Iterator[tuple[str, Any]]:
    for route in ROUTES:
        path = route.template.replace("{name}", "tiny").replace("{id}", "0")
        for action in ("save", "restore", "erase") if "{id}" in route.template else ():
            yield path, server.post(f"{path}?action={action}", {"filename": "kept"})
        if route.method == "GET":
            yield path, server.http.get(path)
        for body in ASKED.get(path, []):
            for stream in ({"stream": False}, {"stream": True}) if route.form else ({},):
                yield path, server.post(path, {**body, **stream})


def test_every_reply_is_what_the_document_says(servers: list[Any]) -> None:
    seen: dict[str, set[str]] = {}
    for server in servers:
        contract = Contract(server.http.get("/openapi.json").json())
        for path, reply in asked(server):
            contract.check(reply)
            if reply.status_code == 200:
                kind = reply.headers["content-type"].partition(";")[0]
                seen.setdefault(path, set()).add(kind)
    for route in ROUTES:
        if route.path == "/models/unload":  # it is pinned; test_many_models has others
            continue
        kinds = {route.media}
        kinds |= {route.form.media_type} if route.form else set()
        path = route.template.replace("{name}", "tiny").replace("{id}", "0")
        assert seen[path] == kinds, path


def test_the_contract_is_not_fulfilled_by_anything(server: Any) -> None:
    """The check itself: a field too much, one too few, and an event of another kind are found."""
    document = server.http.get("/openapi.json").json()
    contract = Contract(document)
    content = document["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    whole = server.post("/v1/chat/completions", {"messages": ASK, **SHORT}).json()
    schema = content["application/json"]["schema"]
    contract.validate(whole, schema)
    without = {key: value for key, value in whole.items() if key != "usage"}
    stream = server.post("/v1/messages", {"messages": ASK, **SHORT, "stream": True}).text
    other = next(iter(items(stream, "text/event-stream")))
    for value, kind in (({**whole, "more": 1}, schema), (without, schema),
                        (other, content["text/event-stream"]["itemSchema"])):  # fmt: skip
        with pytest.raises(Exception, match="more|usage|not valid"):
            contract.validate(value, kind)


@pytest.mark.parametrize("keys", [(), ("secret",)])
def test_every_method_of_every_path(start: Callable[..., Any], keys: tuple[str, ...]) -> None:
    """What is not there says so in the words of its API, and which methods there are."""
    server = start(Guard(keys=keys))
    headers = {"authorization": "Bearer secret"}
    for route in ROUTES:
        path = route.template.replace("{name}", "tiny")
        for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
            for body in ({}, {"content": b"x" * 100}):
                reply = server.http.request(method, path, headers=headers, **body)
                there = {route.method, "HEAD"} if route.method == "GET" else {route.method}
                if method in there:
                    assert reply.status_code != 405
                    assert reply.status_code < 500
                    continue
                assert reply.status_code == 405, (method, path)
                assert set(reply.headers["allow"].replace(" ", "").split(",")) == there
                if method != "HEAD":
                    assert_error(path, reply.json())


@pytest.mark.parametrize(
    "path", ["/nothing", "/v1/nothing", "/health/", "/v1/models/", "/v1/messages/x", "/api/x",
             "/a//", "/v1/chat/completions/", "/%00", "/%2e%2e/etc/passwd"],
)  # fmt: skip
def test_paths_that_are_not_there(server: Any, path: str) -> None:
    for method in ("GET", "POST", "HEAD", "OPTIONS", "DELETE"):
        reply = server.http.request(method, path)
        assert reply.status_code == 404, (method, path)
        if method != "HEAD":
            assert_error(path, reply.json())


def assert_error(path: str, body: dict[str, Any]) -> None:
    """In the words of the path's API: Ollama's text, Anthropic's and OpenAI's objects."""
    if path.startswith("/api/"):
        assert set(body) == {"error"} and isinstance(body["error"], str)
    elif path.startswith("/v1/messages"):
        assert body["type"] == "error" and set(body["error"]) == {"type", "message"}
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}


def test_keys_are_a_part_of_the_document(start: Callable[..., Any], server: Any) -> None:
    closed = start(Guard(keys=("secret",)))
    headers = {"authorization": "Bearer secret"}
    document = closed.http.get("/openapi.json", headers=headers).json()
    props = document["paths"]["/props"]["get"]
    assert props["security"] and "401" in props["responses"]
    health = document["paths"]["/health"]["get"]
    assert health["security"] == [] and "401" not in health["responses"]
    refused = closed.http.get("/props")
    assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
    open_one = server.http.get("/openapi.json").json()
    assert "401" not in open_one["paths"]["/props"]["get"]["responses"]


def test_the_document_is_an_openapi_document(server: Any) -> None:
    """Every reference leads somewhere, every operation has a name of its own."""
    document = server.http.get("/openapi.json").json()
    names = [o["operationId"] for path in document["paths"].values() for o in path.values()]
    assert len(set(names)) == len(names) == len(ROUTES)
    pending: list[Any] = [document]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if isinstance(reference := value.get("$ref"), str):
                kind, name = reference.removeprefix("#/components/").split("/")
                assert name in document["components"][kind]
            pending += value.values()
        elif isinstance(value, list):
            pending += value
