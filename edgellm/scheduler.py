"""Who computes how many tokens in the next step.

Each step has a budget of tokens. Running sequences that only miss their newest token go first,
prompts fill the rest in order of arrival, cut where the budget ends. A sequence is admitted when
the cache can promise all it may ever need, so a running one never stalls.
"""

from __future__ import annotations

from collections import deque

from edgellm.kv_cache import KVCache
from edgellm.sequence import Sequence


class Scheduler:
    def __init__(self, cache: KVCache, step_tokens: int, max_num_seqs: int, n_ctx: int) -> None:
        self._cache, self._step_tokens = cache, step_tokens
        self._max_num_seqs, self._n_ctx = max_num_seqs, n_ctx
        self.reuse = True  # go on from what an earlier request computed
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, whatever its state."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        self._cache.release(sequence, park=self.reuse)

    def most_tokens(self, sequence: Sequence) -> int:
        """Positions the sequence may come to hold."""
        wanted = sequence.params.max_tokens
        limit = self._n_ctx if wanted is None else sequence.n_prompt + wanted
        return min(self._n_ctx, limit)

    def schedule(self) -> list[tuple[Sequence, int]]:
        """(sequence, tokens to compute) for one step; empty when there is nothing to do."""
        while self.waiting and len(self.running) < self._max_num_seqs:
            first = self.waiting[0]
            if not self._cache.admit(first, self.most_tokens(first), self.reuse):
                break
            self.running.append(self.waiting.popleft())
        budget = self._step_tokens
        batch = []
        for sequence in sorted(self.running, key=lambda s: s.n_waiting > 1):  # stable
            n = min(sequence.n_waiting, budget)
            if n:
                batch.append((sequence, n))
                budget -= n
        return batch
