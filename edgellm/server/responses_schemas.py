"""What requests in the form of OpenAI's Responses may hold."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from edgellm.server.body import Body
from edgellm.server.schemas import CacheReportWanted, Effort, TextPart


class Item(Body):
    """A part of the input: a message, a call, what came of a call, or a thought."""

    type: str = "message"
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[TextPart] | None = None
    summary: list[TextPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[TextPart] | None = None


class ResponsesTool(Body):
    type: str
    name: str | None = Field(default=None, min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenTool(Body):
    type: Literal["function"]
    name: str


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(Body):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(Body):
    effort: Effort | None = None
    summary: str | None = None


class ResponsesRequest(Body):
    """Nothing is kept on the server, so what refers to an earlier answer is refused."""

    input: str | list[Item]
    model: str | None = None
    instructions: str | None = None
    tools: list[ResponsesTool] | None = Field(default=None, max_length=512)
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    truncation: str | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    return_cache_report: CacheReportWanted = None
