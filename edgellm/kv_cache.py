"""Which blocks of the key-value pools, and which recurrent states, belong to which sequence.

A cache group is a set of layers with the same window; its layers share block tables. Tables are
indexed by position // block of the sequence, also in groups with a sliding window, whose blocks
leave a sequence when its window has passed them.

Every full block that was computed is registered under the hash of all tokens up to its end, so a
request goes on from whatever others have computed: full blocks are shared, the block in which two
prompts part is copied. Where layers have a state, a request can go on only from a *checkpoint*, a
state that was kept at the end of a message or of a request. States lie in slots of a pool of their
own: a step reads one slot and writes another, so keeping a checkpoint copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgellm.block_pool import BlockPool, Content
from edgellm.errors import EdgeLLMError
from edgellm.host_tier import HostTier
from edgellm.kv_file import Saved
from edgellm.prefix import chain, root
from edgellm.sequence import Sequence


class NoRoom(EdgeLLMError):
    """The cache has no block for what is to be computed."""


class Memory(Protocol):
    """Where blocks and states lie."""

    def write_block(self, group: int, block: int, data: bytes) -> None: ...
    def write_state(self, slot: int, data: bytes) -> None: ...


@dataclass(eq=False)
class CacheGroup:
    """``table`` [max_seqs, blocks of a sequence] is where kernels look blocks up (int32)."""

    window: int | None
    n_blocks: int
    table: NDArray[np.int32]
    sinks: int = 0  # first tokens of a sequence that stay visible: their block is kept

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.n_blocks)

    def places(self, n_tokens: int, block: int) -> Iterable[int]:
        """Where the blocks are that the token behind ``n_tokens`` tokens sees."""
        if not n_tokens:
            return ()
        end = (n_tokens - 1) // block + 1
        if self.window is None:
            return range(end)
        first = max(0, n_tokens - self.window + 1) // block
        if self.sinks and first > 0:
            return (0, *range(first, end))
        return range(first, end)


@dataclass
class Match:
    """What a prompt can go on from: ``n_tokens``, of which ``n_full`` are whole blocks and the rest
    is to be copied from the block ``partial`` of each group; the state's slot, or -1."""

    n_tokens: int = 0
    n_full: int = 0
    partial: list[int] = field(default_factory=list)
    state: int = -1


class KVCache:
    """The pools of all groups. ``block`` is the number of tokens in a block, ``step_tokens`` the
    most that a step computes, ``copy(group, source, target)`` copies a block of a group.
    ``n_states`` slots hold recurrent states (0: the model has none)."""

    def __init__(
        self, groups: List[CacheGroup], block: int, step_tokens: int, n_states: int = 0,
        copy: Callable[[int, int, int], None] | None = None, max_seqs: int | None = None,
    ) -> None:  # fmt: skip
        self.groups, self.block, self._step_tokens = list(groups), block, step_tokens
        self._copy = copy or (lambda group, source, target: None)
        self.states = BlockPool(n_states)
        self.is_recurrent = n_states > 0
        if max_seqs is None:
            max_seqs = self.groups[0].table.shape[0]
        self._rows = list(range(max_seqs - 1, -1, -1))
        self._sequences: dict[Sequence, None] = {}  # that have a row
        self.slack = 0  # tokens that sequences may go back, windows or not
        self.reuse = True  # keep what was computed for requests that begin alike
        self._tier: HostTier | None = None

    def use_tier(self, tier: HostTier) -> None:
        """Keep what pools give away, for as long as the tier does."""
        self._tier = tier
        for i, group in enumerate(self.groups):
            group.pool.on_evict = partial(self._to_tier, i)

    def _to_tier(self, group: int, block: int, content: Content) -> None:
        if self._tier is not None and content.prefix is not None:
            self._tier.store(group, content.prefix, block)

    # ---- room -----------------------------------------------------------------------------------

    def _most(self, group: CacheGroup, n_tokens: int) -> int:
        """Blocks that a sequence of n_tokens holds at most at any time."""
        if group.window is not None:
            n_tokens = min(n_tokens, group.window + self._step_tokens + 2 * self.block)
        return -(-n_tokens // self.block)

    def fits(self, n_tokens: int) -> bool:
        """Whether a sequence of n_tokens could run alone."""
        return all(self._most(g, n_tokens) <= g.n_blocks for g in self.groups)

    @property
    def n_rows_free(self) -> int:
        return len(self._rows)

    def outstanding(self, sequence: Sequence) -> list[int]:
        """Blocks of each group that a running sequence still needs for what it already knows."""
        n_tokens = len(sequence.tokens)
        if n_tokens <= sequence.n_room:
            return [0] * len(self.groups)
        return [
            max(0, self._most(g, n_tokens) - len(blocks))
            for g, blocks in zip(self.groups, sequence.blocks, strict=True)
        ]

    # ---- a sequence comes, grows and goes -------------------------------------------------------

    def admit(self, sequence: Sequence, reserve: List[int] = (), reuse: bool = True) -> bool:
        """Give a sequence a row and what there is of its tokens already; False when it has to wait,
        because there is no row, or no room for its tokens beside ``reserve`` blocks of each group.

        ``n_computed`` then says how much is there; at least one token is left to compute.
        """
        if not self._rows:
            return False
        sequence.root = root(sequence.salt)
        sequence.prefixes = []
        match = self._match(sequence) if reuse and self.reuse else Match()
        reserve = reserve or [0] * len(self.groups)
        if not self._has_room(sequence, match, reserve):
            # what a match keeps from being given away can be what is missing
            match = Match()
            if not self._has_room(sequence, match, reserve):
                return False
        self._sequences[sequence] = None
        sequence.is_private = not (reuse and self.reuse)
        sequence.row = self._rows.pop()
        sequence.blocks = [{} for _ in self.groups]
        self._adopt(sequence, match)
        return True

    def fork(self, sequence: Sequence, other: Sequence) -> bool:
        """Give ``other``, whose tokens begin like the computed ones of ``sequence``, what there is
        of them; False when there is no row or no block for it. Not for recurrent models."""
        place, is_cut = sequence.n_computed // self.block, sequence.n_computed % self.block > 0
        if not self._rows or any(g.pool.n_available < is_cut for g in self.groups):
            return False
        self._sequences[other] = None
        other.root, other.is_private = sequence.root, True
        other.row = self._rows.pop()
        other.blocks = [{} for _ in self.groups]
        for i, (group, blocks) in enumerate(zip(self.groups, sequence.blocks, strict=True)):
            for at, block in blocks.items():
                if at < place:
                    group.pool.hold(block)
                    other.blocks[i][at] = block
                    group.table[other.row, at] = block
            if is_cut:
                self._copy_into(other, i, place, blocks[place])
        other.n_computed = sequence.n_computed
        other.n_room = (place + is_cut) * self.block
        return True

    def _has_room(self, sequence: Sequence, match: Match, reserve: List[int]) -> bool:
        n_tokens = len(sequence.tokens)
        for i, group in enumerate(self.groups):
            known = self._known(i, sequence, match)
            sources = [*known.values(), *match.partial[i : i + 1]]
            kept = sum(not group.pool.is_held(block) for block in sources)
            new = max(1, self._most(group, n_tokens) - len(known))
            if group.pool.n_available < new + kept + reserve[i]:
                return False
        return True

    def _known(self, group: int, sequence: Sequence, match: Match) -> dict[int, int]:
        """The full blocks in the pool that a match takes over: place -> block."""
        of = self.groups[group]
        found = {}
        for place in of.places(match.n_tokens, self.block):
            if place < match.n_full:
                block = of.pool.find(sequence.prefixes[place])
                if block is not None:
                    found[place] = block
        return found

    def _adopt(self, sequence: Sequence, match: Match) -> None:
        known = [self._known(i, sequence, match) for i in range(len(self.groups))]
        # taken from the tier before any block is: what that gives away pushes others out of it
        stored = [self._stored(i, sequence, match, places) for i, places in enumerate(known)]
        for i, group in enumerate(self.groups):
            for block in [*known[i].values(), *match.partial[i : i + 1]]:
                group.pool.hold(block)
            for place, block in known[i].items():
                sequence.blocks[i][place] = block
                group.table[sequence.row, place] = block
            for place, data in stored[i].items():
                self._restore(sequence, i, place, data)
            if match.partial:
                self._copy_into(sequence, i, match.n_full, match.partial[i])
                group.pool.drop(match.partial[i])
        if match.state >= 0:
            self.states.hold(match.state)
        sequence.state = match.state
        sequence.n_computed = match.n_tokens
        sequence.n_registered = match.n_full
        sequence.n_room = -(-match.n_tokens // self.block) * self.block

    def _stored(
        self, group: int, sequence: Sequence, match: Match, known: dict[int, int]
    ) -> dict[int, bytes]:
        """The full blocks of a match that only the tier has: place -> data."""
        if self._tier is None:
            return {}
        return {
            place: self._tier.take(group, sequence.prefixes[place])
            for place in self.groups[group].places(match.n_tokens, self.block)
            if place < match.n_full and place not in known
        }

    def _restore(self, sequence: Sequence, group: int, place: int, data: bytes) -> None:
        assert self._tier is not None
        pool, at = self.groups[group].pool, place * self.block
        block = pool.take()
        assert block is not None
        self._tier.restore(group, block, data)
        parent = sequence.prefixes[place - 1] if place else sequence.root
        tokens = tuple(sequence.tokens[at : at + self.block])
        pool.register(block, Content(parent, tokens, sequence.prefixes[place]))
        sequence.blocks[group][place] = block
        self.groups[group].table[sequence.row, place] = block

    def extend(self, sequence: Sequence, n_tokens: int) -> bool:
        """Blocks for the next n_tokens; False when there are not enough. Those that no later token
        can see are let go first."""
        first, end = sequence.n_computed, sequence.n_computed + n_tokens
        if end <= sequence.n_room:
            return True
        new = range(sequence.n_room // self.block, (end - 1) // self.block + 1)
        for group, blocks in zip(self.groups, sequence.blocks, strict=True):
            if group.window is not None:
                oldest = max(0, first - group.window + 1 - self.slack) // self.block
                for place in [p for p in blocks if p < oldest and not (group.sinks and p == 0)]:
                    group.pool.drop(blocks.pop(place))
            if group.pool.n_available < len(new):
                return False
        for group, blocks in zip(self.groups, sequence.blocks, strict=True):
            for place in new:
                block = group.pool.take()
                assert block is not None
                blocks[place] = block
                group.table[sequence.row, place] = block
        sequence.n_room = new.stop * self.block
        return True

    def commit(self, sequence: Sequence, n_tokens: int) -> None:
        """The next n_tokens are computed."""
        sequence.n_computed += n_tokens
        if self._is_private(sequence):
            return
        while (sequence.n_registered + 1) * self.block <= sequence.n_computed:
            place = sequence.n_registered
            parent, prefix = self._prefix(sequence, place), self._prefix(sequence, place + 1)
            content = Content(parent, self._tokens(sequence, place), prefix)
            for group, blocks in zip(self.groups, sequence.blocks, strict=True):
                if place in blocks:  # no window has passed it
                    blocks[place] = group.pool.register(blocks[place], content)
                    group.table[sequence.row, place] = blocks[place]
            sequence.n_registered += 1
        if self.is_recurrent and sequence.n_computed in sequence.marks:
            self._checkpoint(sequence)

    def _checkpoint(self, sequence: Sequence) -> None:
        """Keep the state behind the computed tokens."""
        place = sequence.n_computed // self.block
        parent, tail = self._prefix(sequence, place), self._tokens(sequence, place)
        content = Content(parent, tail, chain(parent, tail))
        sequence.state = self.states.register(sequence.state, content)

    def publish(self, sequence: Sequence) -> None:
        """Let others find the last block too, which is not full yet."""
        place, n_rest = divmod(sequence.n_computed, self.block)
        if not n_rest or self._is_private(sequence):
            return
        content = Content(self._prefix(sequence, place), self._tokens(sequence, place), None)
        for group, blocks in zip(self.groups, sequence.blocks, strict=True):
            group.pool.register(blocks[place], content)

    def _is_private(self, sequence: Sequence) -> bool:
        return sequence.is_private or not self.reuse

    def release(self, sequence: Sequence) -> None:
        """Let go of all a sequence holds; safe to call again."""
        if sequence not in self._sequences:
            return
        del self._sequences[sequence]
        self.publish(sequence)
        if sequence.state >= 0 and sequence.n_computed and not self._is_private(sequence):
            self._checkpoint(sequence)
        for group, blocks in zip(self.groups, sequence.blocks, strict=True):
            for place in sorted(blocks, reverse=True):  # a beginning is of use without its end
                group.pool.drop(blocks[place])
        if sequence.state >= 0:
            self.states.drop(sequence.state)
        self._rows.append(sequence.row)
        sequence.row, sequence.blocks, sequence.state = -1, [], -1
        sequence.n_computed = sequence.n_registered = sequence.n_room = sequence.n_again = 0

    def insert(self, sequence: Sequence, saved: Saved, memory: Memory) -> None:
        """Fill an admitted sequence with what was saved of its tokens. NoRoom."""
        n_tokens = len(saved.tokens)
        for i, (group, blocks) in enumerate(zip(self.groups, saved.blocks, strict=True)):
            for place, data in blocks.items():
                block = group.pool.take()
                if block is None:
                    raise NoRoom("The key-value cache has no block left.")
                sequence.blocks[i][place] = block
                group.table[sequence.row, place] = block
                memory.write_block(i, block, data)
        if saved.state:
            slot = self.states.take()
            assert slot is not None  # there are two for each running sequence
            sequence.state = slot
            memory.write_state(slot, saved.state)
        sequence.is_private = not self.reuse
        self.commit(sequence, n_tokens)

    def rewind(self, sequence: Sequence, n_tokens: int) -> int:
        """Go back to the first n_tokens, or further where a window or a state is no longer there;
        returns how many tokens are computed then (the others have to be computed again)."""
        del sequence.prefixes[n_tokens // self.block :]  # what comes then may be other tokens
        if n_tokens >= sequence.n_computed:
            return sequence.n_computed
        n_kept, state = (
            (n_tokens, -1)
            if not self.is_recurrent
            else self._state_before(sequence, sequence.tokens[:n_tokens])
        )
        for group, blocks in zip(self.groups, sequence.blocks, strict=True):
            if not all(p in blocks for p in group.places(n_kept, self.block)):
                n_kept, state = 0, -1
        place, is_cut = n_kept // self.block, n_kept % self.block > 0
        for i, (group, blocks) in enumerate(zip(self.groups, sequence.blocks, strict=True)):
            for later in [p for p in blocks if p >= place + is_cut]:
                group.pool.drop(blocks.pop(later))
            if is_cut and not group.pool.is_private(blocks[place]):
                # others see it, or may: what comes now must not be written into it
                shared = blocks.pop(place)
                self._copy_into(sequence, i, place, shared)
                group.pool.drop(shared)
        if state >= 0:
            self.states.hold(state)
        if sequence.state >= 0:
            self.states.drop(sequence.state)
        sequence.state = state
        sequence.n_computed = n_kept
        sequence.n_registered = min(sequence.n_registered, place)
        sequence.n_room = (place + is_cut) * self.block
        return n_kept

    def _copy_into(self, sequence: Sequence, group: int, place: int, source: int) -> None:
        """A copy of a block becomes the sequence's own."""
        target = self.groups[group].pool.take()
        if target is None:
            raise NoRoom("The key-value cache has no block left for a copy.")
        self._copy(group, source, target)
        sequence.blocks[group][place] = target
        self.groups[group].table[sequence.row, place] = target

    # ---- finding --------------------------------------------------------------------------------

    def _prefix(self, sequence: Sequence, n_blocks: int) -> bytes:
        """The name of the sequence's first n_blocks blocks."""
        names = sequence.prefixes
        while len(names) < n_blocks:
            place = len(names)
            parent = names[-1] if names else sequence.root
            at = place * self.block
            names.append(chain(parent, sequence.tokens[at : at + self.block]))
        return names[n_blocks - 1] if n_blocks else sequence.root

    def _tokens(self, sequence: Sequence, place: int) -> tuple[int, ...]:
        """Its computed tokens in a block."""
        end = min((place + 1) * self.block, sequence.n_computed)
        return tuple(sequence.tokens[place * self.block : end])

    def _match(self, sequence: Sequence) -> Match:
        """The longest beginning of the sequence that everything is there for."""
        last = len(sequence.tokens) - 1  # one is left to compute
        deepest = last // self.block
        for i, group in enumerate(self.groups):
            if group.window is None:
                found = 0
                while found < deepest and self._has(i, self._prefix(sequence, found + 1)):
                    found += 1
                deepest = found
        for n_full in range(deepest, -1, -1):
            at = n_full * self.block
            if not self._is_seen(sequence, at + self.block - 1, n_full):
                continue
            name, tail = (
                self._prefix(sequence, n_full),
                tuple(sequence.tokens[at:last][: self.block]),
            )
            rest = [group.pool.longest_match(name, tail) for group in self.groups]
            n, state = min((n for _, n in rest), default=len(tail)), -1
            if self.is_recurrent:
                n, state = self._longest_state(name, tail[:n])
                if state < 0:
                    continue
            if at + n and self._is_seen(sequence, at + n, n_full):
                return Match(at + n, n_full, [block for block, _ in rest] if n else [], state)
        return Match()

    def _has(self, group: int, prefix: bytes) -> bool:
        return self.groups[group].pool.find(prefix) is not None or (
            self._tier is not None and self._tier.has(group, prefix)
        )

    def _is_seen(self, sequence: Sequence, n_tokens: int, n_full: int) -> bool:
        """Whether the groups with a window have the full blocks that the token behind n_tokens
        sees."""
        return all(
            self._has(i, self._prefix(sequence, place + 1))
            for i, group in enumerate(self.groups)
            if group.window is not None
            for place in group.places(n_tokens, self.block)
            if place < n_full
        )

    def _longest_state(self, name: bytes, tail: tuple[int, ...]) -> tuple[int, int]:
        """(tokens of the tail, slot) of the longest checkpoint there; slot -1: none."""
        best, slot = 0, -1
        for candidate, tokens in self.states.behind(name):
            if len(tokens) >= best and tokens == tail[: len(tokens)]:
                best, slot = len(tokens), candidate
        return best, slot

    def _state_before(self, sequence: Sequence, tokens: List[int]) -> tuple[int, int]:
        """(tokens, slot) of the last checkpoint among the sequence's first tokens; (0, -1)."""
        for n_full in range(len(tokens) // self.block, -1, -1):
            at = n_full * self.block
            n, slot = self._longest_state(
                self._prefix(sequence, n_full), tuple(tokens[at : at + self.block])
            )
            if slot >= 0:
                return at + n, slot
        return 0, -1

    def forget(self, sequence: Sequence) -> int:
        """Free what is kept of the tokens of a sequence that was never admitted, but for what
        others hold; returns how many of its tokens there were."""
        sequence.root, sequence.prefixes = root(sequence.salt), []
        n_there, tokens = self._match(sequence).n_tokens, sequence.tokens
        for place in range(len(tokens) // self.block + 1):
            parent, at = self._prefix(sequence, place), place * self.block
            here = tuple(tokens[at : at + self.block])
            for pool in (*(group.pool for group in self.groups), self.states):
                for block, held in pool.behind(parent):
                    if held == here[: len(held)] and not pool.is_held(block):
                        pool.free(block)
            if self._tier is not None and place:
                for i in range(len(self.groups)):
                    self._tier.forget(i, parent)
        return n_there

    # ---- accounts -------------------------------------------------------------------------------

    def start_anew(self, reuse: bool) -> None:
        """Forget what later requests could go on from. What running requests still compute is
        nobody else's: it came about under other circumstances than before."""
        self.reuse = reuse
        for sequence in self._sequences:
            sequence.is_private = True
        for group in self.groups:
            group.pool.forget_kept()
        self.states.forget_kept()
        if self._tier is not None:
            self._tier.clear()

    def faults(self) -> list[str]:
        """What is wrong with the accounts; nothing ever should be."""
        found = []
        for i, group in enumerate(self.groups):
            held: dict[int, int] = {}
            for sequence in self._sequences:
                for block in sequence.blocks[i].values():
                    held[block] = held.get(block, 0) + 1
            found += [f"group {i}: {fault}" for fault in group.pool.faults(held)]
        held = {}
        for sequence in self._sequences:
            if sequence.state >= 0:
                held[sequence.state] = held.get(sequence.state, 0) + 1
        return found + [f"states: {fault}" for fault in self.states.faults(held)]

    @property
    def is_idle(self) -> bool:
        """True when no sequence holds anything."""
        return not self._sequences and not any(g.pool.n_held for g in self.groups)
