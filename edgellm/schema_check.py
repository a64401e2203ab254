"""Whether answers can be held to a JSON schema, and if not, where it says what cannot be held to.

The check is the one that every request's schema goes through (see structured). What it finds is
made out by taking things away: what can go without changing the complaint is not what it is about.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from edgellm.sampling_params import SamplingParams
from edgellm.structured import StructureError, compile_grammar

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class SchemaFault:
    """``message`` says in a sentence what is not supported, ``pointer`` (RFC 6901) where."""

    message: str
    pointer: str


def check_schema(schema: Any) -> SchemaFault | None:
    """None for a schema that is supported. ``schema`` is whatever a JSON text may hold."""
    is_schema = isinstance(schema, dict | bool)
    # what is none gets the sentence that such a text gets
    message = _complaint(schema if is_schema else json.dumps(schema))
    if message is None:
        return None
    try:
        path = _where(schema, message) if isinstance(schema, dict) else ()
    except RecursionError:  # nested so deep that this is what is wrong
        path = ()
    tokens = (str(key).replace("~", "~0").replace("/", "~1") for key in path)
    return SchemaFault(message, "".join(f"/{token}" for token in tokens))


def _complaint(schema: dict[str, Any] | bool | str) -> str | None:
    try:
        compile_grammar(SamplingParams(json_schema=schema))
    except StructureError as error:
        return str(error)
    return None


def _where(schema: Any, message: str) -> Path:
    """The innermost place that holds all of what the complaint needs."""
    gone: set[Path] = set()
    path: Path = ()
    while children := list(_children(schema, path)):
        for child in children:
            gone.add(child)
            if _complaint(_without(schema, gone, ())) != message:
                gone.discard(child)
        left = [child for child in children if child not in gone]
        # a reference leads to what is wrong; it is not wrong itself
        at = [child for child in left if child[-1] != "$ref"] or left
        if len(at) != 1:
            break
        path = at[0]
    return path


def _children(schema: Any, path: Path) -> Iterator[Path]:
    for key in path:
        schema = schema[key]
    if isinstance(schema, dict):
        yield from ((*path, key) for key in schema)
    elif isinstance(schema, list):
        yield from ((*path, i) for i in range(len(schema)))


def _without(value: Any, gone: set[Path], path: Path) -> Any:
    if isinstance(value, dict):
        kept = {key: (*path, key) for key in value if (*path, key) not in gone}
        return {key: _without(value[key], gone, at) for key, at in kept.items()}
    if isinstance(value, list):
        return [
            _without(element, gone, (*path, i))
            for i, element in enumerate(value)
            if (*path, i) not in gone
        ]
    return value
