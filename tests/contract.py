"""Whether replies of a server are what its OpenAPI document says. Objects of the document are
closed first: a field that it does not name is a fault, too."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
from jsonschema import Draft202012Validator


class Contract:
    """Of one document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._components = _closed(document["components"])
        self._paths = [
            (re.compile(re.sub(r"\{\w+\}", ".+", path) + r"\Z"), operations)
            for path, operations in document["paths"].items()
        ]

    def check(self, reply: httpx.Response) -> None:
        """A reply that was read whole; of one that is still to be streamed status and type only.
        Paths and methods that are not there answer in the form of their API, as others do."""
        path, method = reply.request.url.path, reply.request.method
        operations = next((o for pattern, o in self._paths if pattern.match(path)), {})
        operation = operations.get("get" if method == "HEAD" else method.lower())
        if operation is None:
            preflight = (204,) if method == "OPTIONS" else ()
            assert reply.status_code in (401, 403, *preflight) or reply.status_code == (
                405 if operations else 404
            )
            return
        where = f"{method} {path}: {reply.status_code}"
        assert str(reply.status_code) in operation["responses"], where
        content = operation["responses"][str(reply.status_code)]["content"]
        kind = reply.headers["content-type"].partition(";")[0]
        assert kind in content, f"{where} {kind}"
        if method == "HEAD" or not hasattr(reply, "_content"):
            return
        if kind == "application/json":
            self.validate(reply.json(), content[kind]["schema"])
        for item in items(reply.text, kind):
            self.validate(item, content[kind]["itemSchema"])

    def validate(self, value: Any, schema: dict[str, Any]) -> None:
        if "contentSchema" in schema:
            value, schema = json.loads(value), schema["contentSchema"]
        elif isinstance(value, dict) and "data" in schema.get("properties", {}):
            data = schema["properties"]["data"]
            inner = next((s for s in data.get("anyOf", [data]) if "contentSchema" in s), None)
            if inner is not None and value["data"] not in [
                s.get("const") for s in data.get("anyOf", [])
            ]:
                self.validate(value["data"], inner)
        closed = {**_closed(schema), "components": self._components}
        Draft202012Validator(closed).validate(value)


def items(text: str, kind: str) -> Iterator[Any]:
    """Of a stream: events with their fields, or objects of lines; comments are none."""
    if kind == "application/x-ndjson":
        yield from (json.loads(line) for line in text.splitlines())
    if kind == "text/event-stream":
        for event in text.split("\n\n"):
            lines = [line for line in event.split("\n") if line and not line.startswith(":")]
            if lines:
                yield dict(line.split(": ", 1) for line in lines)


def _closed(schema: Any) -> Any:
    """Objects that name their properties have no others."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        found.setdefault("additionalProperties", False)
    return found
