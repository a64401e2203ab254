"""A request's JSON, read strictly and checked against its schema."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError
from starlette.requests import Request

from edgellm.server.errors import UNSUPPORTED, ApiError
from edgellm.server.safety import read_body

_log = logging.getLogger("edgellm.server")
_told: set[str] = set()  # unknown fields that the log has named
_MOST_TOLD = 100


class Body(BaseModel):
    """The base of request bodies: no conversions, and unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


def only(known: Sequence[str], what: str = "parts") -> Callable[[str], str]:
    """A check of the type of a part: others are of the protocol, but no text."""

    def check(kind: str) -> str:
        if kind not in known:
            raise PydanticCustomError(
                UNSUPPORTED, "{what} of type {kind} are not supported",
                {"what": what, "kind": repr(kind)[:40]},
            )  # fmt: skip
        return kind

    return check


T = TypeVar("T", bound=Body)


async def read(request: Request, schema: type[T]) -> T:
    """The body of a request. ApiError 400 names the field at fault."""
    state = request.app.state
    data = parse(await read_body(request.headers, request.receive, state.guard))
    unknown = sorted(set(data) - _names(schema))
    if unknown and state.strict:
        raise ApiError(400, f"There is no field {unknown[0]!r:.80}.", param=unknown[0][:80])
    for name in unknown:
        if name not in _told and len(_told) < _MOST_TOLD:
            _told.add(name)
            _log.warning("unknown field %r is ignored", name[:80])
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise _refused(error) from None


def _names(schema: type[Body]) -> set[str]:
    return {*schema.model_fields, *(f.alias for f in schema.model_fields.values() if f.alias)}


def parse(raw: bytes) -> dict[str, Any]:
    """JSON that is an object, without NaN, duplicate keys, or nesting beyond reason."""
    try:
        data = json.loads(raw, parse_constant=_no_constant, object_pairs_hook=_unique)
    except ApiError:
        raise
    except (ValueError, RecursionError):
        raise ApiError(400, "The body is not JSON.") from None
    if not isinstance(data, dict):
        raise ApiError(400, "The body must be a JSON object.")
    _check_text(data)
    return data


def _check_text(value: Any) -> None:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            try:
                item.encode()
            except UnicodeEncodeError:
                raise ApiError(400, "A text holds half a surrogate pair.") from None
        elif isinstance(item, dict):
            pending += [*item, *item.values()]
        elif isinstance(item, list):
            pending += item


def _no_constant(name: str) -> Any:
    raise ApiError(400, f"{name} is not JSON.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ApiError(400, "An object has the same key twice.")
    return found


def _refused(error: ValidationError) -> ApiError:
    """A fault, by the path of its field. Where a field can be one of several things there is a
    fault for each of them: the one that goes deepest is of what was meant."""
    faults = error.errors(include_url=False, include_input=False)
    # members of unions name their type in the path, which no client wrote
    paths = [[str(part) for part in f["loc"] if not _is_type_name(part)] for f in faults]
    deepest = max(range(len(faults)), key=lambda i: (len(paths[i]), -i))
    first, path = faults[deepest], ".".join(paths[deepest])
    path = path[:200]
    message = first["msg"].removeprefix("Value error, ")
    code = UNSUPPORTED if first["type"] == UNSUPPORTED else None
    sentence = f"{path}: {message}." if path else f"{message}."
    return ApiError(400, sentence, param=path or None, code=code)


def _is_type_name(part: Any) -> bool:
    names = ("str", "int", "float", "bool", "constrained-str")
    return isinstance(part, str) and ("[" in part or part in names or part[:1].isupper())
