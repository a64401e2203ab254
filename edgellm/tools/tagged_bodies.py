"""Calls that put every argument between tags, its value as bare text."""

import html
import json
import re
from dataclasses import dataclass
from typing import Any

from edgellm.tools.events import Call, Malformed, Offered
from edgellm.tools.values import convert, literal, property_schema


class Loose(Exception):
    """A call whose last argument was not closed before the call was: maybe the closing mark is a
    part of the argument, which what follows has to tell."""

    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self.calls = calls


@dataclass(frozen=True)
class Tagged:
    """How one format writes it, as regular expressions: ``head`` with the ``name`` of the tool,
    ``item`` with the ``key`` of an argument and maybe its ``kind``, ``end`` of a value, ``tail`` of
    a call.

    ``trim``: one line end on either side of a value belongs to the tags. ``loose``: a last value
    that nobody closed may end where the call does.
    """

    head: str
    item: str
    end: str
    tail: str = r"\s*"
    trim: bool = False
    loose: bool = True

    def __call__(self, body: str, offered: Offered) -> list[Call] | None:
        """Read what stands before a closing mark; None: the mark is part of a value."""
        head = re.match(self.head, body)
        if head is None or (name := html.unescape(head["name"]).strip()) not in offered:
            raise Malformed
        parameters, found = offered[name], dict[str, Any]()
        item, at = re.compile(self.item), head.end()
        # A value ends where its tag is followed by something that can follow it, so that a value
        # may hold the text of the tag.
        closing = re.compile(rf"{self.end}(?={self.item}|{self.tail}\Z)")
        is_loose = False
        while opening := item.match(body, at):
            close = closing.search(body, opening.end())
            stop, at = (close.start(), close.end()) if close else (None, len(body))
            if (
                unclosed := self._unclosed(body, opening.end(), stop, parameters, found)
            ) is not None:
                stop = at = unclosed
            elif stop is None:
                if not self.loose:
                    return None
                last = re.compile(rf"{self.tail}\Z").search(body, opening.end())
                stop, is_loose = (last.start() if last else len(body)), True
            key = html.unescape(opening["key"])
            kind = opening.groupdict().get("kind")
            found[key] = self._value(body[opening.end() : stop], kind, parameters, key)
        if not re.compile(self.tail).fullmatch(body, at) and not is_loose:
            raise Malformed
        try:
            arguments = json.dumps(found, ensure_ascii=False, allow_nan=False)
        except ValueError:
            raise Malformed from None
        calls = [Call(name, arguments)]
        if is_loose:
            raise Loose(calls)
        return calls

    def _unclosed(
        self, body: str, start: int, stop: int | None, parameters: Any, found: Any
    ) -> int | None:
        """Where a value ends that nobody closed: before the next argument that the tool has."""
        limit = len(body) if stop is None else stop
        known = parameters.get("properties") or {}
        for following in re.compile(rf"\n{self.item}").finditer(body, start, limit):
            if following["key"] in known and following["key"] not in found:
                return following.start()
        return None

    def _value(self, text: str, kind: str | None, parameters: Any, key: str) -> Any:
        if self.trim:
            text = text.removeprefix("\n").removesuffix("\n")
        if kind in ("string", "true"):
            return text
        if kind is not None:
            value = literal(text.strip())
            if value is not None or text.strip() == "null":
                return value
        return convert(text, property_schema(parameters, key))
