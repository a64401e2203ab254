"""Which model file a command works on, and what is shown while it is fetched."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from edgellm.cli._output import say

if TYPE_CHECKING:
    from edgellm.hub import Entry


def pick(argument: str | None, flag: str | None) -> str | None:
    """The model named on the command line, else by EDGELLM_MODEL, else None for the default."""
    if argument is not None and flag is not None:
        raise typer.BadParameter("the model is named twice", param_hint="'-m' / '--model'")
    return argument or flag or os.environ.get("EDGELLM_MODEL") or None


def locate(model: str | None) -> Path:
    """The file, fetched with a progress bar when it has to be."""
    if model is not None and os.path.isfile(model):  # the common case: no catalogue to read
        return Path(model)
    from edgellm.hub import resolve

    bar = _DownloadBar()
    try:
        return resolve(model, bar)
    finally:
        bar.close()


class _DownloadBar:
    """A bar on a terminal; one line elsewhere."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._announced = False

    def __call__(self, entry: "Entry", done: int) -> None:
        if not self._announced:
            self._announced = True
            size = f"{entry.size / 1e6:.0f} MB"
            say(f"Fetching {entry.title}, {size}, licence {entry.licence}; this happens once.")
            if sys.stderr.isatty():
                self._bar = _rich_bar(entry.size)
        if self._bar is not None:
            self._bar.update(0, completed=min(done, entry.size))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _rich_bar(total: int) -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True))
    bar.add_task("", total=total)
    bar.start()
    return bar
