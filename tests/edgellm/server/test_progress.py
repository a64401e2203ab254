"""What a stream tells of a prompt that is being read, for clients that ask (`return_progress`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

CONTROLS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
WORDS = "abcdefgh" * 40
CASES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": WORDS}], "n": 2}),
    ("/v1/completions", {"prompt": WORDS, "logprobs": 1}),
    ("/infill", {"input_prefix": WORDS}),
]
IDS = [path for path, _ in CASES]


@pytest.fixture(scope="module")
def narrow(start: Callable[..., Any]) -> Any:
    """A server that reads 64 tokens in a step."""
    return start(n_ctx=2048, max_num_batched_tokens=64, controls=CONTROLS)


def chunks(server: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    asked = {**body, "stream": True, "max_tokens": 3, "temperature": 0}
    with server.http.stream("POST", path, json=asked) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") for line in answer.iter_lines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.parametrize(("path", "body"), CASES, ids=IDS)
def test_a_prompt_advances_step_by_step(narrow: Any, path: str, body: dict[str, Any]) -> None:
    asked = {**body, "cache_salt": "progress"}
    found = chunks(narrow, path, {**asked, "return_progress": True})
    told = [chunk["prompt_progress"] for chunk in found if "prompt_progress" in chunk]
    total = told[0]["total"]
    assert total >= 320 and all(p["total"] == total and p["cache"] == 0 for p in told)
    read = [p["processed"] for p in told]
    assert read == [0, *range(64, total, 64), total]
    times = [p["time_ms"] for p in told]
    assert times == sorted(times) and times[0] >= 0
    said = [i for i, c in enumerate(found) if "prompt_progress" not in c]
    last_told = max(i for i, c in enumerate(found) if "prompt_progress" in c)
    assert sum(i > last_told for i in said) >= 2  # the answer comes behind it
    # what is in the cache counts as read, as llama.cpp has it
    again = chunks(narrow, path, {**asked, "return_progress": True})
    told = [chunk["prompt_progress"] for chunk in again if "prompt_progress" in chunk]
    assert [(p["cache"], p["processed"]) for p in told] == [(total - 1, total - 1),
                                                            (total - 1, total)]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), CASES, ids=IDS)
def test_nobody_is_told_who_does_not_ask(narrow: Any, path: str, body: dict[str, Any]) -> None:
    for change in ({}, {"return_progress": False}):
        assert not any("prompt_progress" in chunk for chunk in chunks(narrow, path, body | change))
    whole = narrow.post(path, {**body, "max_tokens": 3, "return_progress": True, "temperature": 0})
    assert whole.status_code == 200 and "prompt_progress" not in whole.json()
