"""The server as its clients see it: shapes, refusals, and what happens when they leave."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from offers import HERMES, WEATHER
from openai import BadRequestError, NotFoundError, OpenAI

from edgellm import SamplingParams
from edgellm.server.routes import ROUTES
from edgellm.server.safety import PUBLIC, Guard

ASK = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="session")
def client(server: Any) -> OpenAI:
    return OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = answer.json()["error"]
    assert found["message"].endswith(".") and found["type"]
    return found


# ---- shapes -------------------------------------------------------------------------------------


def test_a_chat_streamed_and_whole(client: OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": ASK, "max_tokens": 12, "seed": 3}
    whole = client.chat.completions.create(**asked)
    assert whole.id.startswith("chatcmpl-") and whole.choices[0].finish_reason in ("stop", "length")
    assert whole.usage is not None and whole.usage.completion_tokens <= 12
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    ends = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert ends[-1] == whole.choices[0].finish_reason and not any(ends[:-1])
    usages = [c.usage for c in chunks if c.usage is not None]
    assert len(usages) == 1 and not chunks[-1].choices
    assert usages[0].total_tokens == whole.usage.total_tokens
    assert usages[0].prompt_tokens_details.cached_tokens == usages[0].prompt_tokens - 1


def test_the_wire_of_a_stream(server: Any) -> None:
    with server.http.stream(
        "POST", CHAT, json={"messages": ASK, "stream": True, "max_tokens": 4}
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    last = json.loads(lines[-2][6:])
    assert last["choices"][0]["finish_reason"] and last["timings"]["predicted_n"] <= 4


def test_logprobs_without_alternatives(client: OpenAI, server: Any) -> None:
    """D8"""
    done = client.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=6, logprobs=True, temperature=0  # type: ignore[arg-type]
    )  # fmt: skip
    content = done.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content and all(token.top_logprobs == [] for token in content)
    for token in content:
        assert bytes(token.bytes or []).decode("utf-8", "replace") == token.token or not token.bytes
    with pytest.raises(BadRequestError, match="top_logprobs needs"):
        client.chat.completions.create(model="tiny", messages=ASK, top_logprobs=2)  # type: ignore[arg-type]


def test_several_choices(client: OpenAI) -> None:
    """D10"""
    done = client.chat.completions.create(
        model="tiny", messages=ASK, n=3, temperature=1.5, max_tokens=10, seed=1  # type: ignore[arg-type]
    )  # fmt: skip
    assert [c.index for c in done.choices] == [0, 1, 2]
    assert len({c.message.content for c in done.choices}) == 3
    assert done.usage is not None and done.usage.completion_tokens > 10


def test_the_same_greedy_request_five_times(start: Callable[..., Any]) -> None:
    """D5: the first finds nothing in the cache, the others everything."""
    fresh = start(n_ctx=512)
    body = {
        "messages": [{"role": "user", "content": "x" * 150}],
        "temperature": 0,
        "max_tokens": 20,
    }
    found = [fresh.post(CHAT, body).json() for _ in range(5)]
    assert len({f["choices"][0]["message"]["content"] for f in found}) == 1
    cached = [f["usage"]["prompt_tokens_details"]["cached_tokens"] for f in found]
    assert cached[0] == 0 and all(n == found[0]["usage"]["prompt_tokens"] - 1 for n in cached[1:])


def test_completions_score_their_prompt(client: OpenAI, server: Any) -> None:
    """lm-eval's way: echo, logprobs of the prompt, equal to what the model says in process."""
    tokens = server.llm.tokenize("the same text again")
    for prompt in ("the same text again", tokens):
        done = client.completions.create(
            model="tiny", prompt=prompt, echo=True, logprobs=2, max_tokens=1, temperature=0
        )
        found = done.choices[0].logprobs
        assert found is not None and found.token_logprobs and found.text_offset
        expected = server.llm.score(tokens, 2)
        assert found.token_logprobs[0] is None
        for mine, (_, logprob, _) in zip(
            found.token_logprobs[1 : len(tokens)], expected[1:], strict=True
        ):
            assert mine == pytest.approx(logprob, abs=1e-4)
        text = done.choices[0].text
        assert "".join(found.tokens or []) == text
        assert all(
            text[o:].startswith(t)
            for o, t in zip(found.text_offset, found.tokens or [], strict=True)
        )
    none = client.completions.create(model="tiny", prompt="ab", echo=True, max_tokens=0, logprobs=1)
    assert none.choices[0].text == "ab"
    several = client.completions.create(model="tiny", prompt=["ab", "cd"], n=2, max_tokens=3)
    assert [c.index for c in several.choices] == [0, 1, 2, 3]


def test_a_prompt_to_score_waits_for_a_seat(start: Callable[..., Any]) -> None:
    """It queues as others do, can run out of time, and leaves with its client."""
    small = start(n_ctx=512, max_num_seqs=1)
    slow = {"prompt": "x" * 40, "ignore_eos": True, "max_tokens": 400}
    score = {"prompt": "hello", "echo": True, "logprobs": 1, "max_tokens": 1}
    found: list[httpx.Response] = []
    others = [
        threading.Thread(target=lambda b=body: found.append(small.post("/v1/completions", b)))  # type: ignore[misc]
        for body in (slow, score, score, {**score, "prompt": ["a", "bc"], "max_tokens": 0})
    ]
    for other in others:
        other.start()
    small.until(lambda: small.engine.n_open >= 4)
    late = small.post("/v1/completions", {**score, "timeout": 0.01})
    assert late.status_code == 408
    for other in others:
        other.join()
    assert [reply.status_code for reply in found] == [200] * 4
    with pytest.raises(httpx.ReadTimeout):
        small.post("/v1/completions", {**score, "prompt": "y" * 500}, timeout=0.005)
    small.until(small.is_idle)


def test_scores_with_the_token_that_ends_the_text(server: Any) -> None:
    """lm-eval takes all but the last token for its own: there is always one of the answer."""
    end = server.llm.tokenizer.eog
    asked = {"prompt": "hello", "echo": True, "logprobs": 2, "max_tokens": 1}
    for stream in (False, True):
        body = {**asked, "stream": stream, "logit_bias": {str(token): 100 for token in end}}
        reply = server.post("/v1/completions", body)
        if stream:
            chunks = [json.loads(line[6:]) for line in reply.text.split("\n\n")[:-2]]
            parts = [chunk["choices"][0] for chunk in chunks]
        else:
            parts = [reply.json()["choices"][0]]
        assert parts[-1]["finish_reason"] == "stop"
        assert "".join(part["text"] for part in parts) == "hello"
        joined = {key: [x for part in parts for x in part["logprobs"][key]]
                  for key in parts[0]["logprobs"]}  # fmt: skip
        assert joined["tokens"] == [*"hello", "<|end|>"]
        assert joined["text_offset"] == [0, 1, 2, 3, 4, 5]
        assert joined["token_logprobs"][0] is None and joined["token_logprobs"][5] < 0
        assert all(len(top) == 2 for top in joined["top_logprobs"][1:])


def test_an_echo_alone(server: Any) -> None:
    for more in ({}, {"logprobs": 0}):
        body = {"prompt": "héllo", "echo": True, "max_tokens": 0, **more}
        whole = server.post("/v1/completions", body).json()
        assert whole["choices"][0]["text"] == "héllo"
        assert whole["choices"][0]["finish_reason"] == "length"
        assert whole["usage"]["completion_tokens"] == 0
        lines = server.post("/v1/completions", {**body, "stream": True}).text.split("\n\n")
        assert lines[-2] == "data: [DONE]"
        texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines[:-2]]
        assert "".join(texts) == "héllo"


def test_structured_answers(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    done = client.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=200,  # type: ignore[arg-type]
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )  # fmt: skip
    assert isinstance(json.loads(done.choices[0].message.content or "")["a"], bool)
    with pytest.raises(BadRequestError):
        client.chat.completions.create(
            model="tiny", messages=ASK,  # type: ignore[arg-type]
            response_format={"type": "json_schema", "json_schema": {
                "name": "x", "schema": {"type": "nonsense"}}},
        )  # fmt: skip


def test_small_endpoints(server: Any) -> None:
    http = server.http
    assert http.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert http.get("/v1/models/tiny").json()["meta"]["n_ctx"] == 512
    assert http.get("/v1/models/other").status_code == 404
    tokens = server.post("/tokenize", {"content": "héllo"}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json()["content"] == "héllo"
    theirs = server.post("/tokenize", {"prompt": "héllo", "add_special_tokens": False}).json()
    assert theirs == {"tokens": tokens, "count": 6, "max_model_len": 512}
    assert server.post("/detokenize", {"tokens": tokens}).json()["prompt"] == "héllo"
    for body in ({}, {"content": "a", "prompt": "b"}, {"content": None}):
        assert server.post("/tokenize", body).status_code == 400
    info = http.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"]) == ("<|start|>", "<|end|>")
    assert server.post("/tokenize", {"prompt": info["eos_token"]}).json()["tokens"] == [256]
    prompt = server.post("/apply-template", {"messages": ASK}).json()["prompt"]
    assert prompt == "<|user|>hello</s><|assistant|>"
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/livez").status_code == http.get("/readyz").status_code == 200
    assert http.get("/props").json()["total_slots"] == 4
    assert [s["is_processing"] for s in http.get("/slots").json()] == [False] * 4
    metrics = http.get("/metrics").text
    assert 'edgellm:generation_tokens_total{model_name="tiny"}' in metrics
    document = http.get("/openapi.json").json()
    assert set(document["paths"]) == {each.template for each in ROUTES}
    assert "input_schema" not in document and document["components"]["schemas"]["ChatRequest"]
    assert server.post("/v1/embeddings", {"input": "x"}).status_code == 400


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": 3}, "temperature"), ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"), ({"n": 9}, "n"), ({"n": 7}, "n"), ({"seed": 1 << 70}, "seed"),
        ({"messages": []}, "messages"), ({"messages": [{"role": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages.0.content.0.type"),
        ({"stop": [""]}, "stop.0"), ({"stop": ["x"] * 17}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias"), ({"top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ],
)  # fmt: skip
def test_a_field_out_of_range_is_named(server: Any, change: dict[str, Any], param: str) -> None:
    """S12, and S19: what is fetched from elsewhere is no content."""
    answer = server.post(CHAT, {"messages": ASK, **change})
    assert answer.status_code == 400 and error_of(answer)["param"] == param


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b'{"messages": NaN}', b'{"a": 1, "a": 2}', b'"' + b"x" * 100 + b'"',
     b"[" * 100_000, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b"\xff\xfe",
     b'{"seed": ' + b"9" * 5000 + b"}"],
)  # fmt: skip
def test_a_body_that_is_no_request(server: Any, raw: bytes) -> None:
    """S11"""
    answer = server.http.post(CHAT, content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    error_of(answer)


@pytest.mark.parametrize(
    "prompt", [[-1], [1 << 63], [258], [1.5], [[1], "x"], [], [[]], {"a": 1}, 7, [True]]
)
def test_token_ids_that_are_none(server: Any, prompt: Any) -> None:
    """D12"""
    answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
    assert answer.status_code == 400
    error_of(answer)


def test_a_prompt_that_can_never_fit(start: Callable[..., Any]) -> None:
    """D4: refused at once, and a small request behind it is served."""
    small = start(n_ctx=512, cache_tokens=128)
    answer = small.post("/v1/completions", {"prompt": "x" * 300, "max_tokens": 5})
    assert answer.status_code == 400 and error_of(answer)["type"] == "exceed_context_size_error"
    assert small.post("/v1/completions", {"prompt": "xy", "max_tokens": 5}).status_code == 200
    long = small.post("/v1/completions", {"prompt": "x" * 600})
    assert error_of(long)["n_prompt_tokens"] == 600 and error_of(long)["n_ctx"] == 512


def test_a_model_that_never_ends_stops_at_its_context(server: Any) -> None:
    """D13"""
    answer = server.post(CHAT, {"messages": ASK, "ignore_eos": True}).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 512


def test_unknown_models_and_paths(server: Any, client: OpenAI) -> None:
    with pytest.raises(NotFoundError):
        client.chat.completions.create(model="other", messages=ASK)  # type: ignore[arg-type]
    expected = [("GET", "/nothing", 404), ("GET", CHAT, 405), ("PUT", "/health", 405),
                ("HEAD", "/health", 200), ("OPTIONS", CHAT, 405)]  # fmt: skip
    for method, path, status in expected:
        assert server.http.request(method, path).status_code == status


def test_unknown_fields(server: Any, start: Callable[..., Any]) -> None:
    body = {"messages": ASK, "max_tokens": 1, "from_the_future": 1}
    assert server.post(CHAT, body).status_code == 200
    answer = start(app={"strict": True}).post(CHAT, body)
    assert answer.status_code == 400 and error_of(answer)["param"] == "from_the_future"


# ---- who may ask --------------------------------------------------------------------------------


def test_every_route_but_the_public_ones_wants_a_key(start: Callable[..., Any]) -> None:
    """D14, S06, S07"""
    closed = start(Guard(keys=("secret", "other")))
    for route in ROUTES:
        path = route.template.replace("{name}", "tiny").replace("{id}", "0")
        method = route.method
        answer = closed.http.request(method, path, json={} if method == "POST" else None)
        assert (answer.status_code == 401) == (path not in PUBLIC), path
        for header in ({"authorization": "Bearer other"}, {"x-api-key": "secret"}):
            kept = closed.http.request(
                method, path, json={} if method == "POST" else None, headers=header
            )
            assert kept.status_code != 401, path
    assert (
        closed.http.get("/v1/models", headers={"authorization": "Bearer wrong"}).status_code == 401
    )


def test_clients_with_other_keys_share_no_cache(start: Callable[..., Any]) -> None:
    closed = start(Guard(keys=("a", "b")))
    body = {"prompt": "y" * 100, "max_tokens": 1}
    cached = [
        closed.post("/v1/completions", body, headers={"authorization": f"Bearer {key}"}).json()
        ["usage"]["prompt_tokens_details"]["cached_tokens"] for key in "aab"
    ]  # fmt: skip
    assert cached == [0, 99, 0]


def test_hosts_origins_and_bodies(server: Any, start: Callable[..., Any]) -> None:
    """S02 to S05; S08 of bodies that do not say how long they are."""
    http = server.http
    assert http.get("/health", headers={"host": "evil.example"}).status_code == 403
    assert http.get("/health", headers={"origin": "http://evil.example"}).status_code == 403
    assert "access-control-allow-origin" not in http.get("/health").headers
    assert http.post(CHAT, content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
    coded = {"content-type": "application/json", "content-encoding": "gzip"}
    assert http.post(CHAT, content=b"{}", headers=coded).status_code == 415
    open_to = start(Guard(origins=("http://app.example",), most_body_bytes=1000))
    answer = open_to.http.get("/health", headers={"origin": "http://app.example"})
    assert answer.headers["access-control-allow-origin"] == "http://app.example"
    long = {"messages": [{"role": "user", "content": "x" * 2000}]}
    assert open_to.post(CHAT, long).status_code == 413

    def chunks() -> Any:
        for _ in range(20):
            yield b"x" * 100

    answer = open_to.http.post(CHAT, content=chunks(), headers={"content-type": "application/json"})
    assert answer.status_code == 413


def test_a_request_of_two_lengths_is_refused(server: Any) -> None:
    """S10: what would be another request behind it is not read."""
    second = b"GET /slots HTTP/1.1\r\nhost: localhost\r\n\r\n"
    head = (f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            "content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n")  # fmt: skip
    port = int(server.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(head.encode() + b"0\r\n\r\n" + second)
        answer = b""
        while part := connection.recv(65536):  # until the server closes it
            answer += part
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1") == 1


# ---- leaving, waiting, crowds -------------------------------------------------------------------


def leave(server: Any, body: dict[str, Any], after: float, path: str = CHAT) -> None:
    """Send a request and close the socket."""
    data = json.dumps(body).encode()
    head = (f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\n\r\n")  # fmt: skip
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as connection:
        connection.sendall(head.encode() + data)
        time.sleep(after)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": ASK, "ignore_eos": True}),
        ("/v1/messages", {"messages": ASK, "max_tokens": 400}),
        ("/v1/responses", {"input": "hello"}),
        ("/api/chat", {"model": "tiny", "messages": ASK}),
        ("/api/generate", {"model": "tiny", "prompt": "hello", "raw": True}),
    ],
)
def test_a_client_that_leaves_frees_its_seat(
    server: Any, stream: bool, path: str, body: dict[str, Any]
) -> None:
    """D1"""
    body = {**body, "stream": stream}
    steps = server.llm.metrics.steps
    threading.Thread(target=leave, args=(server, body, 0.15, path)).start()
    server.until(lambda: server.llm.metrics.steps > steps)
    time.sleep(0.15)
    assert server.until(server.is_idle) < 1.0


def test_a_client_that_leaves_the_queue_is_never_read(start: Callable[..., Any]) -> None:
    """D2"""
    one = start(n_ctx=2048, max_num_seqs=1)
    busy = {"messages": ASK, "ignore_eos": True, "max_tokens": 1500}
    holder = threading.Thread(target=one.post, args=(CHAT, busy))
    holder.start()
    one.until(lambda: bool(one.engine.running))
    prompts = one.llm.metrics.prompt_tokens
    leave(one, {"messages": [{"role": "user", "content": "z" * 500}]}, 0.1)
    holder.join()
    one.until(one.is_idle)
    assert one.llm.metrics.prompt_tokens == prompts


def test_a_full_queue_is_said_at_once(start: Callable[..., Any]) -> None:
    one = start(n_ctx=2048, max_num_seqs=1, max_queue=1)
    body = {"messages": ASK, "ignore_eos": True, "max_tokens": 600}
    threads = [threading.Thread(target=one.post, args=(CHAT, body)) for _ in range(2)]
    for thread in threads:
        thread.start()
    one.until(lambda: one.engine.n_open == 2)
    begun = time.perf_counter()
    answer = one.post(CHAT, body)
    assert time.perf_counter() - begun < 5
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) > 0
    other = one.post("/api/chat", {"model": "tiny", "messages": ASK})
    assert other.status_code == 503 and "wait already" in other.json()["error"]
    claude = one.post("/v1/messages", {"max_tokens": 1, "messages": ASK})
    assert claude.status_code == 429 and claude.json()["error"]["type"] == "rate_limit_error"
    assert one.http.get("/readyz").status_code == 503
    assert one.http.get("/livez").status_code == 200
    for thread in threads:
        thread.join()


def test_without_a_queue_the_seats_are_served(start: Callable[..., Any]) -> None:
    one = start(n_ctx=512, max_num_seqs=2, max_queue=0)
    assert one.http.get("/readyz").status_code == 200
    body = {"prompt": ["a", "b"], "max_tokens": 2}
    assert one.post("/v1/completions", body).status_code == 200
    answer = one.post("/v1/completions", {**body, "prompt": ["a"] * 3})
    assert answer.status_code == 400  # trying again would not help
    assert "at most 2" in error_of(answer)["message"]


def test_no_word_of_another(server: Any) -> None:
    """D3: many at once, each with its own prompt; a third leaves. Each gets what it gets alone."""
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    prompts = [f"nonce {i:04d} " * 3 for i in range(24)]
    alone = [c.text for c in server.llm.generate(prompts, params)]
    found: dict[int, str] = {}

    def ask(i: int) -> None:
        body = {"prompt": prompts[i], "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        with httpx.Client(base_url=server.url, timeout=60) as http:
            if i % 3 == 0:
                with http.stream(
                    "POST", "/v1/completions", json={**body, "stream": True}
                ) as answer:
                    next(answer.iter_lines())
                return
            found[i] = http.post("/v1/completions", json=body).json()["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(24)]
    random.Random(1).shuffle(threads)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: alone[i] for i in range(24) if i % 3}
    server.until(server.is_idle)


def test_health_answers_while_a_long_prompt_is_read(start: Callable[..., Any]) -> None:
    one = start(n_ctx=2048)
    body = {"prompt": "x" * 2000, "max_tokens": 1}
    thread = threading.Thread(target=one.post, args=("/v1/completions", body))
    thread.start()
    while thread.is_alive():
        assert one.http.get("/health").status_code == 200
    thread.join()


# ---- tools --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_call_that_has_to_be(start: Callable[..., Any], choice: Any) -> None:
    server = start(template=HERMES, n_ctx=2048)
    client = OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    asked: Any = {
        "model": "tiny", "messages": ASK, "tools": [WEATHER], "tool_choice": choice,
        "parallel_tool_calls": False, "max_tokens": 300, "seed": 4,
    }  # fmt: skip
    done = client.chat.completions.create(**asked)
    [call] = done.choices[0].message.tool_calls or []
    assert done.choices[0].finish_reason == "tool_calls" and done.choices[0].message.content is None
    assert call.function.name == "weather" and list(json.loads(call.function.arguments)) == ["city"]
    chunks = [c.choices[0] for c in client.chat.completions.create(**asked, stream=True)]
    deltas = [d for c in chunks for d in c.delta.tool_calls or []]
    assert deltas[0].id and deltas[0].function.name == "weather"
    assert "".join(d.function.arguments or "" for d in deltas) == call.function.arguments
    assert chunks[-1].finish_reason == "tool_calls"


def test_tools_that_cannot_be_asked_for(server: Any) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    for change in ({"tool_choice": "required"}, {"tools": [WEATHER], "tool_choice": other},
                   {"tools": [{"type": "function", "function": {}}]}):  # fmt: skip
        assert server.post(CHAT, {"messages": ASK, **change}).status_code == 400


def test_a_request_that_runs_out_of_time(server: Any) -> None:
    body = {"messages": ASK, "ignore_eos": True, "timeout": 0.02}
    answer = server.post(CHAT, body)
    assert answer.status_code == 408 and error_of(answer)["type"] == "timeout_error"
    with server.http.stream("POST", CHAT, json={**body, "stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert "timeout_error" in lines[-1]  # the last event is the error: no [DONE]
    server.until(server.is_idle)


def test_tools_for_a_template_that_knows_none(start: Callable[..., Any]) -> None:
    """They are told in the system message; calls and results of earlier turns become text."""
    server = start(n_ctx=2048)
    history = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "a", "type": "function",
             "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}]},
        {"role": "tool", "tool_call_id": "a", "content": "sun"},
    ]  # fmt: skip
    prompt = server.post("/apply-template", {"messages": history, "tools": [WEATHER]}).json()[
        "prompt"
    ]
    assert prompt.startswith("<|system|>") and '"name": "weather"' in prompt
    assert '{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call></s>' in prompt
    assert "<|user|><tool_response>\nsun\n</tool_response></s>" in prompt
    body = {"messages": history, "tools": [WEATHER], "tool_choice": "required", "max_tokens": 99,
            "parallel_tool_calls": False}  # fmt: skip
    answer = server.post(CHAT, body).json()["choices"][0]
    if answer["finish_reason"] == "tool_calls":
        assert answer["message"]["tool_calls"][0]["function"]["name"] == "weather"


def test_who_says_nothing_holds_no_place(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S09: heads have a deadline."""
    monkeypatch.setattr("edgellm.server.protocol.HEADER_SECONDS", 0.4)
    server = start(n_ctx=512)
    address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    for said in (b"", b"GET /hea"):
        with socket.create_connection(address) as connection:
            connection.sendall(said)
            connection.settimeout(20)
            begun = time.perf_counter()
            while connection.recv(1000):
                pass
            assert 0.2 < time.perf_counter() - begun < 8


def test_a_signal_ends_the_server_in_peace(tiny_model: Callable[..., Any], tmp_path: Any) -> None:
    """RF14: what is under way is finished, and the exit code is 0."""
    run = [sys.executable, "-m", "edgellm", "serve", str(tiny_model("llama", n_ctx=2048)),
           "--port", "0"]  # fmt: skip
    for number in (signal.SIGTERM, signal.SIGINT):
        with subprocess.Popen(run, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            line = next(line for line in process.stderr if "http://" in line)
            url = "http://" + line.split("http://")[1].split()[0]
            body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
            found = []
            with httpx.stream("POST", url + "/completions", json=body, timeout=30) as answer:
                for line in answer.iter_lines():
                    found += [line] if line else []
                    if len(found) == 3:
                        process.send_signal(number)
            assert found[-1] == "data: [DONE]"
            process.stderr.read()
            assert process.wait(10) == 0


def test_a_strict_tool_keeps_its_schema_or_is_refused(start: Callable[..., Any]) -> None:
    """Schemas of other tools help the model as far as they can."""
    schema = {"type": "object", "properties": {"x": {"not": {}}}, "required": ["x"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    body = {"messages": ASK, "tools": [tool], "tool_choice": "required", "max_tokens": 4}
    server = start(n_ctx=2048)
    answer = server.post(CHAT, body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "tools.0.function.parameters"
    assert "not" in error["message"]
    tool["function"]["strict"] = False
    assert server.post(CHAT, body).status_code == 200


def test_llama_servers_name_of_max_tokens(server: Any) -> None:
    for path, body in ((CHAT, {"messages": ASK}), ("/v1/completions", {"prompt": "a"})):
        answer = server.post(path, {**body, "n_predict": 3, "ignore_eos": True})
        assert answer.json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"echo": True, "logprobs": 2}, {"max_tokens": 0}])
def test_several_prompts_in_one_stream(server: Any, more: dict[str, Any]) -> None:
    """Each choice has the text that it has in a whole answer."""
    body = {"prompt": ["ab", "cde", "f"], "temperature": 0, "ignore_eos": True, "max_tokens": 5,
            "seed": 1, **({"echo": True} if "max_tokens" in more else {}), **more}  # fmt: skip
    whole = server.post("/v1/completions", body).json()["choices"]
    texts = ["" for _ in whole]
    ends = []
    with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line[6:])["choices"]
                texts[choice["index"]] += choice["text"]
                ends += [choice["index"]] * (choice["finish_reason"] is not None)
    assert texts == [choice["text"] for choice in whole]
    assert sorted(ends) == list(range(len(whole)))


def test_forms_that_cannot_be_are_told_in_the_words_of_the_api(server: Any) -> None:
    for name, value in (("json_schema", {"not": {}}), ("regex", "(?=a)"), ("grammar", "start: b")):
        answer = server.post(CHAT, {"messages": ASK, name: value})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == name
        assert "--" not in error["message"] and error["message"].endswith(".")
