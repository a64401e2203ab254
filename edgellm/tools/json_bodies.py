"""Calls whose arguments are JSON, alone or behind a name."""

import json
import re
from collections.abc import Iterator
from typing import Any

from edgellm.tools.events import Call, Malformed, Offered

NAMES = ("name", "tool_name", "function")
ARGUMENTS = ("arguments", "parameters", "args")
IDS = ("id", "tool_call_id")
_SPACE = re.compile(r"\s*")


class Brackets:
    """Finds where a text that opens with a bracket closes it again; it grows at the end and is read
    once. Brackets in strings do not count."""

    def __init__(self, start: int, quotes: str = '"') -> None:
        self._at, self._depth, self._quote = start, 0, ""
        self._outside = re.compile(rf"[\[\](){{}}{quotes}]")
        self._quotes = quotes

    @property
    def in_string(self) -> bool:
        """Whether the text so far ends inside a string."""
        return bool(self._quote)

    def end(self, text: str) -> int | None:
        """Where the first bracket is closed; None: not yet."""
        while True:
            if self._quote:
                found = re.compile(rf"\\[\s\S]|{self._quote}").search(text, self._at)
                if found is None:
                    # a backslash that ends the text is looked at again with what follows it
                    self._at = max(self._at, len(text) - text.endswith("\\"))
                    return None
                self._at = found.end()
                if found[0] == self._quote:
                    self._quote = ""
                continue
            found = self._outside.search(text, self._at)
            if found is None:
                self._at = len(text)
                return None
            self._at = found.end()
            if found[0] in self._quotes:
                self._quote = found[0]
            else:
                self._depth += 1 if found[0] in "([{" else -1
                if self._depth <= 0:
                    return self._at


def ends_in_string(text: str) -> bool:
    """Whether JSON that is cut off here was cut inside a string."""
    start = re.search(r"[{\[]", text)
    if start is None:
        return False
    brackets = Brackets(start.start())
    return brackets.end(text) is None and brackets.in_string


def object_text(text: str) -> str:
    """The JSON text of an object as it was written where that is valid. Raises Malformed.

    Line ends inside strings, which JSON does not allow and models write, are put right; of a key
    given twice the last stays.
    """
    seen_twice = False

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal seen_twice
        made = dict(items)
        seen_twice |= len(made) < len(items)
        return made

    def refuse(name: str) -> Any:
        raise ValueError(name)

    for strict in (True, False):
        try:
            value = json.loads(text, parse_constant=refuse, object_pairs_hook=pairs, strict=strict)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, str) and value.lstrip().startswith("{"):  # encoded twice
            return object_text(value)
        if value is None:
            return "{}"
        if not isinstance(value, dict):
            raise Malformed
        return text.strip() if strict and not seen_twice else _dump(value)
    raise Malformed


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _members(text: str) -> dict[str, str]:
    """Keys of a JSON object and the texts of their values."""
    decoder = json.JSONDecoder(strict=False)
    found: dict[str, str] = {}
    at = _SPACE.match(text, 1).end()  # type: ignore[union-attr]
    while text[at : at + 1] != "}":
        key, at = decoder.raw_decode(text, at)
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        if not isinstance(key, str) or text[at : at + 1] != ":":
            raise Malformed
        start = _SPACE.match(text, at + 1).end()  # type: ignore[union-attr]
        _, at = decoder.raw_decode(text, start)
        found[key] = text[start:at]
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        if text[at : at + 1] == ",":
            at = _SPACE.match(text, at + 1).end()  # type: ignore[union-attr]
        elif text[at : at + 1] != "}":
            raise Malformed
    return found


def _string(text: str | None) -> str | None:
    try:
        value = json.loads(text or "null")
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def one_call(text: str, offered: Offered, bare: bool = False) -> Call:
    """A call written as one object. ``bare``: nothing but its keys says that it is a call."""
    try:
        members = _members(text)
        if "function" in members and members["function"].startswith("{"):  # as clients send it
            members |= _members(members["function"])
    except (ValueError, RecursionError, IndexError):
        raise Malformed from None
    name = next((n for key in NAMES if (n := _string(members.get(key))) is not None), None)
    given = next((members[key] for key in ARGUMENTS if key in members), None)
    if name is None or name not in offered or (bare and given is None):
        raise Malformed
    # A short one only counts the calls of this answer.
    ids = (i for key in IDS if (i := _string(members.get(key))) is not None and len(i) >= 9)
    call_id = next(ids, None)
    return Call(name, "{}" if given is None else object_text(given), call_id)


def several(text: str, offered: Offered, bare: bool = False, whole: bool = True) -> Iterator[Call]:
    """The calls of an object, or of a list of them. ``whole`` False: the list is cut off, and only
    what is complete counts."""
    text = text.strip()
    if not text.startswith("["):
        if not text.startswith("{") or not whole:
            raise Malformed
        yield one_call(text, offered, bare)
        return
    at = 1
    while (at := _SPACE.match(text, at).end()) < len(text) and text[at] == "{":  # type: ignore[union-attr]
        end = Brackets(at).end(text)
        if end is None:
            break
        yield one_call(text[at:end], offered, bare)
        at = _SPACE.match(text, end).end()  # type: ignore[union-attr]
        if text[at : at + 1] == ",":
            at += 1
    if whole and text[at:] != "]":
        raise Malformed


def read_json(body: str, offered: Offered) -> list[Call] | None:
    """Between two marks: an object or a list of objects."""
    try:
        json.loads(body, strict=False)
    except (ValueError, RecursionError):
        if ends_in_string(body):
            return None  # the closing mark is part of a string
        raise Malformed from None
    return list(several(body, offered))


class Named:
    """A name, then the arguments: ``head`` matches what stands before the JSON."""

    def __init__(self, head: str, tail: str = r"\s*") -> None:
        self._head, self._tail = re.compile(head), re.compile(tail)

    def __call__(self, body: str, offered: Offered) -> list[Call] | None:
        head = self._head.match(body)
        if head is None or head["name"] not in offered:
            raise Malformed
        end = Brackets(head.end()).end(body) if body[head.end() : head.end() + 1] == "{" else None
        if end is None:
            if ends_in_string(body[head.end() :]):
                return None
            raise Malformed
        if not self._tail.fullmatch(body, end):
            raise Malformed
        arguments = object_text(body[head.end() : end])
        return [Call(head["name"], arguments, head.groupdict().get("id"))]
