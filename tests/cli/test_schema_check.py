"""edgellm schema-check: yes, or no and where."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import schemas

from edgellm import SamplingParams
from edgellm.cli.main import run
from edgellm.schema_check import check_schema
from edgellm.structured import StructureError, compile_grammar

NOT = {"not": {"type": "string"}}


@pytest.mark.parametrize(
    ("schema", "pointer", "word"),
    [
        ({"type": "object", "properties": {"a": NOT}}, "/properties/a/not", "uses not"),
        # a property of that name is none; the second one is
        ({"properties": {"not": {"type": "string"}, "x/y~z": {"items": NOT}}},
         "/properties/x~1y~0z/items/not", "uses not"),
        ({"anyOf": [{"type": "string"}, {"type": "array", "uniqueItems": True}]},
         "/anyOf/1/uniqueItems", "uniqueItems"),
        ({"$defs": {"a": {"type": "array", "contains": {}}}, "$ref": "#/$defs/a"},
         "/$defs/a/contains", "contains"),
        ({"items": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "/items/oneOf", "oneOf"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}, "/properties/a/pattern",
         "look-around"),
        ({"properties": {"a": {"type": "string", "format": "colour"}}}, "/properties/a/format",
         "colour"),
        ({"properties": {"a": {"type": "nonsense"}}}, "/properties/a/type", "nonsense"),
        ({"type": "integer", "minimum": 5, "maximum": 3, "title": "x"}, "", "minimum"),
        ([1], "", "object"), (7, "", "object"), ("x", "", "object"),
    ],
)  # fmt: skip
def test_what_is_not_supported_has_a_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], schema: Any, pointer: str, word: str
) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    assert run(["schema-check", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and word in err
    assert (f"at {pointer}:" if pointer else "at the top:") in err
    assert run(["schema-check", str(file), "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["supported"] is False and found["pointer"] == pointer
    # in the words of a request's refusal
    if isinstance(schema, dict):
        with pytest.raises(StructureError) as refused:
            compile_grammar(SamplingParams(json_schema=schema))
        assert found["message"] == str(refused.value)


def test_what_is_supported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "schema.json"
    for number in range(30):
        file.write_text(json.dumps(schemas.schema(number)))
        assert run(["schema-check", str(file)]) == 0
        assert capsys.readouterr() == (f"{file}: the schema is supported.\n", "")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"true")))
    assert run(["schema-check", "-", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"file": "-", "supported": True, "pointer": None, "message": None}


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"{", "is not JSON"), (b"", "is not JSON"), (b"\xff\xfe\xfa", "is not JSON"),
     (b"[" * 100_000, "nested too deeply"), (None, "cannot be read: No such file")],
)  # fmt: skip
def test_what_is_no_schema_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, words: str
) -> None:
    file = tmp_path / "schema.json"
    if content is not None:
        file.write_bytes(content)
    assert run(["schema-check", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err and str(file) in err


def test_a_folder_is_no_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema-check", str(tmp_path)]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_big_schema_is_searched_quickly() -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {}}
    for i in range(300):
        schema["properties"][f"p{i}"] = {"type": "string", "maxLength": 5}
    schema["properties"]["p250"] = {"type": "object", "properties": {"deep": NOT}}
    fault = check_schema(schema)
    assert fault is not None and fault.pointer == "/properties/p250/properties/deep/not"
