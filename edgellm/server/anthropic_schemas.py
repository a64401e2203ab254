"""What requests in Anthropic's form may hold, and what replies do."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema
from typing_extensions import TypedDict

from edgellm.server.body import Body, only
from edgellm.server.reply_schemas import CacheReported
from edgellm.server.schemas import CacheReportWanted, Effort, StopText

# ---- requests -----------------------------------------------------------------------------------


BLOCKS = ["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]


class AnthropicPart(Body):
    type: Annotated[str, AfterValidator(only(("text",))), WithJsonSchema({"const": "text"})]
    text: str | None = None


class Block(Body):
    """A part of a message: text, thinking, tool_use or tool_result."""

    type: Annotated[str, WithJsonSchema({"enum": BLOCKS})]
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[AnthropicPart] | None = None


class Message(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(Body):
    type: Annotated[str, WithJsonSchema({"const": "custom"})] | None = None
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class AnthropicToolChoice(Body):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class AnthropicNamedTool(Body):
    type: Literal["tool"]
    name: str = Field(min_length=1)
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
    system: str | list[AnthropicPart] | None = None
    tools: list[AnthropicTool] | None = Field(default=None, max_length=512)
    tool_choice: AnthropicToolChoice | AnthropicNamedTool | None = Field(
        default=None, discriminator="type"
    )
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


# ---- replies ------------------------------------------------------------------------------------


class TextBlock(TypedDict):
    type: Literal["text"]
    text: str


class ThinkingBlock(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class Ended(TypedDict):
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None


class AnthropicUsage(TypedDict):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageReply(Ended, CacheReported):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    usage: AnthropicUsage


class Counted(TypedDict):
    input_tokens: int


class MessageStart(TypedDict):
    type: Literal["message_start"]
    message: MessageReply


class BlockStart(TypedDict):
    type: Literal["content_block_start"]
    index: int
    content_block: AnswerBlock


class TextDelta(TypedDict):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(TypedDict):
    type: Literal["thinking_delta"]
    thinking: str


class InputDelta(TypedDict):
    type: Literal["input_json_delta"]
    partial_json: str


BlockChange = TextDelta | ThinkingDelta | InputDelta


class BlockDelta(TypedDict):
    type: Literal["content_block_delta"]
    index: int
    delta: BlockChange


class BlockStop(TypedDict):
    type: Literal["content_block_stop"]
    index: int


class MessageDelta(CacheReported):
    type: Literal["message_delta"]
    delta: Ended
    usage: AnthropicUsage


class MessageStop(TypedDict):
    type: Literal["message_stop"]


class Ping(TypedDict):
    """Said in silence."""

    type: Literal["ping"]


BlockEvent = BlockStart | BlockDelta | BlockStop
MessageEvent = MessageStart | BlockEvent | MessageDelta | MessageStop
