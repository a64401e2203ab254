"""Engines of one process that share its cores: their steps take turns.

Every engine has a team of threads for all cores. Two teams at work at once would wait for each
other at each of their barriers; a step at a time, each has the machine for itself.
"""

from __future__ import annotations

import threading
from collections import deque


class Turns:
    """A lock that is given in the order of asking, so that no engine is passed over. Who keeps it
    for ``patience`` seconds, as a stuck engine does, loses it: the others go on beside him."""

    def __init__(self, patience: float = 20.0) -> None:
        self._patience = patience
        self._condition = threading.Condition()
        self._queue: deque[int] = deque()  # threads; the first has the turn

    def __enter__(self) -> None:
        mine = threading.get_ident()
        with self._condition:
            self._queue.append(mine)
            while (first := self._queue[0]) != mine:
                if not self._condition.wait(self._patience) and self._queue[0] == first:
                    self._queue.popleft()
                    self._condition.notify_all()

    def __exit__(self, *exception: object) -> None:
        with self._condition:
            if threading.get_ident() in self._queue:
                self._queue.remove(threading.get_ident())
                self._condition.notify_all()
