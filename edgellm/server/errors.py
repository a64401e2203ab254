"""What goes wrong with a request, as HTTP tells it: llama-server's types in OpenAI's shape, or the
shapes of the other protocols where their paths are asked for."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, Unpack

from starlette.responses import JSONResponse
from typing_extensions import TypedDict  # of Python 3.12: pydantic asks for it

from edgellm.errors import EdgeLLMError
from edgellm.loop import EngineError
from edgellm.prompts import ContextFull
from edgellm.quant.gguf import GGUFError
from edgellm.sampling import ModelProducedNaN
from edgellm.scheduler import Overloaded, RequestTimeout
from edgellm.structured import StructureError

_RETRY_SECONDS = 1, 3  # at random between: who was refused together does not come back together
UNSUPPORTED = "unsupported_value"  # the code of what is known, but not served
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}
_FLAG = re.compile(r" \(--(json-schema|grammar|regex)\)")
_ANTHROPIC_TYPES = {
    404: "not_found_error", 413: "request_too_large", 500: "api_error",
    503: "overloaded_error",
}  # fmt: skip


class ErrorSizes(TypedDict, total=False):
    """Of a prompt that does not fit."""

    n_prompt_tokens: int
    n_ctx: int


class ErrorFacts(ErrorSizes):
    message: str
    type: str
    param: str | None
    code: str | int


class OpenAIError(TypedDict):
    error: ErrorFacts


class AnthropicFacts(TypedDict):
    type: str
    message: str


class AnthropicError(TypedDict):
    type: Literal["error"]
    error: AnthropicFacts


class OllamaError(TypedDict):
    error: str


class ApiError(Exception):
    """An answer with an error. ``param`` is the path of the field at fault; with ``close`` nothing
    more is read from the connection."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        type: str | None = None, close: bool = False, **sizes: Unpack[ErrorSizes],
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.type, self.close, self.sizes = type or _TYPES[status], close, sizes

    @property
    def headers(self) -> Mapping[str, str]:
        found = {"connection": "close"} if self.close else {}
        if self.status == 401:
            found["www-authenticate"] = "Bearer"
        if self.status in (429, 503):
            found["retry-after"] = str(random.randint(*_RETRY_SECONDS))
        return found

    def response(self, path: str = "") -> JSONResponse:
        """As the protocol of this path has it."""
        shape = shape_of(path)
        headers = dict(self.headers)
        return JSONResponse(shape(self), status_of(path, self.status), headers=headers)


def openai_error(error: ApiError) -> OpenAIError:
    facts: ErrorFacts = {
        "message": error.message, "type": error.type, "param": error.param,
        "code": error.code or error.status, **error.sizes,
    }  # fmt: skip
    return {"error": facts}


def anthropic_error(error: ApiError) -> AnthropicError:
    kind = _ANTHROPIC_TYPES.get(error.status, _TYPES[error.status])
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def ollama_error(error: ApiError) -> OllamaError:
    return {"error": error.message}


def shape_of(path: str) -> Callable[[ApiError], Any]:
    """How the protocol of a path writes errors."""
    if path.startswith("/v1/messages"):
        return anthropic_error
    return ollama_error if path.startswith("/api/") else openai_error


def status_of(path: str, status: int) -> int:
    """Ollama says of a full queue what others say of a server that is not ready."""
    return 503 if status == 429 and shape_of(path) is ollama_error else status


def unsupported(message: str, param: str | None = None) -> ApiError:
    """A known field that cannot be served."""
    return ApiError(400, message, param=param, code=UNSUPPORTED)


def api_error(error: Exception) -> ApiError:
    """Any exception as an answer. What is nobody's fault but ours says nothing of itself."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextFull):
        return ApiError(
            400, str(error), code="context_length_exceeded", type="exceed_context_size_error",
            n_prompt_tokens=error.n_prompt, n_ctx=error.n_ctx,
        )  # fmt: skip
    if isinstance(error, RequestTimeout):
        return ApiError(408, str(error), code="timeout")
    if isinstance(error, Overloaded | EngineError):
        return ApiError(503, str(error))
    if isinstance(error, ModelProducedNaN):
        return ApiError(500, str(error), code="model_produced_nan")
    if isinstance(error, StructureError):  # its flags are fields here
        flag = _FLAG.search(str(error))
        param = flag[1].replace("-", "_") if flag else None
        return ApiError(400, _FLAG.sub("", str(error)), param=param, code="unsupported_value")
    if isinstance(error, EdgeLLMError):
        return ApiError(400, str(error))
    if isinstance(error, GGUFError):  # the log has its path
        return ApiError(
            500, "The model's file was cut short, or cannot be read any more, while it was served.",
            code="model_file_changed",
        )  # fmt: skip
    return ApiError(500, "The server has failed; its log says why.")
