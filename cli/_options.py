"""Flags that several commands share. Names, short and long, and defaults are llama.cpp's.

Every flag with a value can be set by EDGELLM_<LONG NAME> as well; the flag wins.
"""

from collections.abc import Callable, Iterable
from typing import Annotated

import typer

from edgellm.cache_types import CACHE_TYPES
from edgellm.cli._model import complete


def _model_context(value: int) -> int:
    if value < 0:
        raise typer.BadParameter("must be at least 1, or 0 for the model's own")
    return value


def _policy(value: str) -> str:
    if value not in ("error", "ring"):
        raise typer.BadParameter(f"{value!r} is neither error nor ring")
    return value


def cache_type(value: str) -> str:
    if value not in CACHE_TYPES:
        raise typer.BadParameter(f"{value!r} is none of {', '.join(CACHE_TYPES)}")
    return value


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    """A check of a flag that can be one of a few words."""

    def check(value: str) -> str:
        if value not in names:
            raise typer.BadParameter(f"must be {', '.join(names)}")
        return value

    return check


def positive(value: float | None) -> float | None:
    if value is not None and not value > 0:
        raise typer.BadParameter("must be above 0")
    return value


def automatic_or_positive(value: int) -> int:
    if value == 0 or value < -1:
        raise typer.BadParameter("must be at least 1, or -1 for automatic")
    return value


Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        autocompletion=complete,
        help="A .gguf file, a short name of the catalogue, user/repo[:QUANT] of Hugging Face, a "
        "URL or a name of `list --all`. Default: $EDGELLM_MODEL, then the catalogue's default.",
    ),
]
ModelFlag = Annotated[
    str | None,
    typer.Option(
        "-m",
        "--model",
        help="The same, as a flag.",
        show_default=False,
        autocompletion=complete,
    ),
]
CtxSize = Annotated[
    int,
    typer.Option(
        "-c",
        "--ctx-size",
        envvar="EDGELLM_CTX_SIZE",
        callback=_model_context,
        help="Context in tokens; 0: the model's own, as far as memory allows.",
    ),
]
ContextPolicy = Annotated[
    str,
    typer.Option(
        "--context-policy",
        envvar="EDGELLM_CONTEXT_POLICY",
        callback=_policy,
        help="When the context is full: error, or ring (the first tokens and the newest stay).",
    ),
]
CacheTypeK = Annotated[
    str,
    typer.Option(
        "-ctk",
        "--cache-type-k",
        envvar="EDGELLM_CACHE_TYPE_K",
        callback=cache_type,
        help="What keys are kept in: f32, f16, q8_0 or q4_0; `edgellm kv-advise` compares them.",
    ),
]
CacheTypeV = Annotated[
    str,
    typer.Option(
        "-ctv",
        "--cache-type-v",
        envvar="EDGELLM_CACHE_TYPE_V",
        callback=cache_type,
        help="What values are kept in, as for keys.",
    ),
]
Threads = Annotated[
    int,
    typer.Option(
        "-t",
        "--threads",
        envvar="EDGELLM_THREADS",
        callback=automatic_or_positive,
        help="Threads; -1: the physical performance cores this process may use.",
    ),
]
CpuMask = Annotated[
    str | None,
    typer.Option(
        "-C",
        "--cpu-mask",
        envvar="EDGELLM_CPU_MASK",
        metavar="HEX",
        show_default=False,
        help="CPUs the threads stay on, as a hexadecimal mask (0x3: the first two).",
    ),
]


def threads_or_none(value: int) -> int | None:
    """The engine's None for the flag's -1."""
    return None if value == -1 else value


Force = Annotated[bool, typer.Option("--force", help="Replace a file that exists.")]
TextFile = Annotated[
    str | None,
    typer.Option("-f", "--file", metavar="TEXT", show_default=False,
                 help="The text; -: stdin."),
]  # fmt: skip
ChunkSize = Annotated[
    int, typer.Option("-c", "--ctx-size", min=4, help="Tokens of a chunk of the text.")
]
Chunks = Annotated[
    int,
    typer.Option("--chunks", callback=automatic_or_positive, help="At most so many; -1: all."),
]
