"""The blocks of one cache group: who uses them, and what the unused ones still hold.

A block is free, *held* (by one sequence or several) or *kept*: nobody holds it, but a later prompt
may begin with its tokens. Kept blocks are given away when no free one is left, those first that
have been of no use for the longest time. Which tokens a block holds is known by its *prefix*, the
chained hash of everything before it (see prefix), so that equal blocks are found by look-up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_MOST_CANDIDATES = 64  # blocks behind one prefix that are compared token by token


@dataclass(frozen=True, slots=True)
class Content:
    """Tokens of a block behind ``parent``. ``prefix`` names both; None while the block is not
    full."""

    parent: bytes
    tokens: tuple[int, ...]
    prefix: bytes | None


class BlockPool:
    """``n_blocks`` blocks. ``on_evict(block, content)`` is told what a kept block loses."""

    def __init__(
        self, n_blocks: int, on_evict: Callable[[int, Content], None] | None = None
    ) -> None:
        self.n_blocks, self.on_evict = n_blocks, on_evict
        # a stack, lowest block on top: few pages of the pool are ever touched
        self._free = list(range(n_blocks - 1, -1, -1))
        self._holders = [0] * n_blocks
        self._kept: dict[int, None] = {}  # least recently used first
        self._content: dict[int, Content] = {}
        self._full: dict[bytes, int] = {}
        self._behind: dict[bytes, dict[int, None]] = {}  # blocks by their content's parent
        self.n_evicted = 0

    @property
    def n_available(self) -> int:
        """Blocks that can be taken."""
        return len(self._free) + len(self._kept)

    @property
    def n_kept(self) -> int:
        return len(self._kept)

    @property
    def n_held(self) -> int:
        return self.n_blocks - len(self._free) - len(self._kept)

    def take(self) -> int | None:
        """A block to write, held once; None when all are held."""
        if self._free:
            block = self._free.pop()
        elif self._kept:
            block = next(iter(self._kept))
            self.n_evicted += 1
            if self.on_evict is not None:
                self.on_evict(block, self._content[block])
            self._forget(block)
        else:
            return None
        self._holders[block] = 1
        return block

    def hold(self, block: int) -> None:
        """One more user of a block that is held or kept."""
        self._kept.pop(block, None)
        self._holders[block] += 1

    def drop(self, block: int) -> None:
        """One user less."""
        self._holders[block] -= 1
        if self._holders[block]:
            return
        if block in self._content:
            self._kept[block] = None
        else:
            self._free.append(block)

    def is_held(self, block: int) -> bool:
        return self._holders[block] > 0

    def is_private(self, block: int) -> bool:
        """Whether it has one user, and nobody else can find it."""
        return self._holders[block] == 1 and block not in self._content

    # ---- content ----------------------------------------------------------------------------

    def register(self, block: int, content: Content) -> int:
        """Say what a held block holds. Returns the block to use from now on: another one where the
        same full content is there already (both hold the same bits: architecture, rule 6)."""
        if content.prefix is not None:
            there = self._full.get(content.prefix)
            if there is not None and there != block:
                self.hold(there)
                self.drop(block)
                return there
            self._full[content.prefix] = block
        elif self.longest_match(content.parent, content.tokens)[1] == len(content.tokens):
            return block  # of no use beside the other
        self._content[block] = content
        self._behind.setdefault(content.parent, {})[block] = None
        return block

    def find(self, prefix: bytes) -> int | None:
        """The full block of this prefix."""
        return self._full.get(prefix)

    def longest_match(self, parent: bytes, tokens: tuple[int, ...]) -> tuple[int, int]:
        """(block, n): the block behind ``parent`` that shares the most first tokens, and how many;
        (-1, 0) when none shares any."""
        best, most = -1, 0
        candidates = self._behind.get(parent, {})
        for number, block in enumerate(reversed(candidates)):
            n = n_common(self._content[block].tokens, tokens)
            if n > most:
                best, most = block, n
            if most == len(tokens) or number == _MOST_CANDIDATES:
                break
        return best, most

    def behind(self, parent: bytes) -> list[tuple[int, tuple[int, ...]]]:
        """(block, tokens) of all that is registered behind a prefix."""
        return [(b, self._content[b].tokens) for b in self._behind.get(parent, {})]

    def forget_kept(self) -> None:
        """Free every kept block, without telling."""
        for block in list(self._kept):
            self.free(block)

    def free(self, block: int) -> None:
        """Forget what a block holds that nobody uses."""
        self._forget(block)
        self._free.append(block)

    def _forget(self, block: int) -> None:
        content = self._content.pop(block)
        del self._kept[block]
        if content.prefix is not None:
            del self._full[content.prefix]
        behind = self._behind[content.parent]
        del behind[block]
        if not behind:
            del self._behind[content.parent]

    def faults(self, held: dict[int, int]) -> list[str]:
        """What is wrong with the accounts, given how often sequences say to hold each block."""
        found = []
        holders = {b: n for b, n in enumerate(self._holders) if n}
        if holders != held:
            found.append(f"holders are {holders}, sequences say {held}")
        parts = [set(self._free), set(self._kept), set(holders)]
        if sum(map(len, parts)) != self.n_blocks or len(set().union(*parts)) != self.n_blocks:
            found.append(f"free, kept and held are {[len(p) for p in parts]} of {self.n_blocks}")
        if not set(self._kept) <= set(self._content):
            found.append("a kept block has no content")
        if set(self._content) & set(self._free):
            found.append("a free block has content")
        return found


def n_common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many first tokens are the same."""
    if a == b:
        return len(a)
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
