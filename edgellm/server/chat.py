"""/v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from edgellm.chat_tokens import encode_rendered, render_marked
from edgellm.request import Request
from edgellm.sampling_params import SamplingParams
from edgellm.sequence import Piece
from edgellm.server import sse
from edgellm.server.body import read
from edgellm.server.errors import ApiError, unsupported
from edgellm.server.generic_tools import format_of, with_tools
from edgellm.server.parameters import check_n, request_options, sampling_params
from edgellm.server.replies import chat_logprobs, finish_reason, new_id, timings, usage
from edgellm.server.schemas import ChatMessage, ChatRequest, TemplateRequest
from edgellm.server.service import Service, aborted_on_disconnect, in_thread
from edgellm.tools import (
    AnswerParser,
    CallArguments,
    CallStart,
    Content,
    Event,
    Format,
    Reasoning,
)  # fmt: skip
from edgellm.tools.grammar import NoGrammar, tool_grammar

_PROMPT_END = 200  # characters in which a template may have begun a thought


def plain_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as templates know them. ApiError for content that no text model can take."""
    found = []
    for i, message in enumerate(messages):
        role = "system" if message.role == "developer" else message.role
        content: Any = message.content
        if isinstance(content, list):
            for j, part in enumerate(content):
                if part.type not in ("text", "input_text", "refusal") or part.text is None:
                    raise unsupported(
                        f"messages.{i}.content.{j}: parts of type {part.type!r:.40} are not "
                        "supported, only text.",
                        f"messages.{i}.content.{j}.type",
                    )
            content = "".join(part.text or "" for part in content)
        plain: dict[str, Any] = {"role": role, "content": content if content is not None else ""}
        if message.name is not None:
            plain["name"] = message.name
        if message.tool_call_id is not None:
            plain["tool_call_id"] = message.tool_call_id
        if message.reasoning_content:
            plain["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            plain["tool_calls"] = [
                call.model_dump(exclude_none=True) for call in message.tool_calls
            ]
        found.append(plain)
    return found


def rendered(service: Service, body: ChatRequest | TemplateRequest) -> tuple[str, list[int]]:
    """The prompt's text and tokens; slow for long chats."""
    if service.template is None:
        raise unsupported("The model has no chat template: use /v1/completions.", "messages")
    options: dict[str, Any] = {"variables": body.chat_template_kwargs}
    if body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    tokenizer, template = service.engine.llm.tokenizer, service.template.source
    messages, tools = with_tools(template, plain_messages(body.messages), _tools(body))
    if tools:
        options["tools"] = tools
    text, literal = render_marked(tokenizer, service.template, messages, **options)
    return text, encode_rendered(tokenizer, service.template, text, literal)


def _tools(body: ChatRequest | TemplateRequest) -> list[dict[str, Any]]:
    """The tools that are offered."""
    if isinstance(body, ChatRequest) and body.tool_choice == "none":
        return []
    return [tool.model_dump(exclude_none=True) for tool in body.tools or []]


def _format(service: Service, body: ChatRequest) -> Format:
    """How the model writes calls."""
    template = service.template.source if service.template is not None else ""
    return format_of(template, _tools(body))


@dataclass
class _Choice:
    """One choice while it streams: what its pieces come to."""

    parser: AnswerParser
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[Piece] = field(default_factory=list)

    def push(self, piece: Piece) -> dict[str, Any]:
        """The delta that a piece makes."""
        events = list(self.parser.push_token(piece.token, piece.text))
        if piece.finish_reason is not None:
            events += self.parser.finish(complete=piece.finish_reason == "stop")
        delta: dict[str, Any] = {}
        for event in events:
            self._add(event, delta)
        return delta

    def _add(self, event: Event, delta: dict[str, Any]) -> None:
        if isinstance(event, Reasoning):
            self.reasoning.append(event.text)
            delta["reasoning_content"] = delta.get("reasoning_content", "") + event.text
        elif isinstance(event, Content):
            self.content.append(event.text)
            delta["content"] = delta.get("content", "") + event.text
        elif isinstance(event, CallStart):
            function = {"name": event.name, "arguments": ""}
            call = {"id": event.id, "type": "function", "function": function}
            self.calls.append(call)
            begun = {"index": event.index, **call, "function": dict(function)}
            delta.setdefault("tool_calls", []).append(begun)
        elif isinstance(event, CallArguments):
            self.calls[event.index]["function"]["arguments"] += event.text
            deltas = delta.setdefault("tool_calls", [])
            mine = next((d for d in deltas if d["index"] == event.index), None)
            if mine is None:
                deltas.append({"index": event.index, "function": {"arguments": event.text}})
            else:
                mine["function"]["arguments"] += event.text

    def finish_reason(self, reason: str | None) -> str:
        return "tool_calls" if self.calls and reason == "stop" else finish_reason(reason)

    def message(self) -> dict[str, Any]:
        content = "".join(self.content)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message |= {"tool_calls": self.calls, "content": content or None}
        return message


class _Answer:
    """The answer to one chat request. ``text`` is its prompt."""

    def __init__(
        self, service: Service, body: ChatRequest, model: str, text: str, request: Request,
        n_top: int | None,
    ) -> None:  # fmt: skip
        self._llm, self._body, self._request = service.engine.llm, body, request
        self._n_top = n_top
        form, tools = _format(service, body), _tools(body)
        self._choices = [
            _Choice(AnswerParser(form, tools, text[-_PROMPT_END:], self._llm.tokenizer))
            for _ in request.choices
        ]
        self._head = {"id": new_id("chatcmpl-"), "created": int(time.time()), "model": model,
                      "system_fingerprint": "edgellm"}  # fmt: skip

    def _push(self, piece: Piece) -> dict[str, Any]:
        choice = self._choices[piece.choice]
        if piece.token is not None:
            choice.logprobs.append(piece)
        return choice.push(piece)

    def _logprobs(self, choice: _Choice) -> dict[str, Any] | None:
        if self._n_top is None:
            return None
        pieces, choice.logprobs = choice.logprobs, []
        return chat_logprobs(self._llm, pieces, self._n_top)

    async def whole(self) -> dict[str, Any]:
        while (piece := await self._request.next()) is not None:
            self._push(piece)
        found = [
            {
                "index": i,
                "message": choice.message(),
                "logprobs": self._logprobs(choice),
                "finish_reason": choice.finish_reason(sequence.finish_reason),
            }
            for i, (choice, sequence) in enumerate(
                zip(self._choices, self._request.choices, strict=True)
            )
        ]
        more: dict[str, Any] = {}
        if self._body.return_cache_report:
            more["cache_report"] = self._llm.explain(self._request.choices[0])
        return {
            **self._head,
            "object": "chat.completion",
            "choices": found,
            "usage": usage(self._request.choices),
            "timings": timings(self._request.choices[0]),
            **more,
        }

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        for i in range(len(self._choices)):
            yield self._chunk(i, {"role": "assistant", "content": ""})
        while (piece := await self._request.next()) is not None:
            delta = self._push(piece)
            logprobs = self._logprobs(self._choices[piece.choice])
            if delta or (logprobs and logprobs["content"]):
                yield self._chunk(piece.choice, delta, logprobs)
            if piece.finish_reason is not None:
                sequence = self._request.choices[piece.choice]
                if sequence.error is None:
                    reason = self._choices[piece.choice].finish_reason(piece.finish_reason)
                    last = self._chunk(piece.choice, {}, None, reason)
                    yield {**last, "timings": timings(sequence)}
        if self._wants_usage:
            yield {**self._head, "object": "chat.completion.chunk", "choices": [],
                   "usage": usage(self._request.choices)}  # fmt: skip

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
    model = service.check_model(body.model)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true.", param="top_logprobs")
    n = check_n(body.n, service.engine.llm.max_num_seqs)
    n_top = (body.top_logprobs or 0) if body.logprobs else None
    params = _params(service, body, n_top)
    options = request_options(body, http.scope.get("state", {}).get("client", ""),
                              service.request_seconds)  # fmt: skip
    text, tokens = await in_thread(lambda: rendered(service, body))
    params = _with_calls(service, body, params, text)
    request = await service.open(tokens, params, options, n)
    answer = _Answer(service, body, model, text, request, n_top)
    if body.stream:
        return sse.response(_until_left(http, request, answer.events()))
    async with aborted_on_disconnect(http.receive, request):
        return JSONResponse(await answer.whole())


async def _until_left(
    http: HttpRequest, request: Request, events: AsyncIterator[dict[str, Any]]
) -> AsyncIterator[dict[str, Any]]:
    try:
        async for event in events:
            yield event
    finally:
        if not request.is_done:
            request.abort()


def _params(service: Service, body: ChatRequest, n_top: int | None) -> SamplingParams:
    most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if most == 0:
        raise ApiError(400, "max_tokens: at least one token has to be asked for.",
                       param="max_tokens")  # fmt: skip
    logprobs = 0 if n_top is None else max(1, n_top)
    return sampling_params(body, service.defaults, most, logprobs)


def _with_calls(
    service: Service, body: ChatRequest, params: SamplingParams, text: str
) -> SamplingParams:
    """The grammar of an answer that has to be a call."""
    choice = body.tool_choice
    if choice is None or choice in ("none", "auto"):
        return params
    if not body.tools:
        raise ApiError(400, "tool_choice needs tools.", param="tool_choice")
    name = None if isinstance(choice, str) else choice.function.name
    if name is not None and name not in (tool.function.name for tool in body.tools):
        raise ApiError(
            400, f"tool_choice: there is no tool {name!r:.100}.", param="tool_choice.function.name"
        )
    if params.structured:
        raise ApiError(400, "An answer that has to be a call cannot have a form besides.",
                       param="tool_choice")  # fmt: skip
    try:
        grammar = tool_grammar(
            _format(service, body), _tools(body), name,
            parallel=body.parallel_tool_calls is not False,
            prompt=text[-_PROMPT_END:], tokenizer=service.engine.llm.tokenizer,
        )  # fmt: skip
    except NoGrammar as error:
        raise unsupported(str(error), "tool_choice") from None
    return replace(params, grammar=grammar)


async def apply_template(http: HttpRequest) -> Response:
    """llama-server's: the prompt's text."""
    service: Service = http.app.state.service
    body = await read(http, TemplateRequest)
    text, _ = await in_thread(lambda: rendered(service, body))
    return JSONResponse({"prompt": text})
