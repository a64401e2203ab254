"""edgellm rm: remove models that were fetched."""

import sys
from typing import Annotated

import typer

from edgellm.cli._model import complete
from edgellm.cli._output import say, size


def command(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...",
            show_default=False,
            autocompletion=complete,
            help="Names as `edgellm list` shows them.",
        ),
    ],
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
) -> None:
    """Remove models that edgellm has fetched; files of other programs are left alone."""
    from edgellm.hub import shelf

    for name in names:
        _, n_bytes = shelf.removable(name)
        if not yes and sys.stdin.isatty():
            if not typer.confirm(f"Remove {name} ({size(n_bytes)})?", err=True):
                say(f"{name} is kept.")
                continue
        shelf.remove(name)
        say(f"{name} is removed, {size(n_bytes)} freed.")
