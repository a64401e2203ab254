"""Server-sent events: one JSON object each, comments while there is nothing to say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import StreamingResponse

from edgellm.server.errors import api_error
from edgellm.server.service import log

KEEP_ALIVE_SECONDS = 15.0
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def encode(data: dict[str, Any], event: str | None = None) -> bytes:
    """One event."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def response(events: AsyncIterator[dict[str, Any]]) -> StreamingResponse:
    """OpenAI's stream: the events, then [DONE]; or an error event, and the end."""
    return StreamingResponse(_bytes(events), media_type="text/event-stream", headers=dict(_HEADERS))


async def _bytes(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    iterator = aiter(events)
    coming: asyncio.Task[dict[str, Any]] | None = None
    try:
        while True:
            coming = asyncio.ensure_future(anext(iterator))
            while not (await asyncio.wait((coming,), timeout=KEEP_ALIVE_SECONDS))[0]:
                yield b":\n\n"
            yield encode(coming.result())
    except StopAsyncIteration:
        yield b"data: [DONE]\n\n"
    except Exception as error:
        answer = api_error(error)
        if answer.status == 500:
            log.exception("a stream failed")
        yield encode(answer.body())
    finally:
        if coming is not None and not coming.done():
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
        closing: Any = getattr(events, "aclose", None)
        if closing is not None:
            await closing()
