"""A cache whose blocks hold what was written: the tokens up to each position, as kernels would see
them. Reading what a sequence can see shows at once whether a block was shared that should not be.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edgellm.host_tier import HostTier
from edgellm.kv_cache import CacheGroup, KVCache
from edgellm.request_options import RequestOptions
from edgellm.sampling import SamplingParams
from edgellm.sequence import Sequence

BLOCK = 4


class CheckedCache:
    """``kv`` over pools that remember, at each slot, the hash of the tokens up to it; with a tier
    of so many blocks behind them."""

    def __init__(
        self, windows: list[int | None], n_blocks: int, max_seqs: int, step_tokens: int = 16,
        n_states: int = 0, sinks: int = 0, tier: int = 0,
    ) -> None:  # fmt: skip
        groups = [
            CacheGroup(w, n_blocks, np.zeros((max_seqs, 64), np.int32), sinks if w else 0)
            for w in windows
        ]
        self.slots = [np.zeros((n_blocks, BLOCK), np.int64) for _ in groups]
        self.states = np.zeros(max(1, n_states), np.int64)
        self.kv = KVCache(groups, BLOCK, step_tokens, n_states, self._copy)
        if tier:
            self.kv.use_tier(HostTier(8 * BLOCK * tier, self._read, self._write, lambda: 1.0))

    def _read(self, group: int, block: int) -> bytes:
        return self.slots[group][block].tobytes()

    def _write(self, group: int, block: int, data: bytes) -> None:
        self.slots[group][block] = np.frombuffer(data, np.int64)

    def _copy(self, group: int, source: int, target: int) -> None:
        self.slots[group][target] = self.slots[group][source]

    def compute(self, sequence: Sequence, n_tokens: int) -> None:
        """What a step does: write the tokens, check all that each of them sees."""
        first = sequence.n_computed
        held = sequence.state
        if self.kv.is_recurrent:
            assert (self.states[held] if held >= 0 else 0) == (
                _sum(sequence, first) if first else 0
            )
            new = self.kv.states.take()
            assert new is not None
            self.states[new] = _sum(sequence, first + n_tokens)
            if held >= 0:
                self.kv.states.drop(held)
            sequence.state = new
        for p in range(first, first + n_tokens):
            for i, group in enumerate(self.kv.groups):
                table = group.table[sequence.row]
                self.slots[i][table[p // BLOCK], p % BLOCK] = _sum(sequence, p + 1)
                for q in self._seen(group, p):
                    assert self.slots[i][table[q // BLOCK], q % BLOCK] == _sum(sequence, q + 1)
        self.kv.commit(sequence, n_tokens)

    def _seen(self, group: CacheGroup, p: int) -> list[int]:
        if group.window is None:
            return list(range(p + 1))
        oldest = max(0, p - group.window + 1)
        return [*range(min(group.sinks, oldest)), *range(oldest, p + 1)]


def _sum(sequence: Sequence, n: int) -> int:
    return hash((sequence.salt, *sequence.tokens[:n]))


class _Text:
    """A decoder that shows nothing."""

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def request(tokens: list[int], marks: Any = (), n_output: int = 4, **options: Any) -> Sequence:
    params = SamplingParams(max_tokens=n_output, temperature=0, ignore_eos=True, seed=0)
    return Sequence(
        list(tokens), params, _Text(), RequestOptions(**options), marks=frozenset(marks)  # type: ignore[arg-type]
    )  # fmt: skip
