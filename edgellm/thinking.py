"""Which part of an answer is the model's thinking, told apart while it streams.

Models put their thinking between marks at the start of an answer. Often the template has already
written the opening mark at the end of the prompt, so the answer begins in the middle of a thought.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

THINKING, ANSWER = "thinking", "answer"

# opening mark -> closing mark
MARKS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<mm:think>": "</mm:think>",
    "<think:opensource>": "</think:opensource>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|open|>think<|sep|>": "<|close|>think<|sep|>",  # Kimi K3
    "<|channel>thought\n": "<channel|>",  # Gemma 4
}
# Marks that say "here begins the answer" and are no part of it.
SILENT = (
    "<|START_RESPONSE|>",
    "<|open|>response<|sep|>",
)
ALL_MARKS = (*MARKS, *MARKS.values(), *SILENT)


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer; ``kind`` is THINKING or ANSWER."""

    kind: str
    text: str


class ThinkingParser:
    """Feed it the text as it comes. The result does not depend on how the text is cut.

    ``breaks``: marks that end a thought although nobody closed it, and begin what follows.
    """

    def __init__(self, prompt: str = "", breaks: Sequence[str] = ()) -> None:
        self._breaks = tuple(breaks)
        self._held = ""
        self._close: str | None = None  # inside a thought: what ends it
        self._begun = False  # the answer itself has begun: marks in it are its text
        self._after = False  # a thought came before: white space after it is its own
        end = prompt.rstrip()
        for opening, closing in MARKS.items():
            if end.endswith(opening.rstrip()):
                self._close = closing

    @property
    def closing(self) -> str | None:
        """Inside a thought, the mark that ends it; None: outside."""
        return self._close

    def push(self, text: str) -> Iterator[Part]:
        """The parts that are certain now."""
        self._held += text
        while self._held:
            before = self._held
            if self._begun:
                yield Part(ANSWER, self._take(len(self._held)))
            elif self._close is not None:
                yield from self._think(self._close)
            else:
                yield from self._begin()
            if self._held == before:  # more has to come first
                return

    def flush(self) -> Iterator[Part]:
        """What was held back, once no more will come."""
        held, self._held = self._held, ""
        if self._close is None and self._after:
            held = held.lstrip()
        if held:
            yield Part(ANSWER if self._close is None else THINKING, held)

    def _take(self, size: int) -> str:
        taken, self._held = self._held[:size], self._held[size:]
        return taken

    def _think(self, closing: str) -> Iterator[Part]:
        ends = (closing, *self._breaks)
        hits = [(place, end) for end in ends if (place := self._held.find(end)) >= 0]
        if hits:
            place, end = min(hits)
            if thought := self._take(place):
                yield Part(THINKING, thought)
            if end == closing:
                self._take(len(closing))
            self._close, self._after = None, True
            return
        keep = max(
            n
            for end in ends
            for n in range(min(len(end) - 1, len(self._held)) + 1)
            if self._held.endswith(end[:n])
        )
        if thought := self._take(len(self._held) - keep):
            yield Part(THINKING, thought)

    def _begin(self) -> Iterator[Part]:
        """Before the first word: an opening mark, or the answer."""
        text = self._held.lstrip()
        for opening, closing in MARKS.items():
            if text.startswith(opening):
                self._held, self._close = text[len(opening) :], closing
                return
        for mark in SILENT:
            if text.startswith(mark):
                self._held, self._after = text[len(mark) :], True
                return
        if any(mark.startswith(text) for mark in (*MARKS, *SILENT)):  # "" as well: hold
            return
        self._begun = True
        if self._after:
            self._held = text
        yield Part(ANSWER, self._take(len(self._held)))
