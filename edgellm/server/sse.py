"""Streams of JSON objects: server-sent events, or lines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from starlette.responses import StreamingResponse
from typing_extensions import TypedDict

from edgellm.server.errors import (
    ApiError,
    anthropic_error,
    api_error,
    ollama_error,
    openai_error,
)
from edgellm.server.service import log

KEEP_ALIVE_SECONDS = 15.0
EVENT_STREAM = "text/event-stream"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def encode(data: Mapping[str, Any], event: str | None = None) -> bytes:
    """One event."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def _named(data: Mapping[str, Any]) -> bytes:
    return encode(data, data["type"])


def _line(data: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(data, ensure_ascii=False)}\n".encode()


@dataclass(frozen=True)
class Form:
    """How a protocol streams: one object, an error, the end, and what is said in silence."""

    encode: Callable[[Mapping[str, Any]], bytes] = encode
    error: Callable[[ApiError], Any] = openai_error
    end: bytes = b""
    idle: bytes = b":\n\n"
    media_type: str = EVENT_STREAM

    @property
    def is_named(self) -> bool:
        """Whether events have a name besides their data."""
        return self.encode is _named


class ResponsesError(TypedDict):
    type: Literal["error"]
    code: str
    message: str
    param: str | None
    sequence_number: int


def _responses_error(error: ApiError) -> ResponsesError:
    return {"type": "error", "code": str(error.code or error.type), "message": error.message,
            "param": error.param, "sequence_number": 0}  # fmt: skip


PLAIN = Form()
OPENAI = Form(end=b"data: [DONE]\n\n")
ANTHROPIC = Form(_named, anthropic_error, idle=_named({"type": "ping"}))
RESPONSES = Form(_named, _responses_error)
# A space before an object is none of it; an empty line would be a fault to some clients.
OLLAMA = Form(_line, ollama_error, idle=b" ", media_type="application/x-ndjson")


def response(events: AsyncIterator[Mapping[str, Any]], form: Form = OPENAI) -> StreamingResponse:
    """The events and the end; or an error, and the end."""
    headers = dict(_HEADERS)
    return StreamingResponse(_bytes(events, form), media_type=form.media_type, headers=headers)


def failure(error: Exception) -> ApiError:
    """What a stream ends with; of our own faults the log has more."""
    answer = api_error(error)
    if answer.status == 500:
        log.error("a stream failed", exc_info=error)
    return answer


async def _bytes(events: AsyncIterator[Mapping[str, Any]], form: Form) -> AsyncIterator[bytes]:
    iterator = aiter(events)
    coming: asyncio.Task[Mapping[str, Any]] | None = None
    try:
        while True:
            coming = asyncio.ensure_future(anext(iterator))
            while not (await asyncio.wait((coming,), timeout=KEEP_ALIVE_SECONDS))[0]:
                yield form.idle
            yield form.encode(coming.result())
    except StopAsyncIteration:
        if form.end:
            yield form.end
    except Exception as error:
        yield form.encode(form.error(failure(error)))
    finally:
        if coming is not None and not coming.done():
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
        closing: Any = getattr(events, "aclose", None)
        if closing is not None:
            await closing()
