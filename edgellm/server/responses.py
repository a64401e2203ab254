"""OpenAI's /v1/responses, without a memory: every request brings its whole conversation."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal, cast

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from edgellm.server import sse
from edgellm.server.body import Body, read
from edgellm.server.chat_turn import Turn, begin
from edgellm.server.errors import ApiError, unsupported
from edgellm.server.models import serving
from edgellm.server.replies import new_id
from edgellm.server.responses_schemas import (
    Cut,
    Fault,
    Item,
    ResponseHead,
    ResponseReply,
    ResponsesPart,
    ResponsesRequest,
    ResponseStatus,
    ResponseUsage,
)
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
from edgellm.server.service import aborted_on_disconnect, until_left
from edgellm.tools import CallArguments, CallStart, Content, Event, Reasoning

# ---- requests -----------------------------------------------------------------------------------


def chat_request(body: ResponsesRequest) -> ChatRequest:
    """The request in the form that all protocols share. ApiError."""
    for name in ("previous_response_id", "conversation", "background"):
        if getattr(body, name):
            raise unsupported(f"{name}: this server keeps no answers; send the whole input.", name)
    messages = list(_messages(body))
    if not messages:
        raise ApiError(400, "input: it is empty.", param="input")
    found = ChatRequest(
        messages=messages, model=body.model, max_tokens=body.max_output_tokens,
        temperature=body.temperature, top_p=body.top_p,
        parallel_tool_calls=body.parallel_tool_calls,
        return_cache_report=body.return_cache_report, stream=body.stream,
    )  # fmt: skip
    if body.tools:
        found.tools = list(_tools(body))
    if body.tool_choice is None or isinstance(body.tool_choice, str):
        found.tool_choice = body.tool_choice
    else:
        function = NamedFunction(name=body.tool_choice.name)
        found.tool_choice = NamedTool(type="function", function=function)
    if body.text is not None and body.text.format is not None:
        form = body.text.format
        if form.type == "json_schema" and form.json_schema is None:
            raise ApiError(400, "text.format.schema is missing.", param="text.format.schema")
        schema = None if form.json_schema is None else JsonSchema(schema=form.json_schema)
        found.response_format = ResponseFormat(type=form.type, json_schema=schema)
    if body.reasoning is not None and body.reasoning.effort is not None:
        found.reasoning_effort = body.reasoning.effort
    return found


def _tools(body: ResponsesRequest) -> Iterator[Tool]:
    for i, tool in enumerate(body.tools or []):
        if tool.type != "function":
            raise unsupported(f"tools.{i}: tools of type {tool.type!r:.40} are not here.",
                              f"tools.{i}.type")  # fmt: skip
        if tool.name is None:
            raise ApiError(400, f"tools.{i}.name is missing.", param=f"tools.{i}.name")
        function = Function(name=tool.name, description=tool.description,
                            parameters=tool.parameters, strict=tool.strict)  # fmt: skip
        yield Tool(type="function", function=function)


def _messages(body: ResponsesRequest) -> Iterator[ChatMessage]:
    if body.instructions:
        yield ChatMessage(role="system", content=body.instructions)
    if isinstance(body.input, str):
        yield ChatMessage(role="user", content=body.input)
        return
    names: dict[str, str] = {}  # of the tools called so far: some templates print them
    mine: ChatMessage | None = None  # thought, text and calls are items, but one message
    for i, item in enumerate(body.input):
        where = f"input.{i}"
        is_mine = item.type in ("reasoning", "function_call") or item.role == "assistant"
        if mine is not None and (not is_mine or _begins_anew(mine, item)):
            yield mine
            mine = None
        if is_mine:
            mine = mine or ChatMessage(role="assistant", content="")
            _add(mine, item, where, names)
        elif item.type == "function_call_output":
            name = item.call_id or ""
            yield ChatMessage(
                role="tool", tool_call_id=name or None, name=names.get(name),
                content=_text(item.output),
            )  # fmt: skip
        else:
            if item.role is None:
                raise ApiError(400, f"{where}.role is missing.", param=f"{where}.role")
            content = _text(item.content)
            yield ChatMessage(role=item.role, content=content)
    if mine is not None:
        yield mine


def _begins_anew(mine: ChatMessage, item: Item) -> bool:
    """Whether an item is of the next message of the assistant."""
    if item.type == "function_call":
        return False
    return bool(mine.content or mine.tool_calls)


def _add(mine: ChatMessage, item: Item, where: str, names: dict[str, str]) -> None:
    if item.type == "reasoning":
        parts = item.content or item.summary
        thought = _text(parts)
        mine.reasoning_content = "\n".join(filter(None, (mine.reasoning_content, thought))) or None
    elif item.type == "function_call":
        if not item.name:
            raise ApiError(400, f"{where}.name is missing.", param=f"{where}.name")
        names[item.call_id or ""] = item.name
        function = FunctionCall(name=item.name, arguments=item.arguments or "{}")
        call = ToolCall(id=item.call_id or item.id, function=function)
        mine.tool_calls = [*(mine.tool_calls or []), call]
    else:
        mine.content = _text(item.content)


def _text(content: str | list[ResponsesPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text or "" for part in content)


# ---- answers ------------------------------------------------------------------------------------


class _Items:
    """Events of the model as items that begin, grow and end; one is open at a time. ``output`` is
    what they come to."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._kind, self._text = "", ""

    def push(self, event: Event) -> Iterator[dict[str, Any]]:
        if isinstance(event, Reasoning):
            yield from self._begin("reasoning")
            yield from self._grow("response.reasoning_text.delta", event.text)
        elif isinstance(event, Content):
            yield from self._begin("message")
            yield from self._grow("response.output_text.delta", event.text)
        elif isinstance(event, CallStart):
            yield from self.end()
            yield from self._begin("function_call", call_id=event.id, name=event.name)
        elif isinstance(event, CallArguments):
            yield from self._grow("response.function_call_arguments.delta", event.text)
        else:
            yield from self.end()

    def _begin(self, kind: str, **more: Any) -> Iterator[dict[str, Any]]:
        if self._kind == kind:
            return
        yield from self.end()
        self._kind, self._text = kind, ""
        prefix = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_"}[kind]
        item = {"id": new_id(prefix), "type": kind, "status": "in_progress", **self._filled(None)}
        self.output.append(item | more)
        yield {"type": "response.output_item.added", **self._index, "item": dict(self.output[-1])}
        if kind != "function_call":
            yield {"type": "response.content_part.added", **self._where, "part": self._part()}

    def _grow(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        self._text += text
        more: dict[str, Any] = {"logprobs": []} if self._kind == "message" else {}
        yield {"type": kind, **self._where, "delta": text, **more}

    def end(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """Close the item that is open."""
        if not self._kind:
            return
        if self._kind == "function_call":
            kind = "response.function_call_arguments.done"
            more: dict[str, Any] = {"arguments": self._text}
            yield {"type": kind, **self._where, "name": self.output[-1]["name"], **more}
        else:
            named = "reasoning" if self._kind == "reasoning" else "output"
            logprobs: dict[str, Any] = {"logprobs": []} if self._kind == "message" else {}
            yield {"type": f"response.{named}_text.done", **self._where, "text": self._text,
                   **logprobs}  # fmt: skip
            yield {"type": "response.content_part.done", **self._where, "part": self._part()}
        self.output[-1] |= {"status": status, **self._filled(self._text)}
        yield {"type": "response.output_item.done", **self._index, "item": dict(self.output[-1])}
        self._kind = ""

    def _filled(self, text: str | None) -> dict[str, Any]:
        """What an item holds; None: nothing yet."""
        if self._kind == "function_call":
            return {"arguments": text or ""}
        content = [] if text is None else [self._part()]
        if self._kind == "reasoning":
            return {"summary": [], "content": content}
        return {"role": "assistant", "content": content}

    def _part(self) -> dict[str, Any]:
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    @property
    def _index(self) -> dict[str, Any]:
        return {"output_index": len(self.output) - 1}

    @property
    def _where(self) -> dict[str, Any]:
        found = {**self._index, "item_id": self.output[-1]["id"]}
        return found if self._kind == "function_call" else {**found, "content_index": 0}


def _given(asked: Body) -> Any:
    """A part of the request as the reply repeats it."""
    return asked.model_dump(exclude_none=True, by_alias=True)


class _Answer:
    def __init__(self, body: ResponsesRequest, turn: Turn) -> None:
        self._turn, self._items = turn, _Items()
        params = turn.sequence.params
        choice = body.tool_choice or "auto"
        self._head: ResponseHead = {
            "id": new_id("resp_"), "object": "response", "created_at": int(time.time()),
            "model": turn.model, "instructions": body.instructions,
            "metadata": body.metadata or {}, "max_output_tokens": body.max_output_tokens,
            "tools": [_given(tool) for tool in body.tools or []],
            "tool_choice": choice if isinstance(choice, str) else _given(choice),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "text": _given(body.text) if body.text else {"format": {"type": "text"}},
            "reasoning": _given(body.reasoning) if body.reasoning else None,
            "previous_response_id": None, "store": False, "truncation": "disabled",
            "temperature": params.temperature, "top_p": params.top_p,
        }  # fmt: skip

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        number = 0
        async for event in self._events():
            yield {**event, "sequence_number": number}
            number += 1

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        begun = self._response("in_progress")
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}
        try:
            async for _, events in self._turn.events():
                for event in events:
                    for one in self._items.push(event):
                        yield one
        except Exception as error:
            answer = sse.failure(error)
            fault: Fault = {"code": str(answer.code or answer.type), "message": answer.message}
            yield {"type": "response.failed", "response": self._response("failed", fault)}
            return
        for one in self._items.end(self._status):
            yield one
        yield {"type": f"response.{self._status}", "response": self._response(self._status)}

    async def whole(self) -> ResponseReply:
        async for _, events in self._turn.events():
            for event in events:
                for _ in self._items.push(event):
                    pass
        for _ in self._items.end(self._status):
            pass
        return self._response(self._status)

    @property
    def _status(self) -> Literal["completed", "incomplete"]:
        is_cut = self._turn.sequence.finish_reason == "length"
        return "incomplete" if is_cut else "completed"

    def _response(self, status: ResponseStatus, fault: Fault | None = None) -> ResponseReply:
        cut: Cut | None = {"reason": "max_output_tokens"} if status == "incomplete" else None
        usage = self._usage() if status in ("incomplete", "completed") else None
        output: list[Any] = list(self._items.output)
        reply = cast(ResponseReply, {
            **self._head, "status": status, "error": fault, "incomplete_details": cut,
            "output": output, "usage": usage,
        })  # fmt: skip
        if usage:
            self._turn.add_cache_report(reply)
        return reply

    def _usage(self) -> ResponseUsage:
        sequence = self._turn.sequence
        n_out = len(sequence.output)
        return {
            "input_tokens": sequence.n_prompt,
            "input_tokens_details": {"cached_tokens": sequence.n_cached, "cache_write_tokens": 0},
            "output_tokens": n_out,
            "output_tokens_details": {"reasoning_tokens": self._turn.choices[0].n_thought},
            "total_tokens": sequence.n_prompt + n_out,
        }


async def responses(http: HttpRequest) -> Response:
    body = await read(http, ResponsesRequest)
    service = await serving(http, body.model)
    turn = await begin(http, service, chat_request(body))
    answer = _Answer(body, turn)
    if body.stream:
        return sse.response(until_left(answer.events(), turn.request), sse.RESPONSES)
    async with aborted_on_disconnect(http.receive, turn.request):
        return JSONResponse(await answer.whole())
