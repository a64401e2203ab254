"""Which model file a command works on, and what is shown while it is fetched."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from edgellm.cli._bar import rich_bar
from edgellm.cli._output import say, visible

if TYPE_CHECKING:
    from edgellm.hub import Item


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

    bar = DownloadBar()
    try:
        return resolve(model, bar)
    finally:
        bar.close()


class DownloadBar:
    """Progress of a fetch: a bar on a terminal, one line elsewhere."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._item: Item | None = None

    def __call__(self, item: "Item", done: int) -> None:
        if item != self._item:
            self._announce(item, done)
        if self._bar is not None:
            self._bar.update(0, completed=done if item.size is None else min(done, item.size))

    def _announce(self, item: "Item", done: int) -> None:
        self.close()
        if self._item is None or self._item.title != item.title:
            size = f", {item.size / 1e6:.0f} MB" if item.size is not None else ""
            licence = f", licence {item.licence}" if item.licence else ""
            say(visible(f"Fetching {item.title}{size}{licence}; this happens once."))
        self._item = item
        if sys.stderr.isatty():
            self._bar = rich_bar(item.size, done)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def complete(incomplete: str) -> list[str]:
    """For the shell: names that begin so, and paths of GGUF files and folders."""
    from edgellm.hub.shelf import known_names

    found = [name for name in known_names() if name.startswith(incomplete)]
    folder, _, start = incomplete.rpartition("/")
    try:
        with os.scandir(
            os.path.expanduser(folder or ("/" if incomplete[:1] == "/" else "."))
        ) as it:
            for item in it:
                shown = incomplete[: len(incomplete) - len(start)] + item.name
                if item.name.startswith(start) and (start or item.name[0] != "."):
                    if item.is_dir():
                        found.append(f"{shown}/")
                    elif item.name.lower().endswith(".gguf"):
                        found.append(shown)
    except OSError:
        pass
    return found
