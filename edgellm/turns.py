"""Engines of one process that share its cores: their steps take turns.

Every engine has a team of threads for all cores. Two teams at work at once would wait for each
other at each of their barriers; a step at a time, each has the machine for itself.
"""

from __future__ import annotations

import threading


class Turns:
    """A lock that is given in the order of asking, so that no engine is passed over."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._next = self._served = 0

    def __enter__(self) -> None:
        with self._condition:
            mine = self._next
            self._next += 1
            while self._served != mine:
                self._condition.wait()

    def __exit__(self, *exception: object) -> None:
        with self._condition:
            self._served += 1
            self._condition.notify_all()
