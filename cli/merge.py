"""edgellm merge: the parts of a model in one file."""

from typing import Annotated

import typer

from edgellm.cli import _model
from edgellm.cli._bar import Bar
from edgellm.cli._options import Force
from edgellm.cli._output import say, write


def command(
    model: Annotated[
        str,
        typer.Argument(metavar="PART.gguf", autocompletion=_model.complete, help="Any part."),
    ],
    out: Annotated[str, typer.Argument(metavar="OUT.gguf", help="The file to write.")],
    force: Force = False,
) -> None:
    """Write the parts of a model, which lie in one folder, as one file.

    \b
    Example:
      edgellm merge model-00001-of-00003.gguf model.gguf
    """
    from edgellm.gguf_files import merge

    with Bar("merging") as bar:
        n_parts = merge(str(_model.locate(model)), out, force=force, progress=bar)
    say(f"{n_parts} parts.")
    write(out + "\n")
