"""Ollama's /api/chat and /api/generate."""

from __future__ import annotations

import json
import math
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from edgellm.request import Request
from edgellm.sequence import Piece
from edgellm.server import sse
from edgellm.server.body import read
from edgellm.server.chat_turn import Turn, begin, begin_text
from edgellm.server.errors import ApiError, unsupported
from edgellm.server.infill import fim_prompt
from edgellm.server.models import Models, serving
from edgellm.server.ollama_schemas import (
    Asked,
    ChatEnd,
    ChatLine,
    ChatLoaded,
    Counts,
    GenerateEnd,
    GenerateLine,
    GenerateLoaded,
    GenerateRequest,
    Head,
    Loaded,
    OllamaChatRequest,
    Said,
    Scores,
    WrittenCall,
    WrittenMessage,
)
from edgellm.server.replies import chat_logprobs, finish_reason
from edgellm.server.schemas import ChatMessage, ChatRequest, FunctionCall, Sampled, ToolCall
from edgellm.server.service import Service, aborted_on_disconnect, in_thread, until_left
from edgellm.tools import CallArguments, CallEnd, CallStart, Content, Event, Reasoning

_DURATION = re.compile(r"([+-]?\d+(?:\.\d+)?)(ms|s|m|h)?", re.ASCII)
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_SAME = (
    "seed", "temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_last_n",
    "repeat_penalty", "presence_penalty", "frequency_penalty", "mirostat", "mirostat_tau",
    "mirostat_eta", "stop",
)  # fmt: skip

# ---- requests -----------------------------------------------------------------------------------


def plain_name(name: str | None) -> str | None:
    """Ollama's names end with a tag, which is "latest" where there is none."""
    return name.removesuffix(":latest") if name else name


def _options(body: Asked, found: Sampled) -> None:
    """What is asked of the sampler, into the form that all protocols share."""
    found.stream = body.stream is not False
    if (options := body.options) is not None:
        for name in _SAME:
            setattr(found, name, getattr(options, name))
        most = options.num_predict
        found.max_tokens = most if most is not None and most > 0 else None
    if body.format == "json":
        found.json_schema = {"type": "object"}
    elif isinstance(body.format, dict):
        found.json_schema = body.format
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true.", param="top_logprobs")


def _chat_request(body: Asked, messages: list[ChatMessage]) -> ChatRequest:
    found = ChatRequest(messages=messages, return_cache_report=body.return_cache_report)
    _options(body, found)
    if body.think is not None:
        found.chat_template_kwargs = {"enable_thinking": bool(body.think)}
        if isinstance(body.think, str):
            found.reasoning_effort = body.think
        if body.think is False:
            found.reasoning_budget = 0
    return found


def _messages(body: OllamaChatRequest) -> list[ChatMessage]:
    found = []
    for i, message in enumerate(body.messages):
        if message.images:
            raise _no_images(f"messages.{i}.images")
        calls = [
            ToolCall(
                id=call.id,
                function=FunctionCall(
                    name=call.function.name,
                    arguments=json.dumps(call.function.arguments, ensure_ascii=False),
                ),
            )
            for call in message.tool_calls or []
        ]
        found.append(
            ChatMessage(
                role=message.role,
                content=message.content or "",
                name=message.tool_name,
                tool_calls=calls or None,
                tool_call_id=message.tool_call_id,
                reasoning_content=message.thinking,
            )  # fmt: skip
        )
    return found


def _no_images(where: str) -> ApiError:
    return unsupported(f"{where}: images are not supported, only text.", where)


def _n_top(body: Asked) -> int | None:
    return (body.top_logprobs or 0) if body.logprobs else None


# ---- answers ------------------------------------------------------------------------------------


@dataclass
class _Call:
    """A call while it is written."""

    id: str
    name: str
    arguments: str = ""

    def written(self, index: int) -> WrittenCall:
        arguments = json.loads(self.arguments or "{}")
        return {
            "id": self.id,
            "function": {"index": index, "name": self.name, "arguments": arguments},
        }


class _Answer:
    """One answer as Ollama writes it: of a chat or, with ``is_chat`` false, of /api/generate."""

    def __init__(
        self, service: Service, body: Asked, source: Turn | Request, is_chat: bool
    ) -> None:
        self._llm, self._n_top, self._source = service.engine.llm, _n_top(body), source
        self.request = source.request if isinstance(source, Turn) else source
        self._model, self._is_chat = body.model, is_chat
        self._calls: list[_Call] = []

    async def events(self) -> AsyncIterator[ChatLine | GenerateLine | ChatEnd | GenerateEnd]:
        async for piece, events in self._pieces():
            text, said = self._parts(events)
            scores = self._scores([piece])
            if text or said or scores.get("logprobs"):
                yield self._line(text, said, scores)
        yield self._last("", {}, {})

    async def whole(self) -> ChatEnd | GenerateEnd:
        text, said = "", Said()
        pieces: list[Piece] = []
        async for piece, events in self._pieces():
            more, new = self._parts(events)
            text += more
            if thought := new.get("thinking"):
                said["thinking"] = said.get("thinking", "") + thought
            if calls := new.get("tool_calls"):
                said["tool_calls"] = [*said.get("tool_calls", []), *calls]
            pieces.append(piece)
        return self._last(text, said, self._scores(pieces))

    async def _pieces(self) -> AsyncIterator[tuple[Piece, list[Event]]]:
        if isinstance(self._source, Turn):
            async for pair in self._source.events():
                yield pair
            return
        while (piece := await self._source.next()) is not None:
            yield piece, [Content(piece.text)] if piece.text else []

    def _parts(self, events: list[Event]) -> tuple[str, Said]:
        """Text, thinking and calls that events bring; a call when it is complete."""
        text, said = "", Said()
        for event in events:
            if isinstance(event, Content):
                text += event.text
            elif isinstance(event, Reasoning):
                said["thinking"] = said.get("thinking", "") + event.text
            elif isinstance(event, CallStart):
                self._calls.append(_Call(event.id, event.name))
            elif isinstance(event, CallArguments):
                self._calls[event.index].arguments += event.text
            elif isinstance(event, CallEnd):
                call = self._calls[event.index].written(event.index)
                said["tool_calls"] = [*said.get("tool_calls", []), call]
        return text, said

    def _line(self, text: str, said: Said, scores: Scores) -> ChatLine | GenerateLine:
        if self._is_chat:
            return {**self._head(), "message": _message(text, said), **scores, "done": False}
        return {**self._head(), "response": text, **said, **scores, "done": False}

    def _last(self, text: str, said: Said, scores: Scores) -> ChatEnd | GenerateEnd:
        if self._is_chat:
            return {**self._head(), "message": _message(text, said), **scores, **self._counts()}
        return {**self._head(), "response": text, **said, **scores, **self._counts()}

    def _head(self) -> Head:
        return {"model": self._model, "created_at": now()}

    def _scores(self, pieces: list[Piece]) -> Scores:
        if self._n_top is None:
            return {}
        return {"logprobs": chat_logprobs(self._llm, pieces, self._n_top)["content"]}

    def _counts(self) -> Counts:
        sequence = self.request.choices[0]
        timings = sequence.timings()
        counts: Counts = {
            "done": True,
            "done_reason": finish_reason(sequence.finish_reason),
            "total_duration": round(1e9 * (sequence.finished - sequence.arrived)),
            "load_duration": 0,
            "prompt_eval_count": sequence.n_prompt,
            "prompt_eval_duration": round(1e6 * timings["prompt_ms"]),
            "eval_count": len(sequence.output),
            "eval_duration": round(1e6 * timings["predicted_ms"]),
        }
        if isinstance(self._source, Turn):
            self._source.add_cache_report(counts)
        return counts


def _message(text: str, said: Said) -> WrittenMessage:
    return {"role": "assistant", "content": text, **said}


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


async def _answer(
    http: HttpRequest, service: Service, body: Asked, source: Turn | Request, is_chat: bool
) -> Response:
    answer = _Answer(service, body, source, is_chat)
    if body.stream is not False:
        return sse.response(until_left(answer.events(), answer.request), sse.OLLAMA)
    async with aborted_on_disconnect(http.receive, answer.request):
        return JSONResponse(await answer.whole())


async def _without_prompt(http: HttpRequest, body: Asked) -> Loaded:
    """A request without a prompt asks for the model to be loaded, or with ``keep_alive`` 0 to be
    unloaded."""
    models: Models = http.app.state.models
    name = plain_name(body.model) or ""
    if _seconds(body.keep_alive) == 0:
        await models.unload(name)
        return {"model": body.model, "created_at": now(), "done": True, "done_reason": "unload"}
    models.keep(await models.load(name), _seconds(body.keep_alive))
    return {"model": body.model, "created_at": now(), "done": True, "done_reason": "load"}


def _seconds(given: str | float | None) -> float | None:
    """Ollama's durations: seconds, or as 5m; below 0: for ever. None: as the server has it."""
    if given is None:
        return None
    found = _DURATION.fullmatch(str(given).strip())
    if found is None:
        raise ApiError(400, "keep_alive: seconds, or a duration as 5m.", param="keep_alive")
    seconds = float(found[1]) * _UNITS[found[2] or "s"]
    return math.inf if seconds < 0 else seconds


async def _serving(http: HttpRequest, body: Asked) -> Service:
    models: Models = http.app.state.models
    service = await serving(http, plain_name(body.model))
    models.keep(models.find(service.model), _seconds(body.keep_alive))
    return service


async def chat(http: HttpRequest) -> Response:
    body = await read(http, OllamaChatRequest)
    if not body.messages:
        reply: ChatLoaded = {**await _without_prompt(http, body), "message": _message("", {})}
        return JSONResponse(reply)
    service = await _serving(http, body)
    asked = _chat_request(body, _messages(body))
    asked.tools = body.tools
    turn = await begin(http, service, asked, _n_top(body))
    return await _answer(http, service, body, turn, True)


async def generate(http: HttpRequest) -> Response:
    body = await read(http, GenerateRequest)
    for name in ("template", "context"):
        if getattr(body, name):
            raise unsupported(f"{name}: it is not supported; use /api/chat.", name)
    if body.images:
        raise _no_images("images")
    if not body.prompt and not body.suffix:
        reply: GenerateLoaded = {**await _without_prompt(http, body), "response": ""}
        return JSONResponse(reply)
    service = await _serving(http, body)
    prompt, llm = body.prompt or "", service.engine.llm
    if not body.raw and not body.suffix and service.template is not None:
        messages = [ChatMessage(role="system", content=body.system)] if body.system else []
        messages.append(ChatMessage(role="user", content=prompt))
        turn = await begin(http, service, _chat_request(body, messages), _n_top(body))
        return await _answer(http, service, body, turn, False)
    if suffix := body.suffix:
        tokens = await in_thread(lambda: fim_prompt(llm, prompt, suffix, "suffix"))
    else:
        tokens = await in_thread(lambda: llm.tokenize(prompt, parse_special=bool(body.raw)))
    sampled = Sampled()
    _options(body, sampled)
    request = await begin_text(http, service, sampled, tokens, _n_top(body))
    return await _answer(http, service, body, request, False)
