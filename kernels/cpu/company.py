"""How many threads a step should use while other processes want the cores too.

A team waits at every barrier for the thread whose core was taken, several hundred times for each
token: with one of two cores busy, one thread alone reads weights faster than two that wait for each
other. So a thread that keeps losing its core leaves the team. It is tried again once a core had
little to do in the meantime, for a trial beside a rival costs as much as a dozen steps; ever more
rarely while it keeps losing.

Linux counts for each thread how long it was ready but not running (``schedstat``, its second
number), and for each CPU how long it was idle (``/proc/stat``); elsewhere the team keeps its size.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence

_WINDOW = 0.02  # seconds of steps between two looks: a look costs some 20 us a thread
_LOST = 0.25  # share of the time without a core that makes a thread leave: with a rival it is half,
# and between steps Python takes up to a tenth
_FIRST_PAUSE, _GROWTH, _LAST_PAUSE = 0.05, 4, 2.0  # seconds until a thread is tried again
_LOOK = 0.25  # seconds until the next look at a busy machine
_IDLE = 0.5  # cores that were idle on average make room for a thread
_LONGEST = 10.0  # seconds without a trial: a rival may only want what nobody else takes


class Company:
    """Sizes a team step by step. ``waits``: seconds that each of the first n threads was ready but
    not running; ``idle``: seconds that CPUs of the team had nothing to do, all together, or None
    where the system does not tell."""

    def __init__(
        self, n_threads: int, waits: Callable[[int], list[float]],
        idle: Callable[[], float | None], clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.size = self._n_threads = n_threads
        self._waits, self._idle, self._clock = waits, idle, clock
        self._pause, self._retry_at = _FIRST_PAUSE, 0.0
        self._left_at = 0.0  # when the last thread left
        self._last_look: tuple[float, float | None] = 0.0, None  # then, and what ``idle`` said
        self._before: list[float] = []  # what ``waits`` said when the window began
        self._elapsed = 0.0

    def begin(self) -> int:
        """The number of threads of the next step."""
        if self.size < self._n_threads and self._clock() >= self._retry_at:
            if self._has_room():
                self.size += 1  # on trial
                self._before, self._retry_at = [], math.inf
            else:
                self._retry_at = self._clock() + _LOOK
        if not self._before:
            self._before, self._elapsed = self._waits(self.size), 0.0
        return self.size

    def _has_room(self) -> bool:
        """Whether a core was idle enough since the last look."""
        (then, before), now, idle = self._last_look, self._clock(), self._idle()
        self._last_look = now, idle
        if before is None or idle is None or now - self._left_at >= _LONGEST:
            return True
        return idle - before >= _IDLE * (now - then)

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
            self._before, self._left_at = [], self._clock()
            self._last_look = self._left_at, self._idle()
            self._retry_at = self._left_at + self._pause
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


def idle_of(cpus: Iterable[int], path: str = "/proc/stat") -> Callable[[], float | None]:
    """Seconds that these CPUs had nothing to do, all together, since the machine was started; None
    where the system does not tell."""
    names = {f"cpu{number}".encode() for number in cpus}

    def read() -> float | None:
        try:
            with open(path, "rb") as file:
                rows = [line.split() for line in file if line.startswith(b"cpu")]
            # user nice system idle iowait ..., in ticks of the clock
            ticks = [int(row[4]) + int(row[5]) for row in rows if row[0] in names]
            return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None
        except (OSError, ValueError, IndexError):
            return None

    return read
