"""Marks that are tokens of their own, and the same letters as plain text.

Where a model's vocabulary has a mark as a control token, only that token is the mark: a model that
quotes what a user wrote spells it in ordinary tokens, and that is text. So plain text has such
marks broken up before the parser sees it, by a character that nobody writes and that is taken out
of everything that comes out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from edgellm.tools.marks import Marks

if TYPE_CHECKING:
    from edgellm.tokenizer import Tokenizer

BREAK = "\ufdd0"  # a code point that Unicode keeps free for uses within a program


def control_marks(tokenizer: Tokenizer, marks: Iterable[str]) -> frozenset[str]:
    """The control tokens of which marks are made."""
    return frozenset(
        mark[start:end] for mark in marks for start, end in tokenizer.control_spans(mark)
    )


def mended(text: str) -> str:
    """The text as it was."""
    return text.replace(BREAK, "")


class PlainText:
    """Breaks up the marks in plain text that streams through it."""

    def __init__(self, marks: Iterable[str]) -> None:
        self._marks = Marks(sorted(marks))
        self._held = ""

    def push(self, text: str) -> str:
        """What is certain now."""
        self._held += text
        done = ""
        while self._held:
            place, mark = self._marks.first(self._held)
            done, self._held = done + self._held[:place], self._held[place:]
            if mark is None:
                break
            done += mark[0] + BREAK
            self._held = self._held[1:]
        return done

    def flush(self) -> str:
        """What was held back: a control token or the end follows."""
        held, self._held = self._held, ""
        return held
