"""A text in chunks, as llama-perplexity (llama.cpp) cuts it, and a model's logits over them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import EdgeLLMError
from edgellm.llm import LLM

N_CTX = 512


@dataclass(frozen=True)
class Text:
    """Token ids [n_chunks, n_ctx]. Chunks do not overlap; where the vocabulary begins texts with a
    special token it stands in place of each chunk's first."""

    chunks: NDArray[np.int64]

    @property
    def n_chunks(self) -> int:
        return len(self.chunks)

    @property
    def n_ctx(self) -> int:
        return int(self.chunks.shape[1])

    @property
    def first(self) -> int:
        """The position from which on predictions count: behind the first half, where there is
        little to predict from."""
        return self.n_ctx // 2


def cut(llm: LLM, text: str, n_ctx: int = N_CTX, n_chunks: int | None = None) -> Text:
    """The text's whole chunks, at most n_chunks of them. EdgeLLMError if there is none, or the
    model has no tokenizer."""
    if llm.gguf.string("tokenizer.ggml.model", "none") in ("none", "no_vocab"):
        raise EdgeLLMError(f"{llm.path} has no tokenizer, so it cannot read a text.")
    if n_ctx < 4:
        raise EdgeLLMError(f"Chunks of {n_ctx} tokens are too short (-c); 512 is usual.")
    bos = llm.tokenize("", add_special=True)[:1]
    tokens = llm.tokenize(text, add_special=True)
    found = len(tokens) // n_ctx
    if found == 0:
        raise EdgeLLMError(
            f"The text has {len(tokens)} tokens, not one chunk of {n_ctx}: give a longer text (-f) "
            "or shorter chunks (-c)."
        )
    chunks = np.array(tokens[: found * n_ctx], np.int64).reshape(found, n_ctx)[:n_chunks]
    if bos:
        chunks[:, 0] = bos[0]
    return Text(chunks)


def scan(llm: LLM, chunk: NDArray[np.int64], first: int
         ) -> Iterator[tuple[int, NDArray[np.float32]]]:  # fmt: skip
    """As LLM.scan, of a chunk; EdgeLLMError for logits that are no numbers, of which nothing can be
    computed."""
    for position, logits in llm.scan(chunk.tolist(), first):
        if not np.isfinite(logits).all():
            raise EdgeLLMError(
                f"{llm.path} predicts NaN or infinity; the file is damaged, or was made from a "
                "model whose values its number formats cannot hold."
            )
        yield position, logits


def surprise(logits: NDArray[np.float32], tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Negative log-probability of each row's token, nats. logits [n, n_vocab]."""
    largest = logits.max(axis=1)
    # The sum of up to 300,000 exponentials is kept in double precision.
    total = np.exp(logits - largest[:, None]).sum(axis=1, dtype=np.float64)
    at = logits[np.arange(len(tokens)), tokens].astype(np.float64)
    result: NDArray[np.float64] = np.log(total) + largest - at
    return result
