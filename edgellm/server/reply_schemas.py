"""What replies hold, in OpenAI's form and in llama-server's: the makers of replies are typed with
these, and the OpenAPI document is made from them."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # of Python 3.12: pydantic asks for it

FinishReason = Literal["stop", "length", "tool_calls", "error"]

# ---- what several replies have ------------------------------------------------------------------


class PromptDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Timings(TypedDict):
    """llama.cpp's; milliseconds."""

    cache_n: float
    prompt_n: float
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: float
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: float
    draft_n_accepted: float


class CacheReport(TypedDict):
    """What the prefix cache had of a prompt. ``message`` counts from 0, as in the request: the one
    in which it departs from an earlier prompt."""

    prompt_tokens: int
    cached_tokens: int
    common_tokens: int
    message: int | None
    role: str | None
    explanation: str


class CacheReported(TypedDict):
    """For those who ask (return_cache_report)."""

    cache_report: NotRequired[CacheReport]


class PromptProgress(TypedDict):
    """llama.cpp's, for those who ask (return_progress). ``processed`` includes ``cache``."""

    total: int
    cache: int
    processed: int
    time_ms: int


class TokenFacts(TypedDict):
    id: int
    token: str
    bytes: list[int]
    logprob: float


class TokenLogprob(TokenFacts):
    top_logprobs: list[TokenFacts]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class CalledFunction(TypedDict):
    name: str
    arguments: str


class Called(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


# ---- /v1/chat/completions ------------------------------------------------------------------------


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[Called]]


class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatReply(CacheReported):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class CallDelta(TypedDict):
    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class Delta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str
    reasoning_content: str
    tool_calls: list[CallDelta]


class DeltaChoice(TypedDict):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(CacheReported):
    """``usage`` is null but in the last chunk, which has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[DeltaChoice]
    usage: NotRequired[Usage | None]
    timings: NotRequired[Timings]
    prompt_progress: NotRequired[PromptProgress]


# ---- /v1/completions -----------------------------------------------------------------------------


class LegacyLogprobs(TypedDict):
    """Of every token in ``tokens``; the first of a text that is scored has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(TypedDict):
    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: FinishReason | None


class CompletionReply(CacheReported):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    timings: NotRequired[Timings]


class CompletionChunk(CacheReported):
    """``usage`` as in a chunk of a chat."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: NotRequired[Usage | None]
    prompt_progress: NotRequired[PromptProgress]


# ---- models, embeddings --------------------------------------------------------------------------


class ModelMeta(TypedDict):
    n_ctx: int
    n_ctx_train: int
    n_vocab: int
    n_embd: int
    architecture: str


class LoadStatus(TypedDict):
    value: Literal["unloaded", "loading", "loaded", "unloading"]


class Model(TypedDict):
    """``meta`` of one that is loaded."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    status: LoadStatus
    meta: NotRequired[ModelMeta]


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]


class Embedding(TypedDict):
    """``embedding``: numbers, or little-endian float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingReply(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


# ---- llama-server's ------------------------------------------------------------------------------


class InfillPiece(TypedDict):
    index: int
    content: str
    stop: Literal[False]
    model: str
    prompt_progress: NotRequired[PromptProgress]


class InfillEnd(CacheReported):
    index: int
    content: str
    stop: Literal[True]
    model: str
    stop_type: Literal["limit", "eos", "word"]
    stopping_word: str
    truncated: Literal[False]
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    timings: Timings


class TokenPiece(TypedDict):
    """``piece``: bytes as numbers where they are no text by themselves."""

    id: int
    piece: str | list[int]


class Tokenized(TypedDict):
    """What is beside ``tokens`` is vLLM's."""

    tokens: list[int] | list[TokenPiece]
    count: int
    max_model_len: int


class Detokenized(TypedDict):
    """The text as llama-server calls it, and as vLLM does."""

    content: str
    prompt: str


class TokenizerInfo(TypedDict):
    """vLLM's, as far as a GGUF file knows."""

    tokenizer_class: str
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None


class Prompted(TypedDict):
    prompt: str


class Health(TypedDict):
    status: Literal["ok"]


class Done(TypedDict):
    success: Literal[True]


class Readiness(Health):
    waiting: int


class DefaultSettings(TypedDict):
    n_ctx: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float


class Props(TypedDict):
    default_generation_settings: DefaultSettings
    total_slots: int
    model_alias: str
    chat_template: str
    build_info: str


class SlotDone(TypedDict):
    """What save, restore or erase did; counts of tokens and bytes."""

    id_slot: int
    filename: NotRequired[str]
    n_saved: NotRequired[int]
    n_written: NotRequired[int]
    n_restored: NotRequired[int]
    n_read: NotRequired[int]
    n_erased: NotRequired[int]
    timings: NotRequired[dict[str, float]]


class ModelStatus(TypedDict):
    """Of a model; what follows ``state`` only while it is loaded."""

    name: str
    state: Literal["unloaded", "loading", "unloading", "ready", "stalled", "failed", "draining"]
    running: NotRequired[int]
    waiting: NotRequired[int]
    tokens_per_second: NotRequired[float]
    generated: NotRequired[int]
    kv_cache_usage: NotRequired[float]
    n_ctx: NotRequired[int]
    seats: NotRequired[int]


class Status(TypedDict):
    models: list[ModelStatus]


class Slot(TypedDict):
    """The counts are of a slot at work."""

    id: int
    is_processing: bool
    n_prompt: NotRequired[int]
    n_computed: NotRequired[int]
    n_decoded: NotRequired[int]


OpenApiDocument = dict[str, Any]
