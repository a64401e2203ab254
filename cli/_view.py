"""How an answer is shown while it comes: Markdown on a terminal, plain text everywhere else."""

import re
import sys
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

from edgellm.cli._output import say, visible, write
from edgellm.cli._region import Region

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from edgellm.thinking import Part

FRAME = 0.05  # seconds between two drawings at most; a quarter of the time may go into drawing
LONG_PROMPT = 400  # tokens
THINKING = "thinking"
STYLE = re.compile(r"\x1b\[[0-9;]*m")


class View(Protocol):
    """Takes the parts of one answer."""

    def reading(self, n_tokens: int) -> None:
        """A prompt is about to be read, which may take a while."""

    def show(self, part: "Part") -> None: ...

    def end(self) -> None:
        """No more will come."""


class Silent:
    """Says nothing of prompts."""

    def reading(self, n_tokens: int) -> None:
        pass


class PipeView(Silent):
    """The answer to stdout, thinking to stderr."""

    def __init__(self, hide_thinking: bool) -> None:
        self._hide = hide_thinking
        self._thinking = False

    def show(self, part: "Part") -> None:
        if part.kind != THINKING:
            self._end_thought()
            write(part.text)
        elif not self._hide:
            self._thinking = True
            sys.stderr.write(visible(part.text) if sys.stderr.isatty() else part.text)
            sys.stderr.flush()

    def _end_thought(self) -> None:
        if self._thinking:
            self._thinking = False
            say("")

    def end(self) -> None:
        self._end_thought()
        write("\n")


class PlainView(Silent):
    """For terminals that can do nothing but print, and for those who want it so."""

    def __init__(self, hide_thinking: bool) -> None:
        self._hide = hide_thinking
        self._kind = ""

    def show(self, part: "Part") -> None:
        text = part.text
        if part.kind != self._kind:
            if part.kind == THINKING:
                write("[thinking]\n" if not self._hide else "[thinking ...]")
            elif self._kind:
                write("\n[answer]\n")
            self._kind = part.kind
            text = text.lstrip("\n")
        if part.kind != THINKING or not self._hide:
            write(text)

    def end(self) -> None:
        write("\n")


class RichView:
    """Markdown, block by block: finished blocks are printed for good, only the last one, which
    still grows, is drawn again."""

    def __init__(self, console: "Console", hide_thinking: bool) -> None:
        self._console, self._hide = console, hide_thinking
        self._region = Region(self._write, console.height)
        self._kind = ""
        self._pending = ""  # text of the block that still grows
        self._printed = False  # something of this kind stands above
        self._due = 0.0  # when to draw next
        self._began, self._n_pieces = time.monotonic(), 0

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()

    def reading(self, n_tokens: int) -> None:
        if n_tokens >= LONG_PROMPT:
            self._region.draw(self._lines(self._dim(f"Reading {n_tokens:,} tokens...")))

    def show(self, part: "Part") -> None:
        if not self._kind:
            self._region.erase()
        if part.kind != self._kind:
            self._finish()
            self._kind = part.kind
            self._began = time.monotonic()
        self._n_pieces += 1
        self._pending += visible(part.text)
        if not self._printed:
            self._pending = self._pending.lstrip("\n")
        if time.monotonic() >= self._due:
            self._draw()

    def end(self) -> None:
        if not self._kind:
            self._region.erase()
        self._finish()

    def _draw(self) -> None:
        start = time.monotonic()
        if self._kind == THINKING and self._hide:
            self._region.draw(self._lines(self._dim(f"Thinking... {self._n_pieces} tokens")))
        else:
            finished, growing = self._cut()
            if finished.strip():
                self._region.draw(self._block(finished))
                self._region.commit()
                self._printed = True
            if finished:
                self._pending = growing
            if self._pending.strip():
                self._region.draw(self._block(self._pending))
        took = time.monotonic() - start
        self._due = time.monotonic() + max(FRAME, 3 * took)

    def _finish(self) -> None:
        """The last block of this kind."""
        if self._kind == THINKING and self._hide:
            seconds = time.monotonic() - self._began
            self._region.draw(self._lines(self._dim(f"Thought for {seconds:.1f} s.")))
            self._region.commit()
            self._write("\n")
        elif self._kind:
            if self._pending.strip():
                self._region.draw(self._block(self._pending))
                self._printed = True
            self._region.commit()
            if self._kind == THINKING and self._printed:
                self._write("\n")
        self._pending, self._printed, self._n_pieces = "", False, 0

    def _cut(self) -> tuple[str, str]:
        """(finished blocks, the rest)."""
        whole, newline, rest = self._pending.rpartition("\n")
        if not newline:
            return "", self._pending
        if self._kind == THINKING:
            return whole + newline, rest
        *finished, growing = blocks(whole + newline)
        return "".join(finished), growing + rest

    def _block(self, text: str) -> list[str]:
        if self._kind == THINKING:
            return self._lines(self._dim(text.rstrip("\n")), indent="  ")
        from edgellm.cli._markdown import markdown

        # Each block by itself: rich puts more than one empty line around some.
        lines: list[str] = []
        for block in blocks(text):
            if drawn := self._lines(markdown(block)):
                lines += [""] if lines or self._printed else []
                lines += drawn
        return lines

    def _dim(self, text: str) -> Any:
        from rich.text import Text

        return Text(text, style="dim italic")

    def _lines(self, renderable: "RenderableType", indent: str = "") -> list[str]:
        """Lines with their colours, one column narrower than the terminal."""
        width = max(8, self._console.width - 1 - len(indent))
        with self._console.capture() as captured:
            self._console.print(renderable, width=width)
        lines = [indent + line.rstrip() for line in captured.get().split("\n")]
        # Tables bring empty lines of their own.
        shown = [n for n, line in enumerate(lines) if STYLE.sub("", line).strip()]
        return lines[shown[0] : shown[-1] + 1] if shown else []


def blocks(text: str) -> list[str]:
    """A Markdown text cut where its top-level blocks begin; at least one piece."""
    from edgellm.cli._markdown import parser

    tokens = [token for token in parser().parse(text) if token.level == 0 and token.map is not None]
    starts = sorted({token.map[0] for token in tokens if token.map})
    lines = text.split("\n")
    cuts = [0, *(start for start in starts if start > 0), len(lines)]
    return ["\n".join(lines[a:b] + [""] * (b < len(lines))) for a, b in pairwise(cuts)]
