"""A chat request, whatever protocol it came by: its prompt, and its answer as events.

Every protocol brings its requests into the form of /v1/chat/completions (`ChatRequest`), begins a
`Turn` and writes what comes of it in its own words.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request as HttpRequest

from edgellm.chat_tokens import THINKING_TEXTS, encode_rendered, render_marked
from edgellm.request import Request
from edgellm.sampling_params import SamplingParams
from edgellm.sequence import Piece, Sequence
from edgellm.server.effort import with_effort
from edgellm.server.errors import ApiError, unsupported
from edgellm.server.explained import Rendered, cache_report, remark
from edgellm.server.generic_tools import format_of, with_tools
from edgellm.server.parameters import capped, check_n, request_options, sampling_params
from edgellm.server.reply_schemas import CacheReported, Called, CalledFunction
from edgellm.server.schemas import ChatMessage, ChatRequest, Sampled, TemplateRequest, TextPart
from edgellm.server.service import Service, in_thread
from edgellm.structured import StructureError, compile_grammar
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
# Claude Code begins its system prompt with a line that differs in every request; were it kept, no
# request would find anything of the one before it in the cache.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*(\n|\Z)")


@dataclass
class Choice:
    """One answer while it streams, and what came of it so far; ``calls`` as OpenAI writes them."""

    parser: AnswerParser
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[Called] = field(default_factory=list)
    n_thought: int = 0  # tokens of thinking

    def push(self, piece: Piece) -> list[Event]:
        """What a piece brings."""
        self.n_thought += piece.token is not None and self.parser.is_thinking
        events = list(self.parser.push_token(piece.token, piece.text))
        if piece.finish_reason is not None:
            events += self.parser.finish(complete=piece.finish_reason == "stop")
        for event in events:
            if isinstance(event, Reasoning):
                self.reasoning.append(event.text)
            elif isinstance(event, Content):
                self.content.append(event.text)
            elif isinstance(event, CallStart):
                function: CalledFunction = {"name": event.name, "arguments": ""}
                self.calls.append({"id": event.id, "type": "function", "function": function})
            elif isinstance(event, CallArguments):
                self.calls[event.index]["function"]["arguments"] += event.text
        return events


class Turn:
    """The answers to one chat request."""

    def __init__(
        self, service: Service, body: ChatRequest, prompt: Rendered, request: Request
    ) -> None:
        form, tools, end = _format(service, body), _tools(body), prompt.text[-_PROMPT_END:]
        self.model, self.request = service.model, request
        self._llm, self._prompt = service.engine.llm, prompt
        self._wants_report = body.return_cache_report
        self.choices = [
            Choice(AnswerParser(form, tools, end, self._llm.tokenizer)) for _ in request.choices
        ]

    @property
    def sequence(self) -> Sequence:
        """The first choice as the engine knows it."""
        return self.request.choices[0]

    async def events(self) -> AsyncIterator[tuple[Piece, list[Event]]]:
        """Pieces, and what each of them means."""
        while (piece := await self.request.next()) is not None:
            yield piece, self.choices[piece.choice].push(piece)

    async def finished(self) -> Choice:
        """Wait for the end of all answers; the first one."""
        async for _ in self.events():
            pass
        return self.choices[0]

    def add_cache_report(self, reply: CacheReported) -> None:
        """What a reply has besides, if it was asked for."""
        if self._wants_report:
            reply["cache_report"] = cache_report(self._llm, self.sequence, self._prompt)

    @property
    def stop_text(self) -> str | None:
        """The stop string that ended the first answer."""
        return self.sequence.stops.hit


async def begin(
    http: HttpRequest, service: Service, body: ChatRequest, n_top: int | None = None
) -> Turn:
    """Queue a request. ``n_top``: alternatives for each token; None: no logprobs. ApiError."""
    n = check_n(body.n, service.engine.llm.max_num_seqs)
    service.check_room(n, 0)  # before any work is done for one who is sent away
    body = with_effort(body, service.template.source if service.template else "")
    params = capped(http, _params(service, body, n_top))
    options = request_options(http, body, service)
    prompt = await in_thread(lambda: rendered(service, body))
    params = _with_calls(service, body, params, prompt.text)
    request = await service.open(prompt.tokens, params, options, n)
    request.remark = remark(service, http, request, prompt)
    return Turn(service, body, prompt, request)


async def begin_text(
    http: HttpRequest, service: Service, body: Sampled, tokens: list[int], n_top: int | None = None
) -> Request:
    """Queue a prompt that is no chat."""
    if not tokens:
        raise ApiError(400, "prompt: it is empty.", param="prompt")
    logprobs = 0 if n_top is None else max(1, n_top)
    params = capped(http, sampling_params(body, service.defaults, body.max_tokens, logprobs))
    options = request_options(http, body, service)
    request = await service.open(tokens, params, options, 1)
    request.remark = remark(service, http, request)
    return request


def plain_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as templates know them. ApiError for content that no text model can take."""
    found = []
    for i, message in enumerate(_without_billing(messages)):
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


def _without_billing(messages: list[ChatMessage]) -> list[ChatMessage]:
    """The chat without the line that would make its beginning new each time."""
    first, rest = messages[0], messages[1:]
    content = first.content
    if first.role not in ("system", "developer") or not content:
        return messages
    text = content if isinstance(content, str) else content[0].text or ""
    if (kept := _BILLING.sub("", text)) == text:
        return messages
    if isinstance(content, str):
        content = kept
    else:
        content = [TextPart(type="text", text=kept)] * bool(kept) + content[1:]
    is_empty = not content and bool(rest)
    return rest if is_empty else [first.model_copy(update={"content": content}), *rest]


def rendered(service: Service, body: ChatRequest | TemplateRequest) -> Rendered:
    """The prompt; slow for long chats."""
    if service.template is None:
        raise unsupported("The model has no chat template: use /v1/completions.", "messages")
    options: dict[str, Any] = {"variables": body.chat_template_kwargs}
    tokenizer, template = service.engine.llm.tokenizer, service.template.source
    asked = plain_messages(body.messages)
    begun = _begun(body, asked)
    if body.add_generation_prompt is not None and begun is None:
        options["add_generation_prompt"] = body.add_generation_prompt
    messages, tools = with_tools(template, asked if begun is None else asked[:-1], _tools(body))
    if tools:
        options["tools"] = tools
    literal: list[tuple[int, int]] = []
    if service.allow_special:
        text = service.template.render(messages, **options)
    else:
        text, literal = render_marked(tokenizer, service.template, messages, **options)
        if begun is not None:
            literal += [(len(text) + a, len(text) + b) for a, b in tokenizer.control_spans(begun)
                        if begun[a:b].strip() not in THINKING_TEXTS]  # fmt: skip
    text += begun or ""
    tokens = encode_rendered(tokenizer, service.template, text, literal)
    return Rendered(text, tokens, [(m["role"], m["content"]) for m in asked])


def _begun(body: ChatRequest | TemplateRequest, messages: list[dict[str, Any]]) -> str | None:
    """What the answer is to go on with; None if it is to begin anew."""
    if not (isinstance(body, ChatRequest) and body.continue_final_message):
        return None
    last = messages[-1]
    if len(messages) < 2 or last["role"] != "assistant" or last.get("tool_calls"):
        raise ApiError(
            400, "messages: only a text of the assistant, behind another message, can be gone on "
            "with.", param="messages",
        )  # fmt: skip
    if body.add_generation_prompt:
        raise ApiError(400, "continue_final_message: not together with add_generation_prompt.",
                       param="continue_final_message")  # fmt: skip
    return str(last["content"])


def _tools(body: ChatRequest | TemplateRequest) -> list[dict[str, Any]]:
    """The tools that are offered."""
    if isinstance(body, ChatRequest) and body.tool_choice == "none":
        return []
    return [tool.model_dump(exclude_none=True) for tool in body.tools or []]


def _format(service: Service, body: ChatRequest) -> Format:
    """How the model writes calls."""
    template = service.template.source if service.template is not None else ""
    return format_of(template, _tools(body))


def _params(service: Service, body: ChatRequest, n_top: int | None) -> SamplingParams:
    most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if most == 0:
        raise ApiError(400, "max_tokens: at least one token has to be asked for.",
                       param="max_tokens")  # fmt: skip
    logprobs = 0 if n_top is None else max(1, n_top)
    return sampling_params(body, service.defaults, most, logprobs)


def _check_strict(schema: dict[str, Any], field: str) -> None:
    """Other schemas of tools are a help for the model; this one was promised to hold."""
    try:
        compile_grammar(SamplingParams(json_schema=schema))
    except StructureError as error:
        raise unsupported(f"{field}: {error}", field) from None


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
    for i, tool in enumerate(body.tools):
        if tool.function.strict and tool.function.parameters is not None:
            _check_strict(tool.function.parameters, f"tools.{i}.function.parameters")
    try:
        grammar = tool_grammar(
            _format(service, body), _tools(body), name,
            parallel=body.parallel_tool_calls is not False, prompt=text[-_PROMPT_END:],
            tokenizer=service.engine.llm.tokenizer,
        )  # fmt: skip
    except NoGrammar as error:
        raise unsupported(str(error), "tool_choice") from None
    return replace(params, grammar=grammar)
