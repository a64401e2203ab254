"""What requests in Anthropic's form may hold."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from edgellm.server.body import Body
from edgellm.server.schemas import CacheReportWanted, Effort, StopText, TextPart


class Block(Body):
    """A part of a message: text, thinking, tool_use or tool_result."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[TextPart] | None = None


class Message(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(Body):
    type: str | None = None
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class AnthropicToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=0, lt=1 << 31)


class OutputFormat(Body):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    format: OutputFormat | None = None
    effort: Effort | None = None


class CountRequest(Body):
    model: str | None = None
    messages: list[Message] = Field(min_length=1, max_length=10_000)
    system: str | list[TextPart] | None = None
    tools: list[AnthropicTool] | None = Field(default=None, max_length=512)
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1)
    stream: bool | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=16)] | None = None
    temperature: float | None = Field(default=None, ge=0, le=1)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, lt=1 << 31)
    output_config: OutputConfig | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    return_cache_report: CacheReportWanted = None
