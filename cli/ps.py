"""edgellm ps: what a server runs."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from edgellm.api_keys import sent_key
from edgellm.cli._output import columns, write

ADDRESS = "http://127.0.0.1:8080"


def command(
    url: Annotated[
        str, typer.Argument(metavar="URL", envvar="EDGELLM_SERVER", help="Of the server.")
    ] = ADDRESS,
    api_key_file: Annotated[
        Path | None,
        typer.Option("--api-key-file", help="The first line is sent; else OPENAI_API_KEY is.",
                     show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:  # fmt: skip
    """Show a running `edgellm serve`: its models, how many requests run and wait, how fast.

    \b
    Examples:
      edgellm ps
      edgellm ps http://server:8080 --api-key-file key.txt
    """
    from edgellm.remote import status

    models = status(url, sent_key(api_key_file))
    if as_json:
        write(json.dumps(models, indent=1) + "\n")
        return
    head = ("model", "state", "running", "waiting", "tokens/s", "cache", "context")
    rows = [head, *map(_row, models)]
    write("\n".join(line[2:] for line in columns(rows)) + "\n")


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    if "running" not in model:  # it is not loaded
        return (model["name"], model["state"], *[""] * 5)
    return (
        model["name"], model["state"], f"{model['running']} of {model['seats']}",
        str(model["waiting"]), f"{model['tokens_per_second']:.1f}",
        f"{100 * model['kv_cache_usage']:.0f} %", f"{model['n_ctx']:,}",
    )  # fmt: skip
