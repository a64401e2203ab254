"""/v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from edgellm.sequence import Piece
from edgellm.server import sse
from edgellm.server.body import read
from edgellm.server.chat_turn import Choice, Turn, begin, rendered
from edgellm.server.errors import ApiError
from edgellm.server.replies import (
    chat_logprobs,
    finish_reason,
    new_id,
    prompt_progress,
    timings,
    usage,
)  # fmt: skip
from edgellm.server.schemas import ChatRequest, TemplateRequest
from edgellm.server.service import Service, aborted_on_disconnect, in_thread, until_left
from edgellm.tools import CallArguments, CallStart, Content, Event, Reasoning


def _delta(events: list[Event]) -> dict[str, Any]:
    """What events add to a message."""
    delta: dict[str, Any] = {}
    for event in events:
        if isinstance(event, Reasoning):
            delta["reasoning_content"] = delta.get("reasoning_content", "") + event.text
        elif isinstance(event, Content):
            delta["content"] = delta.get("content", "") + event.text
        elif isinstance(event, CallStart):
            begun = {"index": event.index, "id": event.id, "type": "function",
                     "function": {"name": event.name, "arguments": ""}}  # fmt: skip
            delta.setdefault("tool_calls", []).append(begun)
        elif isinstance(event, CallArguments):
            deltas = delta.setdefault("tool_calls", [])
            mine = next((d for d in deltas if d["index"] == event.index), None)
            if mine is None:
                deltas.append({"index": event.index, "function": {"arguments": event.text}})
            else:
                mine["function"]["arguments"] += event.text
    return delta


def _finish_reason(choice: Choice, reason: str | None) -> str:
    return "tool_calls" if choice.calls and reason == "stop" else finish_reason(reason)


def _message(choice: Choice) -> dict[str, Any]:
    content = "".join(choice.content)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if choice.reasoning:
        message["reasoning_content"] = "".join(choice.reasoning)
    if choice.calls:
        message |= {"tool_calls": choice.calls, "content": content or None}
    return message


class _Answer:
    """A turn as OpenAI writes it."""

    def __init__(self, service: Service, body: ChatRequest, turn: Turn, n_top: int | None) -> None:
        self._llm, self._body, self._turn, self._n_top = service.engine.llm, body, turn, n_top
        self._request = turn.request
        self._head = {"id": new_id("chatcmpl-"), "created": int(time.time()),
                      "model": turn.model, "system_fingerprint": "edgellm"}  # fmt: skip

    def _logprobs(self, pieces: list[Piece]) -> dict[str, Any] | None:
        return None if self._n_top is None else chat_logprobs(self._llm, pieces, self._n_top)

    async def whole(self) -> dict[str, Any]:
        pieces: list[list[Piece]] = [[] for _ in self._turn.choices]
        async for piece, _ in self._turn.events():
            pieces[piece.choice].append(piece)
        found = [
            {
                "index": i,
                "message": _message(choice),
                "logprobs": self._logprobs(pieces[i]),
                "finish_reason": _finish_reason(choice, self._request.choices[i].finish_reason),
            }
            for i, choice in enumerate(self._turn.choices)
        ]
        return {
            **self._head,
            "object": "chat.completion",
            "choices": found,
            "usage": usage(self._request.choices),
            "timings": timings(self._request.choices[0]),
            **self._turn.cache_report,
        }

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        for i in range(len(self._turn.choices)):
            yield self._chunk(i, {"role": "assistant", "content": ""})
        async for piece, events in self._turn.events():
            if piece.progress is not None:
                read = prompt_progress(piece.progress)
                yield {**self._chunk(0, {}), "prompt_progress": read}
                continue
            delta, logprobs = _delta(events), self._logprobs([piece])
            if delta or (logprobs and logprobs["content"]):
                yield self._chunk(piece.choice, delta, logprobs)
            if piece.finish_reason is not None:
                sequence = self._request.choices[piece.choice]
                if sequence.error is None:
                    choice = self._turn.choices[piece.choice]
                    reason = _finish_reason(choice, piece.finish_reason)
                    last = self._chunk(piece.choice, {}, None, reason)
                    yield {**last, "timings": timings(sequence)}
        last = self._turn.cache_report
        if self._wants_usage:
            last["usage"] = usage(self._request.choices)
        if last:
            yield {**self._head, "object": "chat.completion.chunk", "choices": [], **last}

    @property
    def _wants_usage(self) -> bool:
        options = self._body.stream_options
        return options is not None and bool(options.include_usage)

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        return {**chunk, "usage": None} if self._wants_usage else chunk


async def chat_completions(http: HttpRequest) -> Response:
    service: Service = http.app.state.service
    body = await read(http, ChatRequest)
    service.check_model(body.model)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true.", param="top_logprobs")
    n_top = (body.top_logprobs or 0) if body.logprobs else None
    turn = await begin(http, service, body, n_top)
    answer = _Answer(service, body, turn, n_top)
    if body.stream:
        return sse.response(until_left(answer.events(), turn.request))
    async with aborted_on_disconnect(http.receive, turn.request):
        return JSONResponse(await answer.whole())


async def apply_template(http: HttpRequest) -> Response:
    """llama-server's: the prompt's text."""
    service: Service = http.app.state.service
    body = await read(http, TemplateRequest)
    prompt = await in_thread(lambda: rendered(service, body))
    return JSONResponse({"prompt": prompt.text})
