"""Bare text as values, by the tool's schema."""

import pytest

from edgellm.tools.values import convert, property_schema

TREE = {
    "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"anyOf": [{"$ref": "#"}]}},
    "$defs": {"n": {"type": "integer"}},
}


@pytest.mark.parametrize(
    "text, schema, value",
    [
        ("007", {"type": "string"}, "007"),
        (" x ", {"type": "string"}, " x "),
        ("7", {"type": "integer"}, 7),
        ("7.0", {"type": "integer"}, 7),
        ("7.5", {"type": "integer"}, "7.5"),
        ("7.5", {"type": "number"}, 7.5),
        ("1e400", {"type": "number"}, "1e400"),
        ("NaN", {"type": "number"}, "NaN"),
        ("True", {"type": "boolean"}, True),
        ("null", {"type": ["string", "null"]}, None),
        ("text", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "text"),
        ("5", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 5),
        ("{'a': True, 'b': None}", {"type": "object"}, {"a": True, "b": None}),
        ('["a"]', {"items": {}}, ["a"]),
        ("[a", {"type": "array"}, "[a"),
        ("1", {"enum": ["1", "2"]}, "1"),
        ("1", {"const": 1}, 1),
        ("1", {}, 1),
        ("hello", None, "hello"),
        ("null", {"type": "integer", "nullable": True}, None),
        ("3", property_schema(TREE, "a"), 3),
        ("3", property_schema(TREE, "b"), 3),
        ("3", property_schema(TREE, "unknown"), 3),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
    ],
)
def test_convert(text, schema, value):
    found = convert(text, schema)
    assert found == value and type(found) is type(value)
