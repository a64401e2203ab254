"""/v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
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
from edgellm.server.parameters import check_n, request_options, sampling_params
from edgellm.server.replies import chat_logprobs, finish_reason, new_id, timings, usage
from edgellm.server.schemas import ChatMessage, ChatRequest, TemplateRequest
from edgellm.server.service import Service, aborted_on_disconnect, in_thread
from edgellm.thinking import THINKING, ThinkingParser, is_mark


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
    if body.tools:
        options["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
    tokenizer = service.engine.llm.tokenizer
    messages = plain_messages(body.messages)
    text, literal = render_marked(tokenizer, service.template, messages, **options)
    return text, encode_rendered(tokenizer, service.template, text, literal)


@dataclass
class _Choice:
    """One choice while it streams: what its pieces come to."""

    parser: ThinkingParser
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    logprobs: list[Piece] = field(default_factory=list)

    def push(self, text: str, is_last: bool) -> dict[str, str]:
        """The delta that a piece's text makes."""
        parts = [*self.parser.push(text), *(self.parser.flush() if is_last else ())]
        delta: dict[str, str] = {}
        for part in parts:
            thinks = part.kind == THINKING
            name = "reasoning_content" if thinks else "content"
            (self.reasoning if thinks else self.content).append(part.text)
            delta[name] = delta.get(name, "") + part.text
        return delta

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.content)}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        return message


class _Answer:
    """The answer to one chat request."""

    def __init__(
        self, service: Service, body: ChatRequest, model: str, text: str, request: Request,
        n_top: int | None,
    ) -> None:  # fmt: skip
        self._llm, self._body, self._request = service.engine.llm, body, request
        self._n_top = n_top
        self._choices = [_Choice(ThinkingParser(text[-200:])) for _ in request.choices]
        self._head = {"id": new_id("chatcmpl-"), "created": int(time.time()), "model": model,
                      "system_fingerprint": "edgellm"}  # fmt: skip

    def _push(self, piece: Piece) -> dict[str, str]:
        text = piece.text
        if piece.token is not None and not text and self._llm.tokenizer.is_special(piece.token):
            mark = self._llm.tokenizer.token_text(piece.token)
            text = mark if is_mark(mark) else ""
        choice = self._choices[piece.choice]
        if piece.token is not None:
            choice.logprobs.append(piece)
        return choice.push(text, piece.finish_reason is not None)

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
                "finish_reason": finish_reason(sequence.finish_reason),
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
                    reason = finish_reason(piece.finish_reason)
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


async def apply_template(http: HttpRequest) -> Response:
    """llama-server's: the prompt's text."""
    service: Service = http.app.state.service
    body = await read(http, TemplateRequest)
    text, _ = await in_thread(lambda: rendered(service, body))
    return JSONResponse({"prompt": text})
