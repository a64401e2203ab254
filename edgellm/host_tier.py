"""Memory beside the pools for blocks that they give away: a second, larger and slower cache.

Restoring a block has to be cheaper than computing it; whether it is, is measured, and the tier
stays unused while it is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_NEWEST = 0.3  # weight of the newest measurement


class HostTier:
    """Copies of blocks by (group, prefix), ``most_bytes`` of them at most, least recently used
    first. ``read(group, block)`` and ``write(group, block, data)`` move a block's bytes;
    ``compute_seconds()`` is what a block costs to compute."""

    def __init__(
        self, most_bytes: int, read: Callable[[int, int], bytes],
        write: Callable[[int, int, bytes], None], compute_seconds: Callable[[], float],
    ) -> None:  # fmt: skip
        self._most, self._read, self._write = most_bytes, read, write
        self._compute_seconds, self._restore_seconds = compute_seconds, 0.0
        self._kept: dict[tuple[int, bytes], bytes] = {}
        self.n_bytes = self.n_stored = self.n_restored = 0

    @property
    def is_worth_it(self) -> bool:
        """Whether restoring is faster than computing, as far as is known."""
        return self._restore_seconds <= self._compute_seconds()

    def store(self, group: int, prefix: bytes, block: int) -> None:
        """Keep a copy of a full block that its pool gives away."""
        key = group, prefix
        if key in self._kept:
            self._kept[key] = self._kept.pop(key)  # now the newest
            return
        data = self._read(group, block)
        while self._kept and self.n_bytes + len(data) > self._most:  # before it grows
            self._forget(next(iter(self._kept)))
        if self.n_bytes + len(data) <= self._most:
            self._kept[key] = data
            self.n_bytes += len(data)
            self.n_stored += 1

    def has(self, group: int, prefix: bytes) -> bool:
        return (group, prefix) in self._kept and self.is_worth_it

    def take(self, group: int, prefix: bytes) -> bytes:
        """Data of a block that is about to be restored."""
        return self._forget((group, prefix))

    def restore(self, group: int, block: int, data: bytes) -> None:
        """Write a block's data back into its pool."""
        begun = time.perf_counter()
        self._write(group, block, data)
        seconds = time.perf_counter() - begun
        known = self._restore_seconds or seconds
        self._restore_seconds = known + _NEWEST * (seconds - known)
        self.n_restored += 1

    def forget(self, group: int, prefix: bytes) -> None:
        """Let a copy go, if there is one."""
        if (group, prefix) in self._kept:
            self._forget((group, prefix))

    def clear(self) -> None:
        self._kept.clear()
        self.n_bytes = 0

    def _forget(self, key: tuple[int, bytes]) -> bytes:
        data = self._kept.pop(key)
        self.n_bytes -= len(data)
        return data
