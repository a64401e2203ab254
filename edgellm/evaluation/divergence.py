"""How far one model's predictions are from another's over a text, both read together."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import EdgeLLMError
from edgellm.evaluation.perplexity import Perplexity, estimate
from edgellm.evaluation.text import Text, scan
from edgellm.llm import LLM

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)


@dataclass(frozen=True)
class Divergence:
    """By position that counts, [n_chunks, n]: `kl` from the first model's distribution to the
    second's, nats; `same_top`: whether both find the same token most likely; `surprises` of the
    text's own token under each."""

    kl: NDArray[np.float64]
    same_top: NDArray[np.bool_]
    surprises: tuple[NDArray[np.float64], NDArray[np.float64]]
    first: int  # position of the first column

    @property
    def perplexities(self) -> tuple[Perplexity, Perplexity]:
        a, b = self.surprises
        return estimate(a.reshape(-1)), estimate(b.reshape(-1))

    @property
    def perplexity_ratio(self) -> Perplexity:
        """Second over first; its error is that of the difference, since both read one text."""
        a, b = (s.reshape(-1) for s in self.surprises)
        return estimate(b - a)

    @property
    def mean_kl(self) -> float:
        return float(self.kl.mean())

    @property
    def kl_error(self) -> float:
        return float(self.kl.std(ddof=1) / math.sqrt(self.kl.size)) if self.kl.size > 1 else 0.0

    @property
    def agreement(self) -> float:
        return float(self.same_top.mean())

    @property
    def probability_change(self) -> float:
        """Root mean square of the change of the probability of the text's own token."""
        a, b = (np.exp(-s) for s in self.surprises)
        return float(np.sqrt(((a - b) ** 2).mean()))

    def as_dict(self) -> dict[str, Any]:
        a, b = self.perplexities
        return {
            "tokens": self.kl.size,
            "kl_mean": self.mean_kl,
            "kl_error": self.kl_error,
            "kl_max": float(self.kl.max()),
            "kl_percentiles": {
                str(q): float(v)
                for q, v in zip(PERCENTILES, np.percentile(self.kl, PERCENTILES), strict=True)
            },
            "top1_agreement": self.agreement,
            "probability_change_rms": self.probability_change,
            "perplexity": [a.value, b.value],
            "perplexity_ratio": self.perplexity_ratio.value,
            "perplexity_ratio_error": self.perplexity_ratio.error,
        }


def log_probabilities(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """float32 [n, n_vocab]; the sum is kept in double precision."""
    shifted: NDArray[np.float32] = logits - logits.max(axis=1, keepdims=True)
    total = np.exp(shifted).sum(axis=1, dtype=np.float64, keepdims=True)
    shifted -= np.log(total).astype(np.float32)
    return shifted


def check_vocabularies(a: LLM, b: LLM) -> None:
    """EdgeLLMError unless token ids mean the same in both."""
    texts = [llm.metadata.get("tokenizer.ggml.tokens") for llm in (a, b)]
    if a.n_vocab != b.n_vocab or texts[0] != texts[1]:
        raise EdgeLLMError(
            f"{a.path} and {b.path} have different vocabularies; their predictions cannot be "
            "compared."
        )


def divergence(a: LLM, b: LLM, text: Text, progress: Callable[[int], None] | None = None
               ) -> Divergence:  # fmt: skip
    """progress is told of the chunks done. EdgeLLMError for different vocabularies, and for
    predictions that are no numbers."""
    check_vocabularies(a, b)
    n = text.n_ctx - 1 - text.first
    kl, same = np.empty((text.n_chunks, n)), np.empty((text.n_chunks, n), np.bool_)
    surprises = np.empty((2, text.n_chunks, n))
    for number, chunk in enumerate(text.chunks):
        scans = scan(a, chunk, text.first), scan(b, chunk, text.first)
        for (position, rows_a), (_, rows_b) in zip(*scans, strict=True):
            wanted = chunk[position + 1 : position + 1 + len(rows_a)]
            at = slice(position - text.first, position - text.first + len(wanted))
            p, q = (log_probabilities(rows[: len(wanted)]) for rows in (rows_a, rows_b))
            own = np.arange(len(wanted)), wanted
            surprises[0, number, at], surprises[1, number, at] = -p[own], -q[own]
            same[number, at] = p.argmax(axis=1) == q.argmax(axis=1)
            # Rounding can make what is no distance slightly negative.
            distance = (np.exp(p) * (p - q)).sum(axis=1, dtype=np.float64)
            kl[number, at] = np.maximum(distance, 0)
        if progress:
            progress(number + 1)
    return Divergence(kl, same, (surprises[0], surprises[1]), text.first)
