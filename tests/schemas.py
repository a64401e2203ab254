"""Random JSON schemas of the keywords that structured output supports. Texts and lists are bounded,
so that an answer of a model that knows nothing comes to an end."""

from __future__ import annotations

import random
from typing import Any

PATTERNS = ("^[A-Z]{2}-[0-9]{3}$", "^(red|green|blue)$", "^a+b?c{1,3}$", "^[^x]{1,5}$")
FORMATS = ("date", "time", "uuid", "ipv4", "date-time")
NAMES = ("a", "name", "größe", "two words", 'q"uote', "$ref", "x-y", "items", "1")


def schema(seed: int) -> dict[str, Any]:
    """The seed's schema; some define parts that they refer to, one of them to itself."""
    rng = random.Random(seed)
    result = _any(rng, 3)
    if rng.random() < 0.25:
        parts = {"part": _any(rng, 1), "node": _node(rng)}
        ref = {"$ref": f"#/$defs/{rng.choice(sorted(parts))}"}
        return {"$defs": parts, **_object({"first": ref, "second": result}, ["first"])}
    return result


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_string, _integer, _number, _choice, _simple]
    if depth > 0:
        kinds += [_record, _record, _list, _tuple, _either, _map, _all]
    found = rng.choice(kinds)(rng, depth - 1)
    if rng.random() < 0.2:
        found["description"] = "whatever"
    return found


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.random()
    if kind < 0.3:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind < 0.5:
        return {"type": "string", "format": rng.choice(FORMATS)}
    low = rng.randint(0, 4)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 12)}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    found: dict[str, Any] = {"type": "integer"}
    if rng.random() < 0.6:
        found[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.6:
        found[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.randint(20, 5000)
    if rng.random() < 0.2:
        found = {"type": "integer", "multipleOf": rng.choice([2, 3, 7]), "minimum": 0}
    return found


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-50, 50) / 4
    found: dict[str, Any] = {"type": "number"}
    if rng.random() < 0.6:
        found[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.6:
        found[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.randint(1, 500) / 8
    return found


def _choice(rng: random.Random, depth: int) -> dict[str, Any]:
    values = ["x", "long text", 1, -2.5, None, True, ["a", 1], {"k": "v"}, "é", ""]
    if rng.random() < 0.3:
        return {"const": rng.choice(values)}
    return {"enum": rng.sample(values, rng.randint(1, 5))}


def _simple(rng: random.Random, depth: int) -> dict[str, Any]:
    found = rng.choice(["null", "boolean", ["null", "integer"], ["boolean", "null"]])
    return {"type": found}


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": required,
        "additionalProperties": False,
    }  # fmt: skip


def _record(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(0, 4))
    properties = {name: _any(rng, depth) for name in names}
    return _object(properties, [name for name in names if rng.random() < 0.6])


def _list(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    return {
        "type": "array", "items": _any(rng, depth), "minItems": low,
        "maxItems": low + rng.randint(0, 3),
    }  # fmt: skip


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    n = rng.randint(1, 3)
    return {
        "type": "array", "prefixItems": [_any(rng, depth) for _ in range(n)], "items": False,
        "minItems": rng.randint(0, n),
    }  # fmt: skip


def _either(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.3:  # alternatives that exclude each other
        return {"oneOf": [{"type": "boolean"}, _integer(rng, 0)]}
    return {"anyOf": [_any(rng, depth) for _ in range(rng.randint(1, 3))]}


def _map(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {
            "type": "object", "patternProperties": {"^k[0-9]$": _any(rng, depth)},
            "additionalProperties": False, "maxProperties": 3,
        }  # fmt: skip
    return {"type": "object", "additionalProperties": _any(rng, depth), "maxProperties": 2}


def _all(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-10, 10)
    return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + 30}]}


def _node(rng: random.Random) -> dict[str, Any]:
    """A list of itself."""
    node = _object({"value": _any(rng, 0), "next": {"$ref": "#/$defs/node"}}, ["value"])
    return node
