"""Context policy ring: sinks and a window, a function of position alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from loaded import loader
from numpy.typing import NDArray

from edgellm import LLM, SamplingParams
from edgellm.errors import EdgeLLMError
from edgellm.kernels import reference
from edgellm.kernels.graph import Op
from edgellm.llm import SINKS
from edgellm.models import build_graph
from edgellm.quant.gguf import GGUF

N_CTX = 100
WINDOW = N_CTX - SINKS
PARAMS = SamplingParams(max_tokens=150, temperature=0, ignore_eos=True)


def turn(x: NDArray[np.float32], by: NDArray[np.int64], base: float) -> NDArray[np.float32]:
    """Neighbouring pairs of [n, heads, dim] rotated by ``by`` [n] positions."""
    dim = x.shape[-1]
    angle = by[:, None, None] * base ** (-np.arange(0, dim, 2) / dim)
    pairs = x.astype(np.float64).reshape(*x.shape[:-1], dim // 2, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angle)
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape).astype(np.float32)


def ring_attention(op: Op, inputs: list[NDArray[np.float32]], step: reference.Step):  # type: ignore[no-untyped-def]
    """Slow and obvious: for each query, keys of the window as they are, and the sinks outside of
    it moved to right before the window."""
    a = op.attrs
    heads, kv_heads, dim = a["n_heads"], a["n_kv_heads"], a["head_dim"]
    q = inputs[0].reshape(-1, heads, dim)
    k, v = (x.reshape(-1, kv_heads, dim) for x in inputs[1:])
    out = np.empty_like(q)
    for p in range(len(q)):
        window = np.arange(max(0, p - WINDOW + 1), p + 1)
        sinks = np.array([j for j in range(SINKS) if j <= p - WINDOW], np.int64)
        # from position j to p - WINDOW - SINKS + 1 + j
        moved = turn(k[sinks], np.full(len(sinks), p - WINDOW - SINKS + 1), 10000.0)
        keys = np.concatenate([moved, k[window]])
        values = np.concatenate([v[sinks], v[window]])
        for h in range(heads):
            scores = keys[:, h * kv_heads // heads] @ q[p, h] * a["scale"]
            weights = np.exp(scores - scores.max())
            out[p, h] = weights @ values[:, h * kv_heads // heads] / weights.sum()
    return out.reshape(len(q), heads * dim)


def test_logits_agree_with_a_slow_and_obvious_ring(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model("llama")
    tokens = np.random.default_rng(0).integers(0, 258, 400)
    exact = {"n_threads": 2, "type_k": "f32", "type_v": "f32"}
    with LLM(path, n_ctx=N_CTX, context_policy="ring", **exact) as llm:
        found = llm.logits(tokens.tolist())
    monkeypatch.setitem(reference.OPS, "attention", ring_attention)
    with GGUF(path) as file:
        _, graph = build_graph(file)
        load = loader(file)
        expected = reference.run(graph, tokens, load)
    late = slice(N_CTX, None)
    error = ((found[late] - expected[late]) ** 2).sum() / (expected[late] ** 2).sum()
    assert error < 1e-3
    monkeypatch.undo()
    with LLM(path, n_ctx=400, **exact) as whole:
        other = whole.logits(tokens.tolist())
    assert ((found[late] - other[late]) ** 2).sum() > 10 * (
        (found[late] - expected[late]) ** 2
    ).sum()
    assert np.array_equal(found[:WINDOW], other[:WINDOW])


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "llama-moe"])
def test_tokens_depend_on_position_only(tiny_model: Callable[..., Path], architecture: str) -> None:
    path = tiny_model(architecture)
    with LLM(path, n_ctx=N_CTX, n_threads=2, context_policy="ring") as llm:
        first = llm.generate(list(range(60)), PARAMS)
        assert len(first.tokens) == 150 and llm.n_dropped == 110
        # a restart from what a session file keeps: everything so far is one prompt
        again = llm.generate(list(range(60)) + first.tokens[:90], PARAMS)
        assert again.tokens[:60] == first.tokens[90:]
        together = llm.generate([list(range(60)), [i % 258 for i in range(300)], [7]], PARAMS)
        assert together[0].tokens == first.tokens
        assert llm.is_idle


def test_a_long_generation_needs_no_more_memory(tiny_model: Callable[..., Path]) -> None:
    params = SamplingParams(max_tokens=3000, temperature=0, ignore_eos=True)
    with LLM(
        tiny_model("llama"), n_ctx=64, n_threads=1, max_num_seqs=1, context_policy="ring"
    ) as llm:
        stream = llm.stream([1, 2, 3], params)
        for _ in range(500):
            next(stream)
        before = psutil.Process().memory_info().rss
        assert sum(1 for _ in stream) == 2501
        assert psutil.Process().memory_info().rss - before < 4 << 20


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_thousand_tokens_of_a_real_model(real_model: Callable[[str], Path]) -> None:
    params = SamplingParams(max_tokens=10_000, temperature=0.8, seed=5, ignore_eos=True)
    path = real_model("SmolLM2")
    with LLM(path, n_ctx=512, n_threads=2, max_num_seqs=2, context_policy="ring") as llm:
        prompt = llm.tokenize("Once upon a time")
        stream = llm.stream(prompt, params)
        tokens = [next(stream).token for _ in range(1000)]
        before = psutil.Process().memory_info().rss
        tokens += [piece.token for piece in stream if piece.token is not None]
        assert len(tokens) == 10_000
        assert psutil.Process().memory_info().rss - before < 24 << 20  # the rope table's rows
        restart = SamplingParams(max_tokens=50, temperature=0.8, seed=5, ignore_eos=True)
        for at in (700, 6000, 9900):
            again = llm.generate(prompt + tokens[:at], restart)  # type: ignore[operator]
            assert again.tokens == tokens[at : at + 50]


def test_a_context_too_small_for_a_ring_is_refused(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(EdgeLLMError, match="at least 36 tokens"):
        LLM(tiny_model("llama"), n_ctx=20, context_policy="ring")
    with pytest.raises(EdgeLLMError, match="error or ring"):
        LLM(tiny_model("llama"), context_policy="shift")
