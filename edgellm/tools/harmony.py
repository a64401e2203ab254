"""gpt-oss writes an answer as several messages, each with a header that says whom it is for.

``<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f
<|constrain|>json<|message|>{…}<|call|>``: thinking, then a call. The answer is on channel final; a
commentary for nobody in particular is part of it.
"""

import re
from collections.abc import Iterator

from edgellm.tools.events import Call, Content, Event, Malformed, Offered, Reasoning
from edgellm.tools.json_bodies import object_text

START, MESSAGE = "<|start|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKS = (START, MESSAGE, "<|channel|>", "<|constrain|>", *ENDS)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
# A message ends only where the next one begins: its text may hold the texts of the marks.
_END = re.compile(r"<\|(?:end|call|return)\|>(?=<\|start\|>)")
_LAST = re.compile(r"<\|(?:end|call|return)\|>\Z")
_BROKEN = re.compile(r"(?:<\|(?:end|call|return)\|>)+<\|start\|>")


class HarmonyParser:
    """The messages of one answer; calls come out as they end."""

    def __init__(self, known: Offered) -> None:
        self._offered = known
        self._held = ""
        self._header: str | None = None  # of the message whose text is read now

    @property
    def closing(self) -> str | None:
        """Inside a thought, what ends it."""
        if self._header is None or _RECIPIENT.search(self._header):
            return None
        channel = _CHANNEL.search(self._header)
        return "<|end|>" if channel is not None and channel[1] == "analysis" else None

    def push(self, text: str) -> Iterator[Event | Call]:
        """What is certain now."""
        self._held += text
        while self._held:
            before = self._held, self._header
            yield from self._in_header() if self._header is None else self._in_message(self._header)
            if before == (self._held, self._header):
                return

    def finish(self) -> Iterator[Event | Call]:
        """What was held back, once no more will come."""
        held, self._held = self._held, ""
        if self._header is None:
            # a header alone says nothing; without marks it is the text of a model gone astray
            if held and not any(mark in held for mark in MARKS) and not _RECIPIENT.search(held):
                yield Content(held)
            return
        held = _LAST.sub("", held)
        if (place := self._partial(held)) < len(held):
            held = held[:place]
        yield from self._message(self._header, held, whole=True)

    def _in_header(self) -> Iterator[Event | Call]:
        broken = _BROKEN.search(self._held)
        place = self._held.find(MESSAGE)
        if not self._may_be_header():
            self._header = ""  # a model that forgot the header, or was not asked for one
        elif broken is not None and (place < 0 or broken.start() < place):
            self._held = self._held[broken.end() :]  # a header that nothing came of
        elif place >= 0:
            self._header = self._held[:place]
            self._held = self._held[place + len(MESSAGE) :]
        yield from ()

    def _may_be_header(self) -> bool:
        text = self._held.lstrip()
        begins = (*MARKS, "to=", "assistant")
        return any(text.startswith(one) or one.startswith(text) for one in begins)

    def _in_message(self, header: str) -> Iterator[Event | Call]:
        found = _END.search(self._held)
        if found is not None:
            text = self._held[: found.start()]
            self._held = self._held[found.end() + len(START) :]
            self._header = None
            yield from self._message(header, text, whole=True)
            return
        if _RECIPIENT.search(header):
            return  # a call is read as a whole
        place = self._partial(self._held)
        text, self._held = self._held[:place], self._held[place:]
        yield from self._message(header, text, whole=False)

    @staticmethod
    def _partial(text: str) -> int:
        """From where on a text may be the end of its message."""
        for place in range(max(0, len(text) - len("<|return|><|start|>") + 1), len(text)):
            if any((end + START).startswith(text[place:]) for end in ENDS):
                return place
        return len(text)

    def _message(self, header: str, text: str, whole: bool) -> Iterator[Event | Call]:
        recipient = _RECIPIENT.search(header)
        if recipient is not None:
            if whole:
                yield from self._call(recipient[1], text)
            return
        channel = _CHANNEL.search(header)
        if not text:
            return
        if channel is not None and channel[1] == "analysis":
            yield Reasoning(text)
        else:
            yield Content(text)

    def _call(self, recipient: str, text: str) -> Iterator[Event | Call]:
        name = recipient.removeprefix("functions.")
        if name not in self._offered:
            return  # for a tool that is not there, and not for the reader
        try:
            yield Call(name, object_text(text))
        except Malformed:
            return
