"""Flags that say which layers run on a GPU; names and meanings are llama.cpp's."""

import math
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgellm.cli._flags import say_unused, with_flags
from edgellm.cli._options import one_of
from edgellm.cli._output import say, visible

if TYPE_CHECKING:
    from edgellm.llm import LLM


def _layers(value: str) -> str:
    layers_of(value)
    return value


def layers_of(text: str) -> int | None:
    """Of a number, auto or all, as Options has it."""
    from edgellm.offload import ALL

    words = {"auto": None, "-1": None, "all": ALL}
    if text.lower() in words:
        return words[text.lower()]
    if not text.isdecimal():
        raise typer.BadParameter(f"{text!r} is not a number, auto or all")
    return int(text)


def _shares(value: str | None) -> str | None:
    _numbers(value)
    return value


def _numbers(value: str | None) -> tuple[float, ...]:
    try:
        shares = tuple(map(float, value.replace("/", ",").split(","))) if value else ()
        if not all(0 <= share < math.inf for share in shares) or (shares and not sum(shares)):
            raise ValueError
    except ValueError:
        raise typer.BadParameter(
            f"{value!r} are no shares such as 3,1: numbers of at least 0, not all 0"
        ) from None
    return shares


_PAIR = re.compile(r"(.+?)=([A-Za-z]\w*)(?:,|$)")  # patterns may have commas


def _overrides(values: list[str] | None) -> list[str] | None:
    for value in values or ():
        _pairs(value)
    return values


def _pairs(value: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    at = 0
    while at < len(value) or not found:
        match = _PAIR.match(value, at)
        if match is None:
            raise typer.BadParameter(f"{value!r} is not PATTERN=cpu or PATTERN=cudaN")
        found.append((match[1], match[2].lower()))
        at = match.end()
    return found


FLAGS: dict[str, tuple[Any, Any]] = {
    "gpu_layers": (Annotated[
        str,
        typer.Option(
            "-ngl", "--ngl", "--gpu-layers", "--n-gpu-layers", envvar="EDGELLM_N_GPU_LAYERS",
            callback=_layers, metavar="N|auto|all",
            help="Last layers on the GPU, the output matrix counted as one more; auto: what fits.",
        ),
    ], "auto"),
    "fit_margin": (Annotated[
        int | None,
        typer.Option(
            "--fit-margin", envvar="EDGELLM_FIT_MARGIN", metavar="MIB", min=0, show_default=False,
            help="MiB of each GPU that stay free; else a twentieth, 64 at least.",
        ),
    ], None),
    "override_tensor": (Annotated[
        list[str] | None,
        typer.Option(
            "-ot", "--override-tensor", metavar="PATTERN=PLACE", callback=_overrides,
            show_default=False,
            help="Matrices whose names match run at cpu or cudaN; the first that matches wins.",
        ),
    ], None),
    "cpu_moe": (Annotated[
        bool,
        typer.Option("--cpu-moe", "-cmoe", envvar="EDGELLM_CPU_MOE",
                     help="Experts stay on the CPU."),
    ], False),
    "n_cpu_moe": (Annotated[
        int,
        typer.Option("--n-cpu-moe", "-ncmoe", envvar="EDGELLM_N_CPU_MOE", min=0,
                     help="Experts of the first so many layers stay on the CPU."),
    ], 0),
    "no_kv_offload": (Annotated[
        bool,
        typer.Option("-nkvo", "--no-kv-offload", envvar="EDGELLM_NO_KV_OFFLOAD",
                     help="Keys and values stay on the CPU."),
    ], False),
    "tensor_split": (Annotated[
        str | None,
        typer.Option(
            "-ts", "--tensor-split", envvar="EDGELLM_TENSOR_SPLIT", metavar="SHARES",
            callback=_shares, show_default=False,
            help="Shares of layers for each GPU, as 3,1; else each takes what fits.",
        ),
    ], None),
    "stream_layers": (Annotated[
        str,
        typer.Option(
            "--stream-layers", envvar="EDGELLM_STREAM_LAYERS", metavar="auto|on|off",
            callback=one_of(("auto", "on", "off")),
            help="Layers that do not fit run on the GPU, their weights copied for each step; auto: "
            "where that is faster than the CPU.",
        ),
    ], "auto"),
    "strict_bits": (Annotated[
        bool,
        typer.Option("--strict-bits", envvar="EDGELLM_STRICT_BITS",
                     help="Prompts take the GPU's kernels of generated tokens, slower: the same "
                     "bits after a prefix hit or a recompute."),
    ], False),
    "show_placement": (Annotated[
        bool,
        typer.Option("--placement", help="Say which layer runs where, and how many bytes that is."),
    ], False),
}  # fmt: skip


class OffloadFlags:
    """What the flags came to: ``options`` for LLM, and whether to report."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given
        self.is_shown = bool(given["show_placement"])

    @property
    def options(self) -> Any:
        from edgellm.offload import ALL, Options

        given = self._given
        margin = given["fit_margin"]
        return Options(
            n_gpu_layers=layers_of(given["gpu_layers"]),
            fit_margin=None if margin is None else margin << 20,
            overrides=tuple(p for value in given["override_tensor"] or () for p in _pairs(value)),
            n_cpu_moe=ALL if given["cpu_moe"] else given["n_cpu_moe"],
            kv_offload=not given["no_kv_offload"],
            tensor_split=_numbers(given["tensor_split"]),
            stream=given["stream_layers"],
            strict=given["strict_bits"],
        )  # fmt: skip

    def say_unused(self, why: str) -> None:
        """That flags which were given have no effect."""
        say_unused(FLAGS, self._given, why)

    def report(self, llm: "LLM") -> None:
        if self.is_shown:
            for line in llm.placement_report():
                if line not in llm.notices:  # said already
                    say(visible(line))


with_offload = with_flags("offload", FLAGS, OffloadFlags)
