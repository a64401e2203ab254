"""Flags that say something else than the model file: rotation, and metadata by key."""

from typing import Annotated, Any

import typer

from edgellm.cli._flags import with_flags


def _flag(type_: Any, name: str, help: str) -> Any:
    envvar = f"EDGELLM_{name.strip('-').replace('-', '_').upper()}"
    return Annotated[type_, typer.Option(name, envvar=envvar, help=help, show_default=False)]


FLAGS = {
    "rope_freq_base": _flag(float | None, "--rope-freq-base", "Base of the rotation."),
    "rope_freq_scale": _flag(
        float | None, "--rope-freq-scale", "Frequencies are multiplied by this: 0.25 for 4 x."
    ),
    "rope_scale": _flag(
        float | None, "--rope-scale", "The context grows by this: 1 / --rope-freq-scale."
    ),
    "rope_scaling": _flag(str | None, "--rope-scaling", "How: none, linear, yarn or longrope."),
    "yarn_orig_ctx": _flag(int | None, "--yarn-orig-ctx", "Context before YaRN's extension."),
    "yarn_ext_factor": _flag(
        float | None, "--yarn-ext-factor", "Share of the fast elements that YaRN spares; 0: none."
    ),
    "yarn_attn_factor": _flag(
        float | None, "--yarn-attn-factor", "Queries and keys are multiplied by this."
    ),
    "yarn_beta_fast": _flag(
        float | None, "--yarn-beta-fast", "An element is fast from so many turns on."
    ),
    "yarn_beta_slow": _flag(
        float | None, "--yarn-beta-slow", "An element is slow up to so many turns."
    ),
    "override_kv": Annotated[
        list[str] | None,
        typer.Option(
            "--override-kv",
            metavar="KEY=TYPE:VALUE",
            help="Metadata instead of the file's; TYPE is int, float, bool or str.",
            show_default=False,
        ),
    ],
}


def _arguments(values: dict[str, Any]) -> dict[str, Any]:
    pairs = values.pop("override_kv", None)
    given = {name: value for name, value in values.items() if value is not None}
    if pairs:
        from edgellm.overrides import parse

        given["kv_overrides"] = dict(parse(pair) for pair in pairs)
    return given


with_overrides = with_flags("overrides", {k: (kind, None) for k, kind in FLAGS.items()}, _arguments)
