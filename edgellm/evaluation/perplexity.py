"""Perplexity: the exponential of the mean surprise at a text's tokens, as llama-perplexity has it.

Of each chunk of n_ctx tokens those behind the first half count, each predicted from all before it
in the chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.evaluation.text import Text, scan, surprise
from edgellm.llm import LLM


@dataclass(frozen=True)
class Perplexity:
    """``value`` with its standard error, from the spread of the tokens' surprise."""

    value: float
    error: float
    n_tokens: int

    def __str__(self) -> str:
        return f"{self.value:.4f} +/- {self.error:.5f}"


def estimate(surprises: NDArray[np.float64]) -> Perplexity:
    """Of negative log-probabilities in nats."""
    n = len(surprises)
    mean = float(surprises.mean())
    spread = float(surprises.var(ddof=1)) if n > 1 else 0.0
    value = math.exp(min(mean, 700.0))  # beyond that a double holds no more
    return Perplexity(value, value * math.sqrt(spread / n), n)


def perplexity(llm: LLM, text: Text, progress: Callable[[int, Perplexity], None] | None = None
               ) -> Perplexity:  # fmt: skip
    """progress: told of the chunks done and the estimate so far. EdgeLLMError where the model
    predicts no numbers."""
    found: list[NDArray[np.float64]] = []
    for number, chunk in enumerate(text.chunks):
        for position, logits in scan(llm, chunk, text.first):
            wanted = chunk[position + 1 : position + 1 + len(logits)]
            found.append(surprise(logits[: len(wanted)], wanted))
        if progress:
            progress(number + 1, estimate(np.concatenate(found)))
    return estimate(np.concatenate(found))
