"""Run quantized language models on the machine you have.

The names below are imported on first use: the lower layers live inside this package, and importing
one of them must not pull in the engine above it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgellm.engine import AsyncLLM as AsyncLLM
    from edgellm.llm import LLM as LLM
    from edgellm.request_options import RequestOptions as RequestOptions
    from edgellm.sampling_params import SamplingParams as SamplingParams
    from edgellm.tokenizer import Tokenizer as Tokenizer

    __version__: str

_HOMES = {
    "AsyncLLM": "edgellm.engine",
    "LLM": "edgellm.llm",
    "RequestOptions": "edgellm.request_options",
    "SamplingParams": "edgellm.sampling_params",
    "Tokenizer": "edgellm.tokenizer",
}

__all__ = ["AsyncLLM", "LLM", "RequestOptions", "SamplingParams", "Tokenizer", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("edgellm")
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'edgellm' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
