"""Rule 6 for a whole model: the same bits in any chunks, with any company and team."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm import LLM, SamplingParams
from edgellm.runner import Run

PARAMS = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)


def in_chunks(llm: LLM, tokens: list[int], size: int) -> NDArray[np.float32]:
    """Logits after the last token of a prompt that is computed ``size`` tokens at a time."""
    runner, sequence = llm._ready(), llm.sequence(tokens, PARAMS)
    assert runner.cache.admit(sequence, reuse=False)
    try:
        for start in range(0, len(tokens), size):
            n = min(size, len(tokens) - start)
            row = runner.forward([Run(sequence, n, "last")])[0].copy()
        return row
    finally:
        runner.cache.release(sequence)


def tokens_of(seed: int, n: int, n_vocab: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, n_vocab, n).tolist()


def check_invariance(path: Path, n: int, **options: Any) -> None:
    with (
        LLM(path, n_ctx=1024, n_threads=1, **options) as one,
        LLM(path, n_ctx=1024, n_threads=2, **options) as two,
    ):
        tokens = tokens_of(1, n, one.n_vocab)
        whole = two.logits(tokens)
        assert np.array_equal(one.logits(tokens), whole), "threads"
        for size in (1, 7, 32, 256):
            assert np.array_equal(in_chunks(two, tokens, size), whole[-1]), size
        runner = two._ready()
        sequences = [two.sequence(tokens_of(s, n - 8 * s, two.n_vocab), PARAMS) for s in range(8)]
        sequences[3] = two.sequence(tokens, PARAMS)
        for s in sequences:
            assert runner.cache.admit(s, reuse=False)
        # prompts of all eight in ragged chunks, then all eight token by token
        while any(s.n_waiting > 1 for s in sequences):
            runner.forward(
                [Run(s, min(29, s.n_waiting - 1), "none") for s in sequences if s.n_waiting > 1]
            )
        rows = runner.forward([Run(s, 1, "last") for s in sequences])
        assert np.array_equal(rows[3], whole[-1]), "batch of 8"
        for s in sequences:
            runner.cache.release(s)
