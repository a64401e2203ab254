"""Values of arguments that a format writes as bare text, converted by the tool's JSON schema."""

import ast
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
# In a union the narrower type wins: "5" is a number wherever a number may stand.
_ORDER = ("null", "boolean", "integer", "number", "object", "array", "string")
_DEPTH = 16  # of $ref and nested unions: schemas may refer to themselves


def property_schema(parameters: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    """The schema of one argument with the definitions it may refer to; None: there is none."""
    properties = parameters.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    if found is None:
        found = parameters.get("additionalProperties")
    if not isinstance(found, Mapping):
        return None
    return {**{k: parameters[k] for k in ("$defs", "definitions") if k in parameters}, **found}


def types_of(schema: Any, root: Any = None, depth: int = 0) -> Iterator[str]:
    """The JSON types that a schema allows; none: it does not say."""
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        return
    root = schema if root is None else root
    kind = schema.get("type")
    if isinstance(kind, str):
        yield kind
    elif isinstance(kind, list):
        yield from (k for k in kind if isinstance(k, str))
    else:
        for value in [
            *_listed(schema.get("enum")),
            *([schema["const"]] if "const" in schema else []),
        ]:
            yield type_name(value)
        if "properties" in schema:
            yield "object"
        if "items" in schema:
            yield "array"
    if schema.get("nullable") is True:
        yield "null"
    for key in ("anyOf", "oneOf", "allOf"):
        for one in _listed(schema.get(key)):
            yield from types_of(one, root, depth + 1)
    if isinstance(schema.get("$ref"), str):
        yield from types_of(_follow(schema["$ref"], root), root, depth + 1)


def type_name(value: Any) -> str:
    """The JSON type of a value."""
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"),
                       (list, "array"), (dict, "object")):  # fmt: skip
        if isinstance(value, kind):
            return name
    return "null"


def convert(text: str, schema: Mapping[str, Any] | None) -> Any:
    """The value that a bare text stands for. What fits no type of the schema stays a string: it is
    what the model wrote, and the tool's own check can say so."""
    types = set(types_of(schema)) if schema is not None else set()
    for kind in _ORDER if not types else (kind for kind in _ORDER if kind in types):
        value = _READERS[kind](text)
        if value is not _NOT:
            return value
    return text


_NOT = object()  # the text is no value of the type


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _follow(reference: str, root: Any) -> Any:
    for step in reference.removeprefix("#").split("/"):
        if step:
            root = (
                root.get(step.replace("~1", "/").replace("~0", "~"))
                if isinstance(root, Mapping)
                else None
            )
    return root


def _null(text: str) -> Any:
    return None if text.strip() in ("null", "None") else _NOT


def _boolean(text: str) -> Any:
    return {"true": True, "false": False}.get(text.strip().lower(), _NOT)


def _integer(text: str) -> Any:
    value = _number(text)
    return int(value) if value is not _NOT and float(value).is_integer() else _NOT


def _number(text: str) -> Any:
    text = text.strip()
    if not _NUMBER.fullmatch(text) or len(text) > 300:
        return _NOT
    if re.fullmatch(r"[-+]?\d+", text):
        return int(text)
    value = float(text)
    return value if math.isfinite(value) else _NOT


def _container(kind: type) -> Any:
    def read(text: str) -> Any:
        value = literal(text.strip())
        return value if isinstance(value, kind) else _NOT

    return read


def _refuse(name: str) -> Any:
    raise ValueError(name)


def literal(text: str) -> Any:
    """A JSON value, or the same in Python's notation, as templates without tojson write it; None
    where it is neither."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        pass
    try:
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
        return value
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


_READERS = {
    "null": _null,
    "boolean": _boolean,
    "integer": _integer,
    "number": _number,
    "object": _container(dict),
    "array": _container(list),
    "string": lambda text: text,
}
