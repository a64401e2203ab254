"""What requests may hold: fields, types and ranges. The OpenAPI document is made from these."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema, model_validator

from edgellm.server.body import Body


def _mirostat(version: int) -> int:
    if version not in (0, 2):
        raise ValueError("Input should be 0 or 2")
    return version


Probability = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]
Stop = StopText | Annotated[list[StopText], Field(max_length=16)]
Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(min_length=1)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
CacheReportWanted = Annotated[
    bool | None,
    Field(description="Say what the prefix cache had of the prompt (cache_report of the reply)."),
]
# What a field may be is told here as far as it can be; what is refused with a sentence of its own
# has a wider type.
Mirostat = Annotated[int, AfterValidator(_mirostat), WithJsonSchema({"enum": [0, 2]})]
MaxTokens = Annotated[int, Field(ge=-1), WithJsonSchema({"type": "integer", "anyOf": [
    {"minimum": 1}, {"const": -1}]})]  # fmt: skip
NoImages = Annotated[list[str], WithJsonSchema({"type": "array", "maxItems": 0})]
_SEED = Field(default=None, ge=-(1 << 63), lt=1 << 63)


class StreamOptions(Body):
    include_usage: bool | None = None


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    json_schema: dict[str, Any] | bool | None = Field(default=None, alias="schema")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    json_object_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    pattern: str | None = None
    grammar: str | None = None


class Sampled(Body):
    """What all requests for text have in common; names and ranges of OpenAI and llama.cpp."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=8)
    max_tokens: MaxTokens | None = None
    n_predict: MaxTokens | None = None  # llama-server's name of it
    stop: Stop | None = None
    seed: int | None = _SEED
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=1 << 31)
    min_p: Probability | None = None
    typical_p: Probability | None = None
    top_n_sigma: float | None = None
    xtc_probability: Probability | None = None
    xtc_threshold: Probability | None = None
    repeat_penalty: float | None = Field(default=None, gt=0, le=10)
    repeat_last_n: int | None = Field(default=None, ge=-1, lt=1 << 31)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    dry_multiplier: float | None = Field(default=None, ge=0)
    dry_base: float | None = Field(default=None, ge=1)
    dry_allowed_length: int | None = Field(default=None, ge=0, lt=1 << 31)
    dry_penalty_last_n: int | None = Field(default=None, ge=-1, lt=1 << 31)
    dynatemp_range: float | None = Field(default=None, ge=0)
    dynatemp_exponent: float | None = Field(default=None, ge=0)
    mirostat: Mirostat | None = None
    mirostat_tau: float | None = Field(default=None, ge=0)
    mirostat_eta: float | None = Field(default=None, ge=0)
    samplers: list[str] | None = Field(default=None, max_length=32)
    ignore_eos: bool | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        default=None, max_length=1024
    )
    response_format: ResponseFormat | None = None
    json_schema: dict[str, Any] | bool | None = None
    grammar: str | None = Field(default=None, max_length=1 << 16)
    regex: str | None = Field(default=None, max_length=1 << 14)
    reasoning_budget: int | None = Field(default=None, ge=-1, lt=1 << 31)
    priority: Literal["interactive", "batch"] | int | None = None
    timeout: float | None = Field(default=None, ge=0.001)
    cache_salt: str | None = Field(default=None, max_length=256)
    user: str | None = None
    return_cache_report: CacheReportWanted = None
    return_progress: bool | None = Field(
        default=None, description="Streams tell how far the prompt is read (prompt_progress)."
    )

    @model_validator(mode="after")
    def _by_either_name(self) -> Self:
        if self.max_tokens is None:
            self.max_tokens = self.n_predict
        return self


class TextPart(Body):
    type: Annotated[str, WithJsonSchema({"enum": ["text", "input_text", "refusal"]})]
    text: str | None = None


class FunctionCall(Body):
    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class Function(Body):
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str = Field(min_length=1)


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Sampled):
    messages: list[ChatMessage] = Field(min_length=1, max_length=10_000)
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[Tool] | None = Field(default=None, max_length=512)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, max_length=64)
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(
        default=None, description="The answer goes on with the text of the last message."
    )


class CompletionRequest(Sampled):
    prompt: str | list[str] | Tokens | list[Tokens]
    max_tokens: Annotated[int, Field(ge=-1)] | None = None  # 0 with echo
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=20)
    best_of: int | None = Field(default=None, ge=1, le=8)


class ExtraFile(Body):
    filename: str | None = None
    text: str


class InfillRequest(Sampled):
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[ExtraFile] | None = Field(default=None, max_length=256)
    prompt: str | None = None


class EmbeddingRequest(Body):
    input: str | list[str] | Tokens | list[Tokens]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(default=None, ge=1)
    user: str | None = None


class ForModel(Body):
    model: str | None = None


class ModelRequest(Body):
    """To load or unload a model."""

    model: str = Field(min_length=1)


class TokenizeRequest(ForModel):
    """``content`` is llama-server's name of the text, ``prompt`` and ``add_special_tokens`` are
    vLLM's, where the model's special tokens are added unless this says no."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["content"]}, {"required": ["prompt"]}]}
    )
    content: str = ""
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False
    prompt: str = ""
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _has_text(self) -> Self:
        if len(self.model_fields_set & {"content", "prompt"}) != 1:
            raise ValueError("Either content or prompt is needed")
        return self


class DetokenizeRequest(ForModel):
    tokens: list[Annotated[int, Field(ge=0, lt=1 << 31)]]


class SlotRequest(Body):
    filename: str | None = None
    cache_salt: str | None = Field(default=None, max_length=256)


class TemplateRequest(ForModel):
    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
