"""edgellm list: the models on this machine."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgellm.cli._output import columns, say, size, visible, write

if TYPE_CHECKING:
    from edgellm.hub.shelf import Model

PLACES = {"catalogue": "edgellm", "url": "edgellm", "hf": "Hugging Face cache"}


def command(
    all_models: Annotated[
        bool,
        typer.Option(
            "--all", "-a", help="Also what Ollama, LM Studio, llama.cpp and Hugging Face hold."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array.")] = False,
) -> None:
    """List the models that were fetched: name, size, quantization, architecture, where."""
    from edgellm.hub import shelf

    models = shelf.everything() if all_models else shelf.fetched()
    rows = [_row(model) for model in models]
    if as_json:
        write(json.dumps(rows, ensure_ascii=False) + "\n")
        return
    if not rows:
        say("No model here yet: `edgellm pull NAME` fetches one; --all looks at other programs'.")
        return
    table = [("NAME", "SIZE", "QUANT", "ARCHITECTURE", "WHERE")]
    table += [
        (
            visible(row["name"]),
            size(row["bytes"]),
            row["quant"] or "?",
            visible(row["architecture"] or "?"),
            row["where"],
        )
        for row in rows
    ]
    write("\n".join(columns(table)) + "\n")


def _row(model: "Model") -> dict[str, Any]:
    from edgellm.hub.facts import brief

    facts = brief(model.path)
    where = PLACES.get(model.where)
    if where is None:
        from edgellm.hub.held import PROGRAMS

        where = PROGRAMS[model.where]
    return {
        "name": model.name,
        "bytes": facts.n_bytes,
        "quant": facts.quant,
        "architecture": facts.architecture,
        "where": where,
        "path": str(model.path),
        "error": facts.error,
    }
