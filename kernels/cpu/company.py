"""How many threads a step should use while other processes want the cores too.

A team waits at every barrier for the thread whose core was taken, several hundred times for each
token: with one of two cores busy, one thread alone reads weights faster than two that wait for each
other. So a thread that keeps losing its core leaves the team, and is tried again later, ever more
rarely while it keeps losing.

Linux counts for each thread how long it was ready but not running (``schedstat``, its second
number); elsewhere the team keeps its size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

_WINDOW = 0.02  # seconds of steps between two looks: a look costs some 20 us a thread
_LOST = 0.25  # share of the time without a core that makes a thread leave: with a rival it is half,
# and between steps Python takes up to a tenth
_FIRST_PAUSE, _GROWTH, _LAST_PAUSE = 0.05, 4, 2.0  # seconds until a thread is tried again


class Company:
    """Sizes a team step by step. ``waits``: seconds that each thread was ready but not running."""

    def __init__(
        self, n_threads: int, waits: Callable[[int], list[float]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.size = self._n_threads = n_threads
        self._waits, self._clock = waits, clock
        self._pause, self._retry_at = _FIRST_PAUSE, 0.0
        self._before: list[float] = []  # what ``waits`` said when the window began
        self._elapsed = 0.0

    def begin(self) -> int:
        """The number of threads of the next step."""
        if self.size < self._n_threads and self._clock() >= self._retry_at:
            self.size += 1  # on trial
            self._before, self._retry_at = [], math.inf
        if not self._before:
            self._before, self._elapsed = self._waits(self.size), 0.0
        return self.size

    def end(self, seconds: float) -> None:
        """The step took so long."""
        self._elapsed += seconds
        if self._elapsed < _WINDOW:
            return
        after = self._waits(self.size)
        lost = max((b - a for a, b in zip(self._before, after, strict=False)), default=0.0)
        self._before, elapsed, self._elapsed = after, self._elapsed, 0.0
        if lost <= _LOST * elapsed:
            if self.size == self._n_threads:
                self._pause = _FIRST_PAUSE
            elif self._retry_at == math.inf:
                self._retry_at = self._clock()  # the trial went well: the next one
        elif self.size > 1:
            self.size -= 1
            self._before = []
            self._retry_at = self._clock() + self._pause
            self._pause = min(_GROWTH * self._pause, _LAST_PAUSE)

    def interrupt(self) -> None:
        """A step that is not to be judged: the window begins anew."""
        self._before = []


def waits_of(thread_ids: Sequence[int]) -> Callable[[int], list[float]]:
    """Seconds that the first n of this process's threads (by the system's number) were ready but
    not running; nothing where the system does not tell."""
    files = [f"/proc/self/task/{number}/schedstat" for number in thread_ids]

    def read(n: int) -> list[float]:
        found = []
        for path in files[:n]:
            try:
                with open(path, "rb", buffering=0) as file:
                    found.append(int(file.read(64).split()[1]) * 1e-9)
            except (OSError, IndexError):
                return []
        return found

    return read
