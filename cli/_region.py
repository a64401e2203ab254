"""Lines at the bottom of a terminal that are drawn again and again without flicker.

Only lines that changed are written, each cleared behind its text instead of before it. What has
scrolled out of the window cannot be changed any more and stays as it is.
"""

from collections.abc import Callable


class Region:
    """``write`` takes text with control sequences; lines must be narrower than the terminal."""

    def __init__(self, write: Callable[[str], None], height: int) -> None:
        self._write, self._height = write, max(2, height)
        self._lines: list[str] = []  # as they stand there, the cursor behind the last one

    def draw(self, lines: list[str]) -> None:
        """Make the region these lines."""
        old, lines = self._lines, lines or [""]
        same = 0
        while same < min(len(old), len(lines)) and old[same] == lines[same]:
            same += 1
        if same == len(old) == len(lines):
            return
        out = ""
        if same == len(old):
            out = "\n" if old else ""
        else:
            same = min(max(same, len(old) - self._height + 1), len(lines) - 1)
            up = len(old) - 1 - same
            out = "\r" + (f"\x1b[{up}A" if up else "")
        out += "\x1b[K\n".join(lines[same:]) + "\x1b[K"
        if len(lines) < len(old):
            out += "\x1b[J"
        self._write(out)
        self._lines = list(lines)

    def commit(self) -> None:
        """Leave the lines where they are and begin below them."""
        if self._lines:
            self._write("\n")
            self._lines = []

    def erase(self) -> None:
        """Take the lines away."""
        if self._lines:
            self.draw([""])
            self._write("\r")
            self._lines = []
