"""Filling in the middle: /infill, suffix of /v1/completions and of Ollama's /api/generate."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")
PREFIX, SUFFIX, MIDDLE, FILE = range(258, 262)
GREEDY = {"temperature": 0, "max_tokens": 8}
ASK = {"input_prefix": "def f(", "input_suffix": "return <|fim_middle|>", **GREEDY}


@pytest.fixture(scope="session")
def coder(start: Callable[..., Any]) -> Any:
    return start(controls=MARKS, n_ctx=512)


def expected(server: Any, tokens: list[int]) -> str:
    answer = server.post("/v1/completions", {"prompt": tokens, **GREEDY}).json()
    text: str = answer["choices"][0]["text"]
    return text


def test_a_gap_is_filled_in_every_way(coder: Any) -> None:
    def ids(text: str) -> list[int]:
        found: list[int] = coder.llm.tokenize(text, add_special=False)
        return found

    before, after = ASK["input_prefix"], ASK["input_suffix"]
    # what a user wrote is no mark
    assert MIDDLE not in ids(str(after))
    gap = [PREFIX, *ids(str(before)), SUFFIX, *ids(str(after)), MIDDLE]
    text = expected(coder, gap)
    whole = coder.post("/infill", ASK).json()
    assert whole["content"] == text and whole["stop"] and whole["tokens_evaluated"] == len(gap)
    assert whole["stop_type"] in ("eos", "limit") and whole["tokens_predicted"] <= 8
    with coder.http.stream("POST", "/infill", json={**ASK, "stream": True}) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line]
    assert "".join(event["content"] for event in events) == text
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    for prompt in (before, ids(str(before))):
        done = coder.post("/v1/completions", {"prompt": prompt, "suffix": after, **GREEDY}).json()
        assert done["choices"][0]["text"] == text
    body = {"model": "tiny", "prompt": before, "suffix": after, "stream": False,
            "options": {"temperature": 0, "num_predict": 8}}  # fmt: skip
    assert coder.post("/api/generate", body).json()["response"] == text
    others = {**ASK, "prompt": "x", "input_extra": [{"filename": "a.py", "text": "b"}]}
    tokens = [FILE, *ids("a.py\nb\n"), FILE, *gap, *ids("x")]
    assert coder.post("/infill", others).json()["content"] == expected(coder, tokens)


def test_a_model_without_the_tokens_says_so(server: Any) -> None:
    for path, body in (
        ("/infill", ASK),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}),
        ("/api/generate", {"model": "tiny", "prompt": "a", "suffix": "b"}),
    ):
        answer = server.post(path, body)
        assert answer.status_code == 400 and "fill in the middle" in answer.text


def test_fields_at_fault_are_named(coder: Any) -> None:
    for change, param in (
        ({"n_predict": -2}, "n_predict"), ({"n": 2}, "n"), ({"input_prefix": 1}, "input_prefix"),
        ({"input_extra": [{"filename": "a"}]}, "input_extra.0.text"),
    ):  # fmt: skip
        answer = coder.post("/infill", {**ASK, **change})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param
