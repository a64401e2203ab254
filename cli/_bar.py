"""How far a piece of work on a file has come, and how long it will take yet."""

import sys
import time
from types import TracebackType
from typing import Any, Self

from edgellm.cli._output import Status

FIRST_ESTIMATE = 1.0  # seconds of work before it is said how long the rest takes


class Bar:
    """A bar on a terminal, a line now and then elsewhere; both with the time that is left. A
    context manager; called with the bytes done and the bytes in all."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._bar: Any = None
        self._line = Status()
        self._start = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if sys.stderr.isatty():
            if self._bar is None:
                self._bar = rich_bar(total, 0, self._what)
            self._bar.update(0, completed=done)
            return
        seconds = time.monotonic() - self._start
        if seconds > FIRST_ESTIMATE and 0 < done < total:
            left = seconds * (total - done) / done
            self._line(f"{self._what}: {100 * done // total} %, {left:.0f} s left")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
        self._line.clear()


def rich_bar(total: int | None, done: int, what: str = "") -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    named = (TextColumn("{task.description}"),) if what else ()
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*named, *columns, console=Console(stderr=True))
    bar.add_task(what, total=total, completed=done)  # what was there before is no speed
    bar.start()
    return bar
