"""Which blocks of the key-value pools belong to which sequence.

A cache group is a set of layers with the same window; its layers share block tables. Tables are
indexed by position // BLOCK of the sequence, also in groups with a sliding window, where blocks
that left the window go back to the pool.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.sequence import Sequence


@dataclass(eq=False)
class CacheGroup:
    """``table`` [max_seqs, blocks of a sequence] is where kernels look blocks up (int32)."""

    window: int | None
    n_blocks: int
    table: NDArray[np.int32]
    sinks: int = 0  # first tokens of a sequence that stay visible: their block is kept

    def __post_init__(self) -> None:
        # a stack, lowest block on top: few pages of the pool are ever touched
        self.free = list(range(self.n_blocks - 1, -1, -1))


class KVCache:
    """The block pools of all groups. ``block`` is the number of tokens in a block."""

    def __init__(self, groups: List[CacheGroup], block: int, step_tokens: int) -> None:
        self.groups, self.block, self._step_tokens = list(groups), block, step_tokens
        max_seqs = self.groups[0].table.shape[0] if self.groups else 0
        self._rows = list(range(max_seqs - 1, -1, -1))
        self._promised = [0] * len(self.groups)
        self._promises: dict[Sequence, list[int]] = {}

    def _need(self, group: CacheGroup, n_tokens: int) -> int:
        """Blocks that a sequence of n_tokens holds at most at any time."""
        if group.window is not None:
            n_tokens = min(n_tokens, group.window + self._step_tokens + 2 * self.block)
        return -(-n_tokens // self.block)

    def fits(self, n_tokens: int) -> bool:
        """Whether a sequence of n_tokens could run alone."""
        return all(self._need(g, n_tokens) <= g.n_blocks for g in self.groups)

    def admit(self, sequence: Sequence, n_tokens: int) -> bool:
        """Promise room for n_tokens and a row of the tables; False when it has to wait."""
        needs = [self._need(g, n_tokens) for g in self.groups]
        room = all(
            promised + need <= group.n_blocks
            for group, promised, need in zip(self.groups, self._promised, needs, strict=True)
        )
        if not room or not self._rows:
            return False
        self._promised = [p + n for p, n in zip(self._promised, needs, strict=True)]
        self._promises[sequence] = needs
        sequence.row = self._rows.pop()
        sequence.blocks = [{} for _ in self.groups]
        return True

    def extend(self, sequence: Sequence, n_tokens: int) -> None:
        """Blocks for positions n_computed .. n_computed + n_tokens - 1; those that no later token
        can see are released first."""
        first = sequence.n_computed
        for group, blocks in zip(self.groups, sequence.blocks, strict=True):
            if group.window is not None:
                oldest = max(0, first - group.window + 1) // self.block
                for place in [p for p in blocks if p < oldest and not (group.sinks and p == 0)]:
                    group.free.append(blocks.pop(place))
            for place in range(first // self.block, (first + n_tokens - 1) // self.block + 1):
                if place not in blocks:
                    blocks[place] = group.free.pop()
                    group.table[sequence.row, place] = blocks[place]

    def slots(self, group: CacheGroup, sequence: Sequence, n_tokens: int) -> NDArray[np.int64]:
        """Where the keys of the next n_tokens go: block * BLOCK + place in it."""
        positions = np.arange(sequence.n_computed, sequence.n_computed + n_tokens)
        blocks = group.table[sequence.row, positions // self.block].astype(np.int64)
        slots: NDArray[np.int64] = blocks * self.block + positions % self.block
        return slots

    def release(self, sequence: Sequence) -> None:
        """Give back all a sequence holds; safe to call again."""
        needs = self._promises.pop(sequence, None)
        if needs is None:
            return
        for group, blocks in zip(self.groups, sequence.blocks, strict=True):
            group.free.extend(sorted(blocks.values(), reverse=True))
        self._promised = [p - n for p, n in zip(self._promised, needs, strict=True)]
        self._rows.append(sequence.row)
        sequence.row, sequence.blocks = -1, []

    @property
    def idle(self) -> bool:
        """True when every block is free."""
        return not self._promises and all(len(g.free) == g.n_blocks for g in self.groups)
