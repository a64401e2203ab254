"""What requests in Ollama's form may hold, and what replies do."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema
from typing_extensions import TypedDict

from edgellm.server.body import Body
from edgellm.server.reply_schemas import CacheReported, FinishReason, TokenLogprob
from edgellm.server.schemas import (
    CacheReportWanted,
    Mirostat,
    NoImages,
    Penalty,
    Probability,
    Stop,
    Tool,
)

# ---- requests -----------------------------------------------------------------------------------


class Options(Body):
    """``num_ctx``, ``num_gpu`` and their like are decided when the server begins."""

    num_predict: int | None = Field(default=None, ge=-2, lt=1 << 31)  # below 1: no limit
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_k: int | None = Field(default=None, ge=-1, lt=1 << 31)
    top_p: float | None = Field(default=None, gt=0, le=1)
    min_p: Probability | None = None
    typical_p: Probability | None = None
    repeat_last_n: int | None = Field(default=None, ge=-1, lt=1 << 31)
    repeat_penalty: float | None = Field(default=None, gt=0, le=10)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    mirostat: Mirostat | None = None
    mirostat_tau: float | None = Field(default=None, ge=0)
    mirostat_eta: float | None = Field(default=None, ge=0)
    stop: Stop | None = None


class OllamaFunction(Body):
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class OllamaCall(Body):
    id: str | None = None
    function: OllamaFunction


class OllamaMessage(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: NoImages | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class Asked(Body):
    """What requests for text have in common."""

    model: str
    stream: bool | None = None
    options: Options | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: str | float | None = None
    return_cache_report: CacheReportWanted = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)


class OllamaChatRequest(Asked):
    messages: list[OllamaMessage] = Field(default_factory=list, max_length=10_000)
    tools: list[Tool] | None = Field(default=None, max_length=512)


class GenerateRequest(Asked):
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: Annotated[str, WithJsonSchema({"const": ""})] | None = None
    context: Annotated[list[int], WithJsonSchema({"type": "array", "maxItems": 0})] | None = None
    raw: bool | None = None
    images: NoImages | None = None


class EmbedRequest(Body):
    model: str
    input: str | list[str]
    truncate: bool | None = None
    dimensions: int | None = Field(default=None, ge=1)
    options: Options | None = None
    keep_alive: str | float | None = None


class ShowRequest(Body):
    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


# ---- replies ------------------------------------------------------------------------------------


class WrittenFunction(TypedDict):
    index: int
    name: str
    arguments: dict[str, Any]


class WrittenCall(TypedDict):
    id: str
    function: WrittenFunction


class Said(TypedDict, total=False):
    """What an answer, or a line of it, has besides text."""

    thinking: str
    tool_calls: list[WrittenCall]


class Scores(TypedDict, total=False):
    logprobs: list[TokenLogprob]


class WrittenMessage(Said):
    role: Literal["assistant"]
    content: str


class Head(TypedDict):
    model: str
    created_at: str


class Counts(CacheReported):
    """Durations are nanoseconds."""

    done: Literal[True]
    done_reason: FinishReason
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    prompt_eval_duration: int
    eval_count: int
    eval_duration: int


class ChatLine(Head, Scores):
    message: WrittenMessage
    done: Literal[False]


class ChatEnd(Head, Scores, Counts):
    message: WrittenMessage


class GenerateLine(Head, Said, Scores):
    response: str
    done: Literal[False]


class GenerateEnd(Head, Said, Scores, Counts):
    response: str


class Loaded(Head):
    done: Literal[True]
    done_reason: Literal["load", "unload"]


class ChatLoaded(Loaded):
    message: WrittenMessage


class GenerateLoaded(Loaded):
    response: str


class ModelDetails(TypedDict):
    parent_model: str
    format: Literal["gguf"]
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class HeldModel(TypedDict):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class Tags(TypedDict):
    models: list[HeldModel]


class RunningModel(HeldModel):
    expires_at: str
    size_vram: int
    context_length: int


class Running(TypedDict):
    models: list[RunningModel]


class Shown(TypedDict):
    license: str
    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    modified_at: str
    model_info: dict[str, str | bool | int | float | None]
    capabilities: list[Literal["completion", "embedding", "tools", "thinking"]]


class Embedded(TypedDict):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class Version(TypedDict):
    version: str
