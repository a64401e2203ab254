"""An answer as it streams, taken apart: thinking, text, and calls of tools.

A call is given out when it is complete and not before. So a call that is cut off by a limit never
reaches a client as one that looks whole, and one that turns out to be malformed can still be shown
as the text it is. What comes out does not depend on how the text is cut: every decision is made at
the character where it is first possible.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from edgellm import thinking
from edgellm.tools import harmony
from edgellm.tools.control import BREAK, PlainText, control_marks, mended
from edgellm.tools.events import (
    Call,
    CallArguments,
    CallEnd,
    CallIds,
    CallStart,
    Content,
    Event,
    Malformed,
    Offered,
    Reasoning,
    offered,
)
from edgellm.tools.formats import Format, Region
from edgellm.tools.json_bodies import Brackets, several
from edgellm.tools.marks import Marks
from edgellm.tools.tagged_bodies import Loose

if TYPE_CHECKING:
    from edgellm.tokenizer import Tokenizer


class AnswerParser:
    """Feed it the text as it comes (`push`), or with the tokens that it came from (`push_token`).

    ``prompt``: its end, where a template may have begun a thought. Without ``tools`` what looks
    like a call is text. With a ``tokenizer`` a mark that it knows as a control token is one only as
    that token. ``seed``: what the ids of the calls are made of.
    """

    def __init__(
        self,
        format: Format,
        tools: Sequence[Mapping[str, Any]] = (),
        prompt: str = "",
        tokenizer: Tokenizer | None = None,
        seed: bytes | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._ids = CallIds(seed, *format.ids)
        self.n_calls = 0
        self._format = format
        self._trim = _Trim()
        known = offered(tools)
        self._harmony = harmony.HarmonyParser(known) if format.is_harmony else None
        self._thinking = thinking.ThinkingParser(prompt, format.breaks)
        self._calls = _CallParser(format, known)
        self._offered, self._thought = known, ""
        marks = harmony.MARKS if format.is_harmony else (*thinking.ALL_MARKS, *format.marks)
        self._control = control_marks(tokenizer, marks) if tokenizer is not None else frozenset()
        self._plain = PlainText(self._control)

    @property
    def closing(self) -> str | None:
        """Inside a thought, what ends it; None: outside."""
        return self._thinking.closing if self._harmony is None else self._harmony.closing

    @property
    def is_thinking(self) -> bool:
        """Whether the text so far ends inside a thought."""
        return self.closing is not None

    def push_token(self, token: int | None, text: str) -> Iterator[Event]:
        """A token and the text that it added, which is none for a control token."""
        if token is not None and not text and self._control:
            assert self._tokenizer is not None
            spelled = self._tokenizer.token_text(token)
            if spelled in self._control and self._tokenizer.is_special(token):
                yield from self._mended(self._read(self._plain.flush() + spelled))
                return
        yield from self.push(text)

    def push(self, text: str) -> Iterator[Event]:
        """What is certain now, with this plain text."""
        yield from self._mended(self._read(self._plain.push(text)))

    def finish(self, complete: bool = False) -> Iterator[Event]:
        """What was held back, once no more will come. ``complete``: the model ended the answer
        itself, so that a last call whose closing mark alone is missing counts."""
        yield from self._mended(self._read(self._plain.flush()))
        yield from self._mended(self._last(complete))

    @staticmethod
    def _mended(events: Iterator[Event]) -> Iterator[Event]:
        """Without the breaks of marks in plain text."""
        for event in events:
            if isinstance(event, Reasoning | Content | CallArguments) and BREAK in event.text:
                event = replace(event, text=mended(event.text))
            yield event

    def _read(self, text: str) -> Iterator[Event]:
        if self._harmony is not None:
            yield from self._number(self._harmony.push(text))
            return
        for part in self._thinking.push(text):
            yield from self._part(part)

    def _last(self, complete: bool) -> Iterator[Event]:
        if self._harmony is not None:
            yield from self._number(self._harmony.finish())
            return
        for part in self._thinking.flush():
            yield from self._part(part)
        if complete and self.is_thinking:
            yield from self._number(self._calls_in_thought())
        yield from self._number(self._calls.finish(complete))

    def _calls_in_thought(self) -> Iterator[Call]:
        """A model that ends its turn with a call and forgot to end the thought before it means the
        call; one that is followed by more thinking was only an idea."""
        calls = _CallParser(self._format, self._offered)
        found: list[Call] = []
        for event in (*calls.push(self._thought), *calls.finish(False)):
            if isinstance(event, Call):
                found.append(event)
            elif isinstance(event, Content) and event.text.strip():
                found = []
        yield from found

    def _part(self, part: thinking.Part) -> Iterator[Event]:
        if part.kind == thinking.ANSWER:
            yield from self._number(self._calls.push(part.text))
            return
        self._thought += part.text
        if text := self._trim.push(part.text):
            yield Reasoning(text)

    def _number(self, found: Iterator[Event | Call]) -> Iterator[Event]:
        for one in found:
            if not isinstance(one, Call):
                if isinstance(one, Reasoning):
                    one = Reasoning(self._trim.push(one.text))
                    if not one.text:
                        continue
                yield one
                continue
            index = self.n_calls
            self.n_calls += 1
            yield CallStart(index, one.id or self._ids[index], one.name)
            yield CallArguments(index, one.arguments)
            yield CallEnd(index)


class _Trim:
    """Takes the white space off both ends of what streams through."""

    def __init__(self) -> None:
        self._held, self._begun = "", False

    def push(self, text: str) -> str:
        text = self._held + text
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        shown = text.rstrip()
        self._held = text[len(shown) :]
        return shown


class _CallParser:
    """Text and calls, told apart behind the thinking."""

    def __init__(self, format: Format, known: Offered) -> None:
        self._format, self._offered = format, known
        self._held = ""
        self._gap = ""  # held back: it may stand before a call, and then is none of the text
        self._had_mark = False
        self._section_end: str | None = None
        self._open: _OpenCall | None = None
        self._stray = ""
        regions = format.regions if known else ()
        self._regions = {region.open: region for region in regions}
        self._sections = dict(format.section) if known else {}
        outside = [*format.silent, *self._sections, *self._regions]
        self._outside = Marks(outside)

    def push(self, text: str) -> Iterator[Event | Call]:
        self._held += text
        while self._held or self._open:
            before = self._held, self._open, self._section_end
            if self._open is not None:
                yield from self._in_call(self._open)
            else:
                yield from self._between()
            if before == (self._held, self._open, self._section_end):
                return  # more has to come first

    def finish(self, complete: bool) -> Iterator[Event | Call]:
        while self._open is not None:
            call, self._open = self._open, None
            found = call.rest(self._held, complete)
            if found is None:  # it was cut off: nothing of it is shown
                self._held = ""
                break
            calls, size = found
            shown, self._held = self._held[:size], self._held[size:]
            yield from calls or self._text(shown)
            yield from self.push("")
        if self._section_end is None:
            yield from self._text(self._held)
        self._held = ""
        if self._gap and not self._had_mark:
            yield Content(self._gap)

    def _between(self) -> Iterator[Event | Call]:
        """Not in a call."""
        if self._stray:
            text = self._held.lstrip()
            if text.startswith(self._stray):
                self._held, self._stray = text[len(self._stray) :], ""
                return
            if self._stray.startswith(text):
                return
            self._stray = ""
        if self._section_end is not None:
            marks = Marks([self._section_end, *self._regions])
        else:
            marks = self._outside
        place, mark = marks.first(self._held)
        text, self._held = self._held[:place], self._held[place:]
        if text and self._section_end is None:
            yield from self._text(text)
        if mark is None:
            return
        if mark in self._regions:
            self._open = _OpenCall(self._regions[mark], self._offered)
            self._had_mark |= not self._regions[mark].keep_open
            return
        self._held = self._held[len(mark) :]
        if mark == self._section_end:
            self._section_end = None
        elif mark in self._sections:
            self._section_end, self._had_mark = self._sections[mark], True

    def _in_call(self, call: _OpenCall) -> Iterator[Event | Call]:
        found = call.look(self._held)
        if found is None:
            return
        calls, size = found
        self._open = None
        shown, self._held = self._held[:size], self._held[size:]
        if calls:
            self._had_mark = True
            self._stray = call.region.stray
        yield from calls or self._text(shown)

    def _text(self, text: str) -> Iterator[Event]:
        text = self._gap + text
        shown = text.rstrip(self._format.gap)
        self._gap = text[len(shown) :]
        if shown:
            yield Content(shown)


class _OpenCall:
    """A call that has begun. The text that it is shown begins with the mark and only grows."""

    def __init__(self, region: Region, known: Offered) -> None:
        self.region, self._offered = region, known
        self._start = 0 if region.keep_open else len(region.open)
        self._at = self._start  # where the search for the end goes on
        self._brackets: Brackets | None = None
        self._loose: tuple[list[Call], int] | None = None

    def look(self, text: str) -> tuple[list[Call], int] | None:
        """(calls, size of their text) once they are complete; no calls: it is text. None: wait."""
        if self._loose is not None and self._follows_call(text, self._loose[1]):
            return self._loose
        if not self.region.viable(text[self._start :], self._offered):
            return self._as_text()
        return self._closed(text) if self.region.closes else self._balanced(text)

    def rest(self, text: str, complete: bool) -> tuple[list[Call], int] | None:
        """The same when nothing follows; None: it was cut off, or no more than begun."""
        if self._loose is not None:
            return self._loose
        body = text[self._start :]
        if self.region.rest:
            calls = self._complete_ones(body)
            if calls:
                return calls, len(text)
        if complete:
            try:
                calls = self.region.read(body, self._offered) or []
                if calls:
                    return calls, len(text)
            except (Malformed, Loose):
                pass
            if body.strip():
                return [], len(text)
        if self.region.keep_open and not re.search(r"\(|\"\w+\"", body):
            return self._as_text()  # nothing says yet that it is a call
        return None

    def _complete_ones(self, body: str) -> list[Call]:
        found: list[Call] = []
        try:
            for call in several(body, self._offered, whole=False):
                found.append(call)
        except Malformed:
            pass
        return found

    def _as_text(self) -> tuple[list[Call], int]:
        return [], len(self.region.open)

    def _closed(self, text: str) -> tuple[list[Call], int] | None:
        while True:
            hits = [(place, mark) for mark in self.region.closes
                    if (place := text.find(mark, self._at)) >= 0]  # fmt: skip
            if not hits:
                longest = max(map(len, self.region.closes))
                self._at = max(self._at, len(text) - longest + 1)
                return None
            place, mark = min(hits)
            if self._loose is not None and self._follows_call(text[:place], self._loose[1]):
                return self._loose
            self._at = end = place + len(mark)
            try:
                calls = self.region.read(text[self._start : place], self._offered)
            except Loose as loose:
                self._loose = self._loose or (loose.calls, end)
                continue
            except Malformed:
                return self._loose or ([], end)
            if calls is not None:
                return calls, end

    def _follows_call(self, text: str, at: int) -> bool:
        return text[at:].lstrip().startswith(self.region.open)

    def _balanced(self, text: str) -> tuple[list[Call], int] | None:
        if self._brackets is None:
            found = re.compile(self.region.bracket).search(text, self._start)
            if found is None:
                return None
            self._brackets = Brackets(found.start(), self.region.quotes)
        end = self._brackets.end(text)
        if end is None:
            return None
        try:
            calls = self.region.read(text[self._start : end], self._offered)
        except Malformed:
            calls = None
        return (calls, end) if calls else ([], end)
