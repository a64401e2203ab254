"""Results go to stdout, everything else to stderr."""

import os
import sys
import time
from collections.abc import Iterable

# What text of a model or a file must not do to a terminal: move the cursor, set its title, ring.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
del _CONTROLS[ord("\n")], _CONTROLS[ord("\t")]
SECONDS_BETWEEN_LINES = 5.0  # of progress that goes to a file


def visible(text: str) -> str:
    """Control characters as escapes."""
    return text.translate(_CONTROLS)


def write(text: str) -> None:
    """A piece of the result, at once; harmless on a terminal, byte for byte elsewhere."""
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def say(text: str) -> None:
    """A line on stderr."""
    print(text, file=sys.stderr, flush=True)


class Status:
    """Progress on stderr: one line that is rewritten on a terminal; elsewhere, and where the
    terminal can only print (``plain``), a line now and then, so that logs stay short."""

    def __init__(self, plain: bool = False) -> None:
        self._open = False
        self._next_line = 0.0  # when another may be printed
        self._plain = plain or os.environ.get("TERM") == "dumb"

    def __call__(self, text: str) -> None:
        if sys.stderr.isatty() and not self._plain:
            sys.stderr.write(f"\r\x1b[K{visible(text)}")
            sys.stderr.flush()
            self._open = True
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
            say(text)

    def on_terminal(self, text: str) -> None:
        """Only where a line can be rewritten: for what changes many times."""
        if sys.stderr.isatty() and not self._plain:
            self(text)

    def clear(self) -> None:
        """Remove the rewritten line before anything else is printed."""
        if self._open:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._open = False


def size(n_bytes: int) -> str:
    """Bytes for people."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= factor:
            return f"{n_bytes / factor:.1f} {unit}"
    return f"{n_bytes} B"


def columns(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Lines of a table, indented by two; cells are padded to the widest of their column."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
