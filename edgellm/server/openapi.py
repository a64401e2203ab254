"""/openapi.json, from the same schemas that requests are checked against."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from edgellm.server.body import Body
from edgellm.server.errors import anthropic_error, ollama_error, shape_of

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"}, "type": {"type": "string"},
                "param": {"type": ["string", "null"]}, "code": {"type": ["string", "integer"]},
            },
        }
    },
}  # fmt: skip
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_OLLAMA_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string"}},
}
_SHAPES: dict[Any, str] = {anthropic_error: "AnthropicError", ollama_error: "OllamaError"}
_STATUSES = {
    "400": "A field is at fault", "401": "No API key", "403": "Not allowed",
    "404": "Not here", "408": "Out of time", "413": "Too large", "415": "Not JSON",
    "429": "Too much waits",
    "500": "The server failed", "503": "Not ready",
}  # fmt: skip


def document(routes: list[tuple[str, str, type[Body] | None]], version: str) -> dict[str, Any]:
    """OpenAPI 3.1 of (method, path, schema of the body)."""
    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = {
        "Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR, "OllamaError": _OLLAMA_ERROR,
    }  # fmt: skip
    for method, path, body in routes:
        name = path.translate(str.maketrans("/-", "__", "{}:"))
        operation: dict[str, Any] = {
            "operationId": method.lower() + name,
            "responses": {"200": {"description": "OK"}, **_errors(path)},
        }
        names = [part[1:-1].partition(":")[0] for part in path.split("/") if part.startswith("{")]
        if names:
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in names
            ]
        if body is not None:
            schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= schema.pop("$defs", {})
            schemas[body.__name__] = schema
            operation["requestBody"] = {
                "required": True,
                "content": {
                    "application/json": {
                        "schema": {"$ref": f"#/components/schemas/{body.__name__}"}
                    }
                },
            }
        paths.setdefault(path.replace(":path}", "}"), {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "edgellm", "version": version},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _errors(path: str) -> dict[str, Any]:
    name = _SHAPES.get(shape_of(path), "Error")
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    return {status: {"description": text, "content": content} for status, text in _STATUSES.items()}


async def openapi(http: HttpRequest) -> Response:
    return JSONResponse(http.app.state.openapi)
