"""What requests in the form of OpenAI's Responses may hold, and what replies do."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, Field, WithJsonSchema
from typing_extensions import TypedDict

from edgellm.server.body import Body, only
from edgellm.server.reply_schemas import CacheReported
from edgellm.server.schemas import CacheReportWanted, Effort

# ---- requests -----------------------------------------------------------------------------------


TEXTS = ["text", "input_text", "output_text", "refusal", "reasoning_text", "summary_text"]
ITEMS = ["message", "reasoning", "function_call", "function_call_output"]


class ResponsesPart(Body):
    type: Annotated[str, AfterValidator(only(TEXTS)), WithJsonSchema({"enum": TEXTS})]
    text: str | None = None


class Item(Body):
    """A part of the input: a message, a call, what came of a call, or a thought."""

    type: Annotated[str, AfterValidator(only(ITEMS, "items")), WithJsonSchema({"enum": ITEMS})] = (
        "message"
    )
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ResponsesPart] | None = None
    summary: list[ResponsesPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ResponsesPart] | None = None


class ResponsesTool(Body):
    type: Annotated[str, WithJsonSchema({"const": "function"})]
    name: str | None = Field(default=None, min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenTool(Body):
    type: Literal["function"]
    name: str = Field(min_length=1)


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
    background: Annotated[bool, WithJsonSchema({"const": False})] | None = None
    previous_response_id: Annotated[str, WithJsonSchema({"const": ""})] | None = None
    conversation: Annotated[str | dict[str, Any], WithJsonSchema({"enum": ["", {}]})] | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    truncation: str | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    return_cache_report: CacheReportWanted = None


# ---- replies ------------------------------------------------------------------------------------


class TextOut(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class ThoughtOut(TypedDict):
    type: Literal["reasoning_text"]
    text: str


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class MessageItem(TypedDict):
    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[TextOut]


class ReasoningItem(TypedDict):
    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any]
    content: list[ThoughtOut]


class CallItem(TypedDict):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = MessageItem | ReasoningItem | CallItem


class GivenFormat(TypedDict):
    type: Literal["text", "json_object", "json_schema"]
    name: NotRequired[str]
    schema: NotRequired[dict[str, Any]]
    strict: NotRequired[bool]


class GivenText(TypedDict, total=False):
    format: GivenFormat
    verbosity: str


class GivenReasoning(TypedDict, total=False):
    effort: str
    summary: str


class GivenTool(TypedDict):
    type: str
    name: NotRequired[str]
    description: NotRequired[str]
    parameters: NotRequired[dict[str, Any]]
    strict: NotRequired[bool]


class GivenChoice(TypedDict):
    type: Literal["function"]
    name: str


class ResponseHead(TypedDict):
    """What does not change while an answer is written; much of it as it was asked for."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    instructions: str | None
    metadata: dict[str, Any]
    max_output_tokens: int | None
    tools: list[GivenTool]
    tool_choice: Literal["none", "auto", "required"] | GivenChoice
    parallel_tool_calls: bool
    text: GivenText
    reasoning: GivenReasoning | None
    previous_response_id: None
    store: Literal[False]
    truncation: Literal["disabled"]
    temperature: float
    top_p: float


class CachedDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class ReasoningDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: CachedDetails
    output_tokens: int
    output_tokens_details: ReasoningDetails
    total_tokens: int


class Fault(TypedDict):
    code: str
    message: str


class Cut(TypedDict):
    reason: Literal["max_output_tokens"]


ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class ResponseReply(ResponseHead, CacheReported):
    status: ResponseStatus
    error: Fault | None
    incomplete_details: Cut | None
    output: list[OutputItem]
    usage: ResponseUsage | None


# ---- events of a stream --------------------------------------------------------------------------


class Numbered(TypedDict):
    sequence_number: int


class StatusEvent(Numbered):
    type: Literal["response.created", "response.in_progress", "response.completed",
                  "response.incomplete", "response.failed"]  # fmt: skip
    response: ResponseReply


class ItemEvent(Numbered):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class InItem(Numbered):
    output_index: int
    item_id: str


class InPart(InItem):
    content_index: int


class PartEvent(InPart):
    type: Literal["response.content_part.added", "response.content_part.done"]
    part: TextOut | ThoughtOut


class TextDeltaEvent(InPart):
    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[Any]


class ThoughtDeltaEvent(InPart):
    type: Literal["response.reasoning_text.delta"]
    delta: str


class TextDoneEvent(InPart):
    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[Any]


class ThoughtDoneEvent(InPart):
    type: Literal["response.reasoning_text.done"]
    text: str


class ArgumentsDeltaEvent(InItem):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDoneEvent(InItem):
    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


ResponseEvent = (
    StatusEvent | ItemEvent | PartEvent | TextDeltaEvent | ThoughtDeltaEvent | TextDoneEvent
    | ThoughtDoneEvent | ArgumentsDeltaEvent | ArgumentsDoneEvent
)  # fmt: skip
