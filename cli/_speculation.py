"""Flags of speculative decoding; names and meanings are llama.cpp's, old ones too."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgellm.cli import _model
from edgellm.cli._flags import Command, say_unused, with_flags
from edgellm.cli._offload import layers_of
from edgellm.cli._options import automatic_or_positive, cache_type, threads_or_none

if TYPE_CHECKING:
    from edgellm.speculative.options import SpeculationOptions

# llama.cpp's names of kinds
_LONG = {"draft-simple": "draft"} | dict.fromkeys(
    ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache"), "lookup"
)


def _kind(value: str | None) -> str | None:
    """Its lists of kinds too: both together are auto."""
    from edgellm.speculative.options import KINDS

    if value is None:
        return None
    kinds = {_LONG.get(name, name) for name in value.split(",")}
    if unknown := sorted(kinds - set(KINDS)):
        raise typer.BadParameter(f"must be {', '.join(KINDS)}, not {unknown[0]!r}")
    kinds.discard("none")
    return "auto" if len(kinds) > 1 else kinds.pop() if kinds else "none"


def _layers(value: str) -> str:
    layers_of(value)
    return value


FLAGS: dict[str, tuple[Any, Any]] = {
    "spec_type": (Annotated[
        str | None,
        typer.Option(
            "--spec-type", envvar="EDGELLM_SPEC_TYPE", callback=_kind, show_default=False,
            metavar="none|lookup|draft|auto",
            help="What guesses tokens that are then checked several at a time: lookup in the text, "
            "a draft model (-md), or auto: both. Default: auto in a chat and with -md.",
        ),
    ], None),
    "draft_max": (Annotated[
        int,
        typer.Option(
            "--draft-max", "--draft", "--draft-n", "--spec-draft-n-max",
            envvar="EDGELLM_DRAFT_MAX", help="Guesses that are checked at once, at most.",
        ),
    ], 15),
    "draft_min": (Annotated[
        int,
        typer.Option(
            "--draft-min", "--draft-n-min", "--spec-draft-n-min", envvar="EDGELLM_DRAFT_MIN",
            help="Fewer are not checked.",
        ),
    ], 0),
    "draft_p_min": (Annotated[
        float,
        typer.Option(
            "--draft-p-min", "--spec-draft-p-min", envvar="EDGELLM_DRAFT_P_MIN",
            help="A draft model stops where it gives its guess a lower probability.",
        ),
    ], 0.0),
    "model_draft": (Annotated[
        str | None,
        typer.Option(
            "-md", "--model-draft", "--spec-draft-model", envvar="EDGELLM_MODEL_DRAFT",
            show_default=False, autocompletion=_model.complete,
            help="A small model of the same family that guesses; named as a model is, or auto: the "
            "catalogue's for this model.",
        ),
    ], None),
    "draft_layers": (Annotated[
        str,
        typer.Option(
            "-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft", "--spec-draft-ngl",
            envvar="EDGELLM_N_GPU_LAYERS_DRAFT", callback=_layers, metavar="N|auto|all",
            help="Its layers on the GPU.",
        ),
    ], "0"),
    "draft_threads": (Annotated[
        int,
        typer.Option(
            "-td", "--threads-draft", "--spec-draft-threads", envvar="EDGELLM_THREADS_DRAFT",
            callback=automatic_or_positive,
            help="Its threads; -1: the cores that the target leaves, else the target's in turns.",
        ),
    ], -1),
    "draft_cores": (Annotated[
        str | None,
        typer.Option(
            "--draft-cores", "-Cd", "--cpu-mask-draft", "--spec-draft-cpu-mask",
            envvar="EDGELLM_DRAFT_CORES", metavar="HEX", show_default=False,
            help="CPUs that it has for itself, as a hexadecimal mask: the target keeps off them.",
        ),
    ], None),
    "draft_type_k": (Annotated[
        str,
        typer.Option(
            "-ctkd", "--cache-type-k-draft", "--spec-draft-type-k",
            envvar="EDGELLM_CACHE_TYPE_K_DRAFT", callback=cache_type,
            help="What its keys are kept in.",
        ),
    ], "f16"),
    "draft_type_v": (Annotated[
        str,
        typer.Option(
            "-ctvd", "--cache-type-v-draft", "--spec-draft-type-v",
            envvar="EDGELLM_CACHE_TYPE_V_DRAFT", callback=cache_type,
            help="What its values are kept in.",
        ),
    ], "f16"),
}  # fmt: skip


def _pair(target: Path) -> str:
    from edgellm.hub import draft_for

    if (name := draft_for(target)) is None:
        raise typer.BadParameter(
            f"auto: the catalogue has no draft model for {target.name}; name one, or look up in "
            "the text alone (--spec-type lookup)",
            param_hint="-md",
        )
    return name


_OF_MODEL = [name for name in FLAGS if name not in ("spec_type", "draft_max", "draft_min")]


class SpeculationFlags:
    """What the flags came to. ``kind``: where none was asked for."""

    def __init__(self, given: dict[str, Any], kind: str) -> None:
        self._given, self._kind = given, kind

    def options(self, target: Path) -> "SpeculationOptions":
        """For LLM of a file; a draft model is fetched if need be."""
        from edgellm.speculative.options import SpeculationOptions

        given = self._given
        named = given["model_draft"]
        kind = given["spec_type"] or ("auto" if named is not None else self._kind)
        model: Path | None = None
        wanted = {
            "kind": kind, "n_max": given["draft_max"], "n_min": given["draft_min"],
            "p_min": given["draft_p_min"], "n_threads": threads_or_none(given["draft_threads"]),
            "cores": given["draft_cores"], "n_gpu_layers": layers_of(given["draft_layers"]),
            "type_k": given["draft_type_k"], "type_v": given["draft_type_v"],
        }  # fmt: skip
        SpeculationOptions(
            **wanted, model=named
        )  # what is wrong is said before anything is fetched
        if named is not None and kind in ("draft", "auto"):
            model = _model.locate(_pair(target) if named == "auto" else named)
        return SpeculationOptions(**wanted, model=None if model is None else str(model))

    @property
    def uses_model(self) -> bool:
        """Whether a draft model was asked for."""
        given = self._given
        return given["model_draft"] is not None and given["spec_type"] in (None, "draft", "auto")

    def report(self, options: "SpeculationOptions") -> None:
        """That a draft model's flags change nothing where none is used."""
        if not options.uses_model:
            of_model = {k: v for k, v in self._given.items() if k in _OF_MODEL}
            is_named = self._given["model_draft"] is not None
            why = f"--spec-type {options.kind} uses no" if is_named else "There is no"
            say_unused(FLAGS, of_model, f"{why} draft model (-md)")

    def say_unused(self, why: str) -> None:
        """That flags which were given have no effect."""
        say_unused(FLAGS, self._given, why)


def with_speculation(kind: str = "none") -> Callable[[Command], Command]:
    """Give a command these flags; without any of them ``kind`` of speculation is used."""
    return with_flags("speculation", FLAGS, lambda given: SpeculationFlags(given, kind))
