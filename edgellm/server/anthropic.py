"""Anthropic's /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Literal

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from edgellm.server import sse
from edgellm.server.anthropic_schemas import (
    AnswerBlock,
    AnthropicNamedTool,
    AnthropicPart,
    AnthropicUsage,
    Block,
    BlockChange,
    BlockDelta,
    BlockEvent,
    Counted,
    CountRequest,
    Ended,
    Message,
    MessageDelta,
    MessageEvent,
    MessageReply,
    MessagesRequest,
)
from edgellm.server.body import read
from edgellm.server.chat_turn import Choice, Turn, begin, rendered
from edgellm.server.errors import ApiError, unsupported
from edgellm.server.models import serving
from edgellm.server.replies import new_id
from edgellm.server.schemas import (
    ChatMessage,
    ChatRequest,
    Function,
    FunctionCall,
    JsonSchema,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    Tool,
    ToolCall,
)
from edgellm.server.service import aborted_on_disconnect, in_thread, until_left
from edgellm.tools import CallArguments, CallStart, Content, Event, Reasoning

_NO_THOUGHTS = ("redacted_thinking",)  # of another model, sealed

# ---- requests -----------------------------------------------------------------------------------


def chat_request(body: CountRequest) -> ChatRequest:
    """The request in the form that all protocols share. ApiError."""
    found = ChatRequest(messages=list(_messages(body)), model=body.model)
    for i, tool in enumerate(body.tools or []):
        if tool.type not in (None, "custom"):
            raise unsupported(f"tools.{i}: tools of type {tool.type!r:.40} are not here.",
                              f"tools.{i}.type")  # fmt: skip
    if body.tools:
        found.tools = [
            Tool(
                type="function",
                function=Function(name=t.name, description=t.description,
                                  parameters=t.input_schema),
            )
            for t in body.tools
        ]  # fmt: skip
    _choose(body, found)
    _continue(body, found)
    if body.thinking is not None:
        wanted = body.thinking.type != "disabled"
        found.chat_template_kwargs = {"enable_thinking": wanted}
        found.reasoning_budget = body.thinking.budget_tokens if wanted else 0
    if isinstance(body, MessagesRequest):
        found.max_tokens, found.stop = body.max_tokens, body.stop_sequences
        found.stream, found.return_cache_report = body.stream, body.return_cache_report
        found.temperature, found.top_p, found.top_k = body.temperature, body.top_p, body.top_k
        if body.output_config is not None and found.reasoning_budget != 0:
            found.reasoning_effort = body.output_config.effort
        if body.output_config is not None and body.output_config.format is not None:
            schema = JsonSchema(schema=body.output_config.format.json_schema)
            found.response_format = ResponseFormat(type="json_schema", json_schema=schema)
    return found


def _continue(body: CountRequest, found: ChatRequest) -> None:
    """The answer goes on with what the request puts into the assistant's mouth."""
    if body.messages[-1].role != "assistant":
        return
    if body.thinking is not None and body.thinking.type != "disabled":
        raise ApiError(
            400, "messages: an answer that is begun cannot be thought about: disable thinking.",
            param="thinking",
        )  # fmt: skip
    found.continue_final_message = True
    found.chat_template_kwargs = {"enable_thinking": False}


def _choose(body: CountRequest, found: ChatRequest) -> None:
    choice = body.tool_choice
    if choice is None:
        return
    found.parallel_tool_calls = not choice.disable_parallel_tool_use
    if isinstance(choice, AnthropicNamedTool):
        function = NamedFunction(name=choice.name)
        found.tool_choice = NamedTool(type="function", function=function)
    else:
        found.tool_choice = "required" if choice.type == "any" else choice.type


def _messages(body: CountRequest) -> Iterator[ChatMessage]:
    system = _text(body.system) if body.system else ""
    if system:
        yield ChatMessage(role="system", content=system)
    names: dict[str, str] = {}  # of the tools called so far: some templates print them
    for i, message in enumerate(body.messages):
        where = f"messages.{i}.content"
        if isinstance(message.content, str):
            yield ChatMessage(role=message.role, content=message.content)
        elif message.role == "assistant":
            yield _assistant(message.content, where, names)
        else:
            yield from _user(message, message.content, where, names)


def _assistant(blocks: list[Block], where: str, names: dict[str, str]) -> ChatMessage:
    texts, thoughts, calls = [], [], []
    for j, block in enumerate(blocks):
        if block.type == "text":
            texts.append(block.text or "")
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            if not block.name:
                raise ApiError(400, f"{where}.{j}.name is missing.", param=f"{where}.{j}.name")
            names[block.id or ""] = block.name
            arguments = json.dumps(block.input or {}, ensure_ascii=False)
            function = FunctionCall(name=block.name, arguments=arguments)
            calls.append(ToolCall(id=block.id, function=function))
        elif block.type not in _NO_THOUGHTS:
            raise _strange(block.type, f"{where}.{j}")
    return ChatMessage(
        role="assistant", content="\n".join(texts), tool_calls=calls or None,
        reasoning_content="\n".join(thoughts) or None,
    )  # fmt: skip


def _user(
    message: Message, blocks: list[Block], where: str, names: dict[str, str]
) -> Iterator[ChatMessage]:
    """Results of tools are messages of their own, in the order in which they stand."""
    texts: list[str] = []
    for j, block in enumerate(blocks):
        if block.type == "text":
            texts.append(block.text or "")
        elif block.type == "tool_result":
            if texts:
                yield ChatMessage(role=message.role, content="\n".join(texts))
                texts = []
            name = block.tool_use_id or ""
            yield ChatMessage(
                role="tool", tool_call_id=name or None, name=names.get(name),
                content=_text(block.content or ""),
            )  # fmt: skip
        else:
            raise _strange(block.type, f"{where}.{j}")
    if texts or not blocks:
        yield ChatMessage(role=message.role, content="\n".join(texts))


def _text(content: str | list[AnthropicPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text or "" for part in content)


def _strange(kind: str, where: str) -> ApiError:
    return unsupported(f"{where}: blocks of type {kind!r:.40} are not supported here.",
                       f"{where}.type")  # fmt: skip


# ---- answers ------------------------------------------------------------------------------------


def _ended(turn: Turn) -> Ended:
    if turn.stop_text is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": turn.stop_text}
    if turn.sequence.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    reason: Literal["tool_use", "end_turn"] = "tool_use" if turn.choices[0].calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(turn: Turn) -> AnthropicUsage:
    """What was read from the cache is not counted as input, as Anthropic has it."""
    sequence = turn.sequence
    return {
        "input_tokens": sequence.n_prompt - sequence.n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": sequence.n_cached,
        "output_tokens": len(sequence.output),
    }


def _reply(turn: Turn, content: list[AnswerBlock], ended: Ended) -> MessageReply:
    return {
        "id": new_id("msg_"), "type": "message", "role": "assistant", "model": turn.model,
        "content": content, "stop_reason": ended["stop_reason"],
        "stop_sequence": ended["stop_sequence"], "usage": _usage(turn),
    }  # fmt: skip


def _content(choice: Choice) -> list[AnswerBlock]:
    blocks: list[AnswerBlock] = []
    if choice.reasoning:
        blocks.append({"type": "thinking", "thinking": "".join(choice.reasoning), "signature": ""})
    if text := "".join(choice.content):
        blocks.append({"type": "text", "text": text})
    for call in choice.calls:
        function = call["function"]
        arguments = json.loads(function["arguments"] or "{}")
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"],
                       "input": arguments})  # fmt: skip
    return blocks


class _Blocks:
    """Events as blocks that begin, grow and end; one is open at a time."""

    def __init__(self) -> None:
        self._open, self._n = "", 0

    def push(self, event: Event) -> Iterator[BlockEvent]:
        if isinstance(event, Reasoning):
            yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": event.text})
        elif isinstance(event, Content):
            yield from self._begin({"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": event.text})
        elif isinstance(event, CallStart):
            yield from self.end()
            yield from self._begin({"type": "tool_use", "id": event.id, "name": event.name,
                                    "input": {}})  # fmt: skip
        elif isinstance(event, CallArguments):
            yield self._delta({"type": "input_json_delta", "partial_json": event.text})
        else:
            yield from self.end()

    def _begin(self, block: AnswerBlock) -> Iterator[BlockEvent]:
        if self._open == block["type"]:
            return
        yield from self.end()
        self._open = block["type"]
        yield {"type": "content_block_start", "index": self._n, "content_block": block}

    def _delta(self, delta: BlockChange) -> BlockDelta:
        return {"type": "content_block_delta", "index": self._n, "delta": delta}

    def end(self) -> Iterator[BlockEvent]:
        if self._open:
            yield {"type": "content_block_stop", "index": self._n}
            self._open, self._n = "", self._n + 1


async def _events(turn: Turn) -> AsyncIterator[MessageEvent]:
    begun = _reply(turn, [], {"stop_reason": None, "stop_sequence": None})
    yield {"type": "message_start", "message": begun}
    blocks = _Blocks()
    async for _, events in turn.events():
        for event in events:
            for one in blocks.push(event):
                yield one
    for one in blocks.end():
        yield one
    end: MessageDelta = {"type": "message_delta", "delta": _ended(turn), "usage": _usage(turn)}
    turn.add_cache_report(end)
    yield end
    yield {"type": "message_stop"}


async def messages(http: HttpRequest) -> Response:
    body = await read(http, MessagesRequest)
    service = await serving(http, body.model)
    turn = await begin(http, service, chat_request(body))
    if body.stream:
        return sse.response(until_left(_events(turn), turn.request), sse.ANTHROPIC)
    async with aborted_on_disconnect(http.receive, turn.request):
        content = _content(await turn.finished())
        reply = _reply(turn, content, _ended(turn))
        turn.add_cache_report(reply)
        return JSONResponse(reply)


async def count_tokens(http: HttpRequest) -> Response:
    body = await read(http, CountRequest)
    service = await serving(http, body.model)
    chat = chat_request(body)
    prompt = await in_thread(lambda: rendered(service, chat))
    reply: Counted = {"input_tokens": len(prompt.tokens)}
    return JSONResponse(reply)
