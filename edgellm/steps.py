"""Steps of the engine on arbitrary tokens, without sampling and text: what benchmarks time."""

from __future__ import annotations

import time

from edgellm.errors import EdgeLLMError
from edgellm.llm import LLM
from edgellm.memory import STEP_TOKENS
from edgellm.runner import Run
from edgellm.sampling import SamplingParams
from edgellm.sequence import Sequence


def arbitrary_tokens(n: int, n_vocab: int) -> list[int]:
    """The same ids for everybody who compares, past the special ones that vocabularies begin
    with."""
    first = min(100, n_vocab // 2)
    return [first + (7919 * i + 13) % min(30_000, n_vocab - first) for i in range(n)]


class Steps:
    """Runs steps of a model that serves nobody meanwhile. Times are seconds of one call."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._runner = llm, llm.runner

    def open(self, n_tokens: int) -> Sequence:
        """A sequence of n_tokens arbitrary tokens, none of them computed."""
        tokens = arbitrary_tokens(n_tokens, self._llm.n_vocab)
        params = SamplingParams(max_tokens=1, temperature=0)
        sequence = Sequence(tokens, params, self._llm.tokenizer.stream())
        if not self._runner.cache.admit(sequence, reuse=False):
            raise EdgeLLMError(
                f"There is no room in the cache for another sequence of {n_tokens:,} tokens; "
                "measure smaller depths or fewer sequences."
            )
        return sequence

    def release(self, sequence: Sequence) -> None:
        self._runner.cache.release(sequence)

    def cut(self, sequence: Sequence, n_tokens: int) -> bool:
        """Forget all but the first n_tokens; False when a sliding window no longer has them."""
        there = min(n_tokens, sequence.n_computed)
        return self._runner.cache.rewind(sequence, n_tokens) == there

    def prefill(self, sequence: Sequence, n_tokens: int) -> list[float]:
        """Compute the next n_tokens in steps as the engine cuts them; logits of the last only."""
        sequence.n_prompt = sequence.n_computed + n_tokens  # a GPU has kernels for either phase
        times = []
        while n_tokens:
            n = min(n_tokens, STEP_TOKENS)
            n_tokens -= n
            times.append(self._step([Run(sequence, n, "none" if n_tokens else "last")]))
        return times

    def decode(self, sequences: list[Sequence]) -> float:
        """One step that computes the next token of each sequence, with its logits."""
        for sequence in sequences:
            sequence.n_prompt = min(sequence.n_prompt, sequence.n_computed)
        return self._step([Run(sequence, 1, "last") for sequence in sequences])

    def _step(self, runs: list[Run]) -> float:
        started = time.perf_counter()
        self._runner.forward(runs)
        return time.perf_counter() - started

    def profile(self, n_tokens: int, n_out: int) -> list[tuple[str, float, float]]:
        """The last step once more: (label, cycles waiting, cycles working) of each stage."""
        return self._runner.program.profile(n_tokens, n_out)
