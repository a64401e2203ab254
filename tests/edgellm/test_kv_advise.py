"""kv-advise: its measures by hand, what it recommends, and whole runs on tiny models."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import architectures
import numpy as np
import pytest
from invariance import tokens_of

from edgellm import LLM
from edgellm.errors import EdgeLLMError
from edgellm.kv_advise import PAIRS, advise, compare, divergence, log_softmax, recommend

TEXT = "Some words that are no text of anybody. " * 12


def test_divergence_by_hand() -> None:
    p, q = (np.log(np.array([row], np.float32)) for row in ([0.5, 0.25, 0.25], [0.25, 0.5, 0.25]))
    assert divergence(p, q)[0] == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2))
    assert divergence(p, p)[0] == 0
    excluded = np.array([[0.0, -np.inf]], np.float32)
    assert divergence(excluded, np.log(np.array([[0.5, 0.5]], np.float32)))[0] == pytest.approx(
        math.log(2)
    )


def test_log_softmax_adds_up_to_one() -> None:
    rows = np.random.default_rng(0).standard_normal((3, 1000)).astype(np.float32) * 20
    assert np.allclose(np.exp(log_softmax(rows)).sum(axis=1), 1, atol=1e-5)


def row(type_k: str, type_v: str, n_bytes: int, kl: float) -> dict[str, object]:
    return {"type_k": type_k, "type_v": type_v, "bytes_per_token": n_bytes, "kl_mean": kl}


def test_the_smallest_cache_that_is_good_enough_is_recommended() -> None:
    rows = [row("f32", "f32", 200, 0), row("f16", "f16", 100, 0.001),
            row("q8_0", "q8_0", 53, 0.003), row("q8_0", "q4_0", 41, 0.009),
            row("q4_0", "q8_0", 41, 0.008), row("q4_0", "q4_0", 28, 0.5)]  # fmt: skip
    best, reason = recommend(rows)
    assert (best["type_k"], best["type_v"]) == ("q4_0", "q8_0")
    assert "at most 0.01 (0.008); 41 % of f16's bytes" in reason
    assert recommend(rows, 0.005)[0]["bytes_per_token"] == 53
    best, reason = recommend(rows[1:], 0.0001)
    assert best["type_k"] == "f16" and "no other cache" in reason


@pytest.mark.parametrize("name", ["qwen35", "gemma3"])
def test_its_steps_are_those_of_the_engine(
    tmp_path: Path, tiny_model: Callable[..., Path], name: str
) -> None:
    """With states and windows: the divergences follow from the engine's own logits."""
    path = tiny_model("gemma3", n_ctx=1024)
    if name == "qwen35":
        lengths = {"attention__key_length": 32, "attention__value_length": 32}
        path = architectures.write(tmp_path / "model.gguf", name, **lengths)
    tokens = tokens_of(2, 400, architectures.N_VOCAB)
    with LLM(path, n_ctx=400, max_num_seqs=len(PAIRS), n_threads=2) as llm:
        results = compare(llm, tokens)
    assert [(r.type_k, r.type_v) for r in results] == list(PAIRS)
    with LLM(path, n_ctx=400, type_k="f32", type_v="f32", n_threads=2) as llm:
        exact = log_softmax(llm.logits(tokens)[200:])
    for result in results:
        types = {"type_k": result.type_k, "type_v": result.type_v}
        with LLM(path, n_ctx=400, n_threads=2, **types) as llm:
            found = log_softmax(llm.logits(tokens)[200:])
        assert result.kl == pytest.approx(divergence(exact, found).tolist(), abs=1e-9)
        assert result.same_top == (exact.argmax(1) == found.argmax(1)).tolist()
        assert len(result.seconds) == 25
    assert sum(results[0].kl) == 0 and results[0].bytes_per_token > results[-1].bytes_per_token


def test_a_whole_run(tiny_model: Callable[..., Path]) -> None:
    found = advise(str(tiny_model("llama")), TEXT, 400)
    assert found["n_tokens"] == 400 and found["n_compared"] == 200 and not found["left_out"]
    assert [r["bytes_per_token"] for r in found["rows"]] == [
        256 * n // 32 for n in (128, 64, 34, 26, 26, 18)
    ]
    assert found["recommended"]["type_k"] in ("f16", "q8_0", "q4_0")


def test_what_cannot_be_compared_is_said(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(EdgeLLMError, match="The text has 11 tokens, too few"):
        advise(str(tiny_model("llama")), TEXT[:11], 400)
    bert = architectures.write(tmp_path / "bert.gguf", "bert")
    with pytest.raises(EdgeLLMError, match="bert keeps no cache"):
        advise(str(bert), TEXT, 400)
