"""/openapi.json, from the schemas that requests are checked against and replies are typed with.

It is OpenAPI 3.2: the first that can say what one event of a stream holds (``itemSchema``).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from edgellm.server import sse
from edgellm.server.body import Body
from edgellm.server.errors import OpenAIError, shape_of, status_of
from edgellm.server.safety import PUBLIC

Handler = Callable[[HttpRequest], Awaitable[Response]]
Parameter = dict[str, Any]
_REF = "#/components/schemas/{model}"
_STATUSES = {
    200: "OK", 400: "The request or one of its fields is at fault", 401: "An API key is missing",
    403: "The host or the origin is not allowed", 404: "There is no such model",
    408: "The request was not done in time", 409: "The model is in use or pinned",
    413: "The body is too large",
    415: "The body is not JSON, or compressed", 429: "Too much waits already",
    500: "The server or the model has failed",
    503: "The server takes no requests at the moment",
}  # fmt: skip
_EVERYWHERE = (400, 403, 500)
_WITH_BODY = (413, 415)
_AGAIN = (429, 503)  # with a header that says when
_RETRY = {
    "Retry-After": {"description": "Seconds", "schema": {"type": "string", "pattern": "^[0-9]+$"}}
}


@dataclass(frozen=True)
class Operation:
    """A method of a path. ``reply`` is the type of its JSON, str of a text of the kind ``media``;
    ``event`` what a stream of the ``form`` brings, one by one; ``errors``: statuses beside those
    that all have."""

    method: Literal["GET", "POST"]
    path: str
    handler: Handler
    body: type[Body] | None = None
    reply: Any = str
    event: Any = None
    form: sse.Form | None = None
    errors: tuple[int, ...] = ()
    query: tuple[Parameter, ...] = ()
    media: str = "application/json"

    @property
    def id(self) -> str:
        name = self.template.translate(str.maketrans("/-.", "___", "{}"))
        return self.method.lower() + name

    @property
    def template(self) -> str:
        """The path as OpenAPI writes it."""
        return re.sub(r":\w+}", "}", self.path)

    @property
    def error(self) -> Any:
        """The type of its errors' JSON."""
        return get_type_hints(shape_of(self.path))["return"]


def document(operations: Iterable[Operation], version: str, with_keys: bool) -> dict[str, Any]:
    """OpenAPI 3.2. ``with_keys``: whether API keys are asked for."""
    operations = list(operations)
    schemas, shared = _schemas(operations)
    paths: dict[str, Any] = {}
    for operation in operations:
        described = _described(operation, schemas, with_keys)
        paths.setdefault(operation.template, {})[operation.method.lower()] = described
    components: dict[str, Any] = {"schemas": shared}
    if with_keys:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return {
        "openapi": "3.2.0",
        "info": {"title": "edgellm", "version": version},
        "paths": paths,
        "components": components,
    }


# ---- schemas ------------------------------------------------------------------------------------


class _Untitled(GenerateJsonSchema):
    """A field's name needs no title besides."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def get_title_from_name(self, name: str) -> str:
        return name


Schemas = dict[tuple[str, str], dict[str, Any]]  # by operation and part


def _schemas(operations: list[Operation]) -> tuple[Schemas, dict[str, Any]]:
    """The schemas of all operations' parts, and what they have in common."""
    inputs: list[tuple[Any, Literal["validation"], TypeAdapter[Any]]] = [
        (("", "error"), "validation", TypeAdapter(OpenAIError))
    ]
    for operation in operations:
        parts = {"body": operation.body, "reply": operation.reply, "error": operation.error}
        if operation.form is not None:
            failed = get_type_hints(operation.form.error)["return"]
            parts["event"] = operation.event | failed
        inputs += [
            ((operation.id, name), "validation", TypeAdapter(kind))
            for name, kind in parts.items()
            if kind is not None
        ]
    found, rest = TypeAdapter.json_schemas(inputs, ref_template=_REF, schema_generator=_Untitled)
    return {key: schema for (key, _), schema in found.items()}, rest.get("$defs", {})


def _item(form: sse.Form, event: dict[str, Any]) -> dict[str, Any]:
    """The schema of one item of a stream: a line, or an event with a line of data."""
    if form.media_type != sse.EVENT_STREAM:
        return event
    data: dict[str, Any] = {"contentMediaType": "application/json", "contentSchema": event}
    if form.end:
        last = form.end.decode().removeprefix("data:").strip()
        data = {"anyOf": [{"const": last}, data]}
    properties = {"data": {"type": "string", **data}}
    if form.is_named:
        properties["event"] = {"type": "string"}
    return {"type": "object", "required": list(properties), "properties": properties}


# ---- operations ---------------------------------------------------------------------------------


def _described(operation: Operation, schemas: Schemas, with_keys: bool) -> dict[str, Any]:
    is_public = operation.path in PUBLIC
    found: dict[str, Any] = {"operationId": operation.id}
    if with_keys:
        found["security"] = [] if is_public else [{"bearer": []}, {"header": []}]
    parameters = [
        {"name": part[1:-1], "in": "path", "required": True,
         "schema": {"type": "string", "minLength": 1}}
        for part in operation.template.split("/") if part.startswith("{")
    ]  # fmt: skip
    if parameters or operation.query:
        found["parameters"] = [*parameters, *operation.query]
    if operation.body is not None:
        content = {"application/json": {"schema": schemas[operation.id, "body"]}}
        found["requestBody"] = {"required": True, "content": content}
    statuses = {*_EVERYWHERE, *operation.errors, 503}
    if operation.body is not None:
        statuses.update(_WITH_BODY)
    if with_keys and not is_public:
        statuses.add(401)
    found["responses"] = {"200": {"description": _STATUSES[200],
                                  "content": _content(operation, schemas)}}  # fmt: skip
    error = {"application/json": {"schema": schemas[operation.id, "error"]}}
    for status in sorted({status_of(operation.path, status) for status in statuses}):
        response: dict[str, Any] = {"description": _STATUSES[status], "content": error}
        if status in _AGAIN:
            response["headers"] = _RETRY
        if status == 503:  # also when there are too many connections, whatever the path
            either = {"anyOf": [schemas[operation.id, "error"], schemas["", "error"]]}
            response["content"] = {"application/json": {"schema": either}}
        found["responses"][str(status)] = response
    return found


def _content(operation: Operation, schemas: Schemas) -> dict[str, Any]:
    content = {operation.media: {"schema": schemas[operation.id, "reply"]}}
    if operation.form is not None:
        item = _item(operation.form, schemas[operation.id, "event"])
        content[operation.form.media_type] = {"itemSchema": item}
    return content


async def openapi(http: HttpRequest) -> Response:
    return JSONResponse(http.app.state.openapi)
