"""/v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from edgellm.sequence import Piece
from edgellm.server import sse
from edgellm.server.body import read
from edgellm.server.chat_turn import Choice, Turn, begin, rendered
from edgellm.server.errors import ApiError
from edgellm.server.models import serving
from edgellm.server.replies import (
    chat_logprobs,
    finish_reason,
    new_id,
    prompt_progress,
    timings,
    usage,
)  # fmt: skip
from edgellm.server.reply_schemas import (
    AssistantMessage,
    CallDelta,
    ChatChoice,
    ChatChunk,
    ChatLogprobs,
    ChatReply,
    Delta,
    DeltaChoice,
    FinishReason,
    Prompted,
)
from edgellm.server.schemas import ChatRequest, TemplateRequest
from edgellm.server.service import Service, aborted_on_disconnect, in_thread, until_left
from edgellm.tools import CallArguments, CallStart, Content, Event, Reasoning

_FINGERPRINT = "edgellm"


def _delta(events: list[Event]) -> Delta:
    """What events add to a message."""
    delta: Delta = {}
    for event in events:
        if isinstance(event, Reasoning):
            delta["reasoning_content"] = delta.get("reasoning_content", "") + event.text
        elif isinstance(event, Content):
            delta["content"] = delta.get("content", "") + event.text
        elif isinstance(event, CallStart):
            begun: CallDelta = {"index": event.index, "id": event.id, "type": "function",
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


def _finish_reason(choice: Choice, reason: str | None) -> FinishReason:
    return "tool_calls" if choice.calls and reason == "stop" else finish_reason(reason)


def _message(choice: Choice) -> AssistantMessage:
    content = "".join(choice.content)
    message: AssistantMessage = {"role": "assistant", "content": content}
    if choice.reasoning:
        message["reasoning_content"] = "".join(choice.reasoning)
    if choice.calls:
        message["tool_calls"], message["content"] = choice.calls, content or None
    return message


class _Answer:
    """A turn as OpenAI writes it."""

    def __init__(self, service: Service, body: ChatRequest, turn: Turn, n_top: int | None) -> None:
        self._llm, self._body, self._turn, self._n_top = service.engine.llm, body, turn, n_top
        self._request = turn.request
        self._id, self._created = new_id("chatcmpl-"), int(time.time())

    def _logprobs(self, pieces: list[Piece]) -> ChatLogprobs | None:
        return None if self._n_top is None else chat_logprobs(self._llm, pieces, self._n_top)

    async def whole(self) -> ChatReply:
        pieces: list[list[Piece]] = [[] for _ in self._turn.choices]
        async for piece, _ in self._turn.events():
            pieces[piece.choice].append(piece)
        found: list[ChatChoice] = [
            {
                "index": i,
                "message": _message(choice),
                "logprobs": self._logprobs(pieces[i]),
                "finish_reason": _finish_reason(choice, self._request.choices[i].finish_reason),
            }
            for i, choice in enumerate(self._turn.choices)
        ]
        reply: ChatReply = {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._turn.model,
            "system_fingerprint": _FINGERPRINT,
            "choices": found,
            "usage": usage(self._request.choices),
            "timings": timings(self._request.choices[0]),
        }
        self._turn.add_cache_report(reply)
        return reply

    async def events(self) -> AsyncIterator[ChatChunk]:
        for i in range(len(self._turn.choices)):
            yield self._chunk(i, {"role": "assistant", "content": ""})
        async for piece, events in self._turn.events():
            if piece.progress is not None:
                chunk = self._chunk(0, {})
                chunk["prompt_progress"] = prompt_progress(piece.progress)
                yield chunk
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
                    last["timings"] = timings(sequence)
                    yield last
        last = self._chunk_of([])
        self._turn.add_cache_report(last)
        if self._wants_usage:
            last["usage"] = usage(self._request.choices)
        if self._wants_usage or "cache_report" in last:
            yield last

    @property
    def _wants_usage(self) -> bool:
        options = self._body.stream_options
        return options is not None and bool(options.include_usage)

    def _chunk(
        self, index: int, delta: Delta, logprobs: ChatLogprobs | None = None,
        reason: FinishReason | None = None,
    ) -> ChatChunk:  # fmt: skip
        return self._chunk_of(
            [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}]
        )

    def _chunk_of(self, choices: list[DeltaChoice]) -> ChatChunk:
        chunk: ChatChunk = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._turn.model,
            "system_fingerprint": _FINGERPRINT,
            "choices": choices,
        }
        if self._wants_usage:
            chunk["usage"] = None
        return chunk


async def chat_completions(http: HttpRequest) -> Response:
    body = await read(http, ChatRequest)
    service = await serving(http, body.model)
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
    body = await read(http, TemplateRequest)
    service = await serving(http, body.model)
    prompt = await in_thread(lambda: rendered(service, body))
    reply: Prompted = {"prompt": prompt.text}
    return JSONResponse(reply)
