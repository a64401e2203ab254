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
    """The block pools of all groups. ``block`` is the number of tokens in a block. Where layers
    have a state (``is_recurrent``) a parked sequence can be gone on with only where it ended: keys
    can be cut back to any token, a state cannot."""

    def __init__(
        self, groups: List[CacheGroup], block: int, step_tokens: int, is_recurrent: bool = False
    ) -> None:
        self.groups, self.block, self._step_tokens = list(groups), block, step_tokens
        self._is_recurrent = is_recurrent
        max_seqs = self.groups[0].table.shape[0] if self.groups else 0
        self._rows = list(range(max_seqs - 1, -1, -1))
        self._promised = [0] * len(self.groups)
        self._promises: dict[Sequence, list[int]] = {}
        self._parked: list[Sequence] = []  # oldest first

    def _need(self, group: CacheGroup, n_tokens: int) -> int:
        """Blocks that a sequence of n_tokens holds at most at any time."""
        if group.window is not None:
            n_tokens = min(n_tokens, group.window + self._step_tokens + 2 * self.block)
        return -(-n_tokens // self.block)

    def fits(self, n_tokens: int) -> bool:
        """Whether a sequence of n_tokens could run alone."""
        return all(self._need(g, n_tokens) <= g.n_blocks for g in self.groups)

    def admit(self, sequence: Sequence, n_tokens: int, reuse: bool = True) -> bool:
        """Promise room for n_tokens and a row of the tables; False when it has to wait.

        With ``reuse`` it goes on from the parked sequence with the longest common beginning:
        ``n_computed`` and ``n_cached`` then say how much is there already.
        """
        if reuse and self._adopt(sequence, n_tokens):
            return True
        needs = [self._need(g, n_tokens) for g in self.groups]
        while not (self._rows and self._has_room(needs)):
            if not self._parked:
                return False
            self._drop(self._parked[0])
        self._promise(sequence, needs)
        sequence.row = self._rows.pop()
        sequence.blocks = [{} for _ in self.groups]
        return True

    def _has_room(self, needs: list[int]) -> bool:
        return all(
            promised + need <= group.n_blocks
            for group, promised, need in zip(self.groups, self._promised, needs, strict=True)
        )

    def _promise(self, sequence: Sequence, needs: list[int]) -> None:
        self._promised = [p + n for p, n in zip(self._promised, needs, strict=True)]
        self._promises[sequence] = needs

    # ---- sequences that are done but may be gone on with ----------------------------------------

    def _adopt(self, sequence: Sequence, n_tokens: int) -> bool:
        """Take over blocks and row of a parked sequence as far as the tokens are the same."""
        last = len(sequence.tokens) - 1  # one is left to compute
        common_with = {p: min(_common(p, sequence), last) for p in self._parked}
        if self._is_recurrent:
            common_with = {p: n for p, n in common_with.items() if n == p.n_computed}
        found = max(common_with, key=lambda p: common_with[p], default=None)
        if found is None:
            return False
        common = common_with[found]
        if common < self.block or not self._still_holds(found, common):
            return False
        needs, mine = [self._need(g, n_tokens) for g in self.groups], self._promises[found]
        more = [need - m for need, m in zip(needs, mine, strict=True)]
        while not self._has_room(more):
            other = next((p for p in self._parked if p is not found), None)
            if other is None:
                return False
            self._drop(other)
        self._parked.remove(found)
        del self._promises[found]
        self._promised = [p - m for p, m in zip(self._promised, mine, strict=True)]
        self._promise(sequence, needs)
        sequence.row, sequence.blocks, sequence.state = found.row, found.blocks, found.state
        found.row, found.blocks = -1, []
        self._shorten(sequence, common)
        sequence.n_cached = common
        return True

    def _shorten(self, sequence: Sequence, n_tokens: int) -> None:
        for group, blocks in zip(self.groups, sequence.blocks, strict=True):
            for place in [p for p in blocks if p > (n_tokens - 1) // self.block]:
                group.free.append(blocks.pop(place))
        sequence.n_computed = n_tokens

    def cut(self, sequence: Sequence, n_tokens: int) -> bool:
        """Forget all but the first n_tokens of a running sequence; False, and nothing happens, when
        a window has let go of what the next token would see."""
        if not self._still_holds(sequence, n_tokens):
            return False
        self._shorten(sequence, n_tokens)
        return True

    def _still_holds(self, parked: Sequence, n_tokens: int) -> bool:
        """Whether all that the token after the first n_tokens can see is there."""
        for group, blocks in zip(self.groups, parked.blocks, strict=True):
            oldest = 0 if group.window is None else max(0, n_tokens - group.window + 1)
            places = range(oldest // self.block, (n_tokens - 1) // self.block + 1)
            if not all(p in blocks for p in places) or (group.sinks and 0 not in blocks):
                return False
        return True

    def drop_parked(self) -> None:
        """Forget what could be gone on with."""
        while self._parked:
            self._drop(self._parked[0])

    def _drop(self, sequence: Sequence) -> None:
        self._parked.remove(sequence)
        self.release(sequence)

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

    def release(self, sequence: Sequence, park: bool = False) -> None:
        """Give back all a sequence holds; safe to call again. With ``park`` it is kept until the
        room is needed, for a request that begins alike."""
        if sequence not in self._promises or sequence in self._parked:
            return
        if park and sequence.n_computed >= self.block:
            self._parked.append(sequence)
            return
        needs = self._promises.pop(sequence)
        for group, blocks in zip(self.groups, sequence.blocks, strict=True):
            group.free.extend(sorted(blocks.values(), reverse=True))
        self._promised = [p - n for p, n in zip(self._promised, needs, strict=True)]
        self._rows.append(sequence.row)
        sequence.row, sequence.blocks = -1, []

    @property
    def idle(self) -> bool:
        """True when every block is free or parked."""
        if len(self._promises) != len(self._parked):
            return False
        held = [sum(len(p.blocks[i]) for p in self._parked) for i in range(len(self.groups))]
        return all(len(g.free) + n == g.n_blocks for g, n in zip(self.groups, held, strict=True))


def _common(done: Sequence, asked: Sequence) -> int:
    """How many computed tokens of one sequence another begins with."""
    n = min(done.n_computed, len(asked.tokens))
    mine, theirs = np.array(done.tokens[:n]), np.array(asked.tokens[:n])
    different = np.flatnonzero(mine != theirs)
    return int(different[0]) if len(different) else n
