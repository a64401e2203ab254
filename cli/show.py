"""edgellm show: one model in short."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from edgellm.cli import _model
from edgellm.cli._options import Model, ModelFlag
from edgellm.cli._output import columns, size, visible, write
from edgellm.errors import EdgeLLMError


def command(
    model_argument: Model = None,
    model: ModelFlag = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    template: Annotated[
        bool, typer.Option("--template", help="Print the chat template and nothing else.")
    ] = False,
    license_text: Annotated[
        bool, typer.Option("--license", help="Print the licence and nothing else.")
    ] = False,
) -> None:
    """Show a model that is on this machine: kind, size, context, licence, template, path.

    `edgellm inspect` shows everything, tensors included.
    """
    from edgellm.hub import catalogue, find

    name = _model.pick(model_argument, model)
    path = find(name)
    if path is None:
        shown = name or catalogue()[0]
        raise EdgeLLMError(f"{shown} is not on this machine: `edgellm pull {shown}` fetches it.")
    facts = _facts(name, path)
    if template:
        if facts["template"] is None:
            raise EdgeLLMError(f"{path} has no chat template; `edgellm run --raw` does without.")
        write(facts["template"] + "\n")
    elif license_text:
        if facts["licence"] is None:
            raise EdgeLLMError(f"{path} does not tell its licence; look where it comes from.")
        write(facts["licence"] + "\n")
    elif as_json:
        write(json.dumps(facts, ensure_ascii=False) + "\n")
    else:
        write(_as_text(facts))


def _facts(name: str | None, path: Path) -> dict[str, Any]:
    from edgellm.hub.facts import full
    from edgellm.hub.shelf import licence_of

    facts = full(path)
    facts["licence"] = licence_of(path) or facts["licence"]
    return {"name": name, **facts}


def _as_text(facts: dict[str, Any]) -> str:
    rows = [
        ("model", facts["title"] or facts["name"] or ""),
        ("architecture", facts["architecture"]),
        ("parameters", f"{facts['parameters'] / 1e6:,.1f} M"),
        ("quantization", facts["quant"]),
        ("size", size(facts["bytes"]) + (f", {facts['parts']} parts" * (facts["parts"] > 1))),
        ("context", f"{facts['context']:,} tokens" if facts["context"] else "?"),
        ("embedding", f"{facts['embedding']:,}" if facts["embedding"] else "?"),
        ("layers", str(facts["layers"] or "?")),
        ("vocabulary", f"{facts['vocabulary']:,}"),
        ("chat template", "yes" if facts["template"] is not None else "no"),
        ("licence", facts["licence"] or "not told by the file"),
        ("path", facts["path"]),
    ]
    return "\n".join(columns([(name, visible(value)) for name, value in rows])) + "\n"
