"""What a parser of answers yields, and what it knows of the tools that were offered."""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Name of a tool -> JSON schema of its arguments.
Offered = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; ``index`` counts the calls of an answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments: JSON text of an object when put together."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call is complete."""

    index: int


Event = Reasoning | Content | CallStart | CallArguments | CallEnd


@dataclass(frozen=True, slots=True)
class Call:
    """A call as it was read; ``arguments`` is JSON text, ``id`` None where the format has none."""

    name: str
    arguments: str
    id: str | None = None


class Malformed(Exception):
    """What was written between the marks is no call: it is shown as text."""


def offered(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Schemas by name, of tools as clients send them; what is no function is left out."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            schemas[function["name"]] = parameters if isinstance(parameters, Mapping) else {}
    return schemas


class CallIds:
    """Ids of one answer's calls: random, and yet a function of the call's index alone, so that
    they do not depend on how the text was cut."""

    def __init__(self, seed: bytes | None = None, prefix: str = "call_", length: int = 24) -> None:
        self._seed = secrets.token_bytes(16) if seed is None else seed
        self._prefix, self._length = prefix, length

    def __getitem__(self, index: int) -> str:
        digest = hashlib.sha256(self._seed + index.to_bytes(4)).hexdigest()
        return self._prefix + digest[: self._length]
