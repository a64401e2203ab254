"""Calls in Python's notation, ``[f(a=1), g()]``, and in Gemma 4's, ``call:f{a:1}``."""

import ast
import json
import re
from typing import Any

from edgellm.tools.events import Call, Malformed, Offered
from edgellm.tools.json_bodies import Brackets
from edgellm.tools.values import literal

_WORDS = {"true": True, "false": False, "null": None}


def read_python(body: str, offered: Offered) -> list[Call] | None:
    """A list of calls with keyword arguments; JSON's true, false and null count as well."""
    text = body.strip()
    if not text.startswith("[") and not text.endswith("]"):
        text = f"[{text}]"
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        if Brackets(0, "\"'").end(text) is None:
            return None  # the closing mark is part of a string
        raise Malformed from None
    if not isinstance(tree, ast.List) or not tree.elts:
        raise Malformed
    try:
        return [_python_call(node, offered) for node in tree.elts]
    except (ValueError, TypeError, RecursionError):
        raise Malformed from None


def _python_call(node: ast.expr, offered: Offered) -> Call:
    if not isinstance(node, ast.Call):
        raise Malformed
    name = ast.unparse(node.func)
    if name not in offered:
        raise Malformed
    arguments: dict[str, Any] = {}
    # Positions stand for the parameters in the order in which the schema names them.
    for key, value in zip(offered[name].get("properties") or {}, node.args, strict=False):
        arguments[key] = _python_value(value)
    if len(arguments) < len(node.args):
        raise Malformed
    for keyword in node.keywords:
        if keyword.arg is None:
            raise Malformed
        arguments[keyword.arg] = _python_value(keyword.value)
    return Call(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))


def _python_value(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_python_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            if None in keys:
                raise Malformed
            return {str(_python_value(k)): _python_value(v)  # type: ignore[arg-type]
                    for k, v in zip(keys, values, strict=True)}  # fmt: skip
    value = ast.literal_eval(node)
    if isinstance(value, bytes | complex | set) or value is ...:
        raise Malformed
    return value


QUOTE = '<|"|>'
_NAME = re.compile(r"\s*call:(?P<name>[^{\s]+)\s*(?=\{)")
_BARE = re.compile(r"[^,\]}]*")
_KEY = re.compile(r"[^:{}\[\]]*?(?=\s*:)")
_SPACE = re.compile(r"\s*")


def read_gemma(body: str, offered: Offered) -> list[Call] | None:
    """One call; strings stand between marks of their own and are not escaped."""
    head = _NAME.match(body)
    if head is None or head["name"] not in offered:
        raise Malformed
    if body.count(QUOTE) % 2:
        return None  # the closing mark is part of a string
    try:
        value, at = _gemma_value(body, head.end())
    except (ValueError, RecursionError, IndexError):
        raise Malformed from None
    if body[at:].strip() or not isinstance(value, dict):
        raise Malformed
    return [Call(head["name"], json.dumps(value, ensure_ascii=False, allow_nan=False))]


def _skip(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]


def _gemma_value(text: str, at: int) -> tuple[Any, int]:
    at = _skip(text, at)
    if text.startswith(QUOTE, at):
        end = text.index(QUOTE, at + len(QUOTE))
        return text[at + len(QUOTE) : end], end + len(QUOTE)
    if text[at] == '"':
        value, at = json.JSONDecoder(strict=False).raw_decode(text, at)
        return value, at
    if text[at] not in "{[":
        bare = _BARE.match(text, at)
        assert bare is not None  # it matches the empty text
        word = bare[0].strip()
        value = literal(word)
        return (word if value is None and word not in ("null", "None") else value), bare.end()
    is_object, closing = text[at] == "{", "}" if text[at] == "{" else "]"
    items: list[Any] = []
    at = _skip(text, at + 1)
    while text[at] != closing:
        key: Any = None
        if is_object:
            if text.startswith((QUOTE, '"'), at):
                key, at = _gemma_value(text, at)
            else:
                found = _KEY.match(text, at)
                if found is None or not found[0]:
                    raise Malformed
                key, at = found[0], found.end()
            at = _skip(text, at)
            if text[at] != ":":
                raise Malformed
            at += 1
        value, at = _gemma_value(text, at)
        items.append((key, value) if is_object else value)
        at = _skip(text, at)
        if text[at] == ",":
            at = _skip(text, at + 1)
        elif text[at] != closing:
            raise Malformed
    return (dict(items) if is_object else items), at + 1
