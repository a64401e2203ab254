"""edgellm hash: checksums of a model's tensors."""

from typing import Annotated

import typer

from edgellm.cli import _model
from edgellm.cli._bar import Bar
from edgellm.cli._output import say, visible, write

DIFFERS = 1  # exit code of --check


def command(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", autocompletion=_model.complete, help="The model."),
    ],
    sha256: Annotated[bool, typer.Option("--sha256", help="SHA-256; what is used without a flag.")]
    = False,
    sha1: Annotated[bool, typer.Option("--sha1", help="SHA-1.")] = False,
    uuid: Annotated[bool, typer.Option("--uuid", help="A UUID of version 5 of all tensors.")]
    = False,
    all_of_them: Annotated[bool, typer.Option("--all", help="All of these.")] = False,
    no_layer: Annotated[bool, typer.Option("--no-layer", help="Only for the model as a whole.")]
    = False,
    check: Annotated[
        str | None,
        typer.Option("-c", "--check", metavar="MANIFEST", show_default=False,
                     help="Compare with the lines of an earlier run."),
    ] = None,
) -> None:  # fmt: skip
    """Print a checksum of each tensor and of all together, as gguf-hash (llama.cpp) does. Metadata
    does not count, so a model keeps its checksums when it is split, merged or described anew.

    \b
    Examples:
      edgellm hash model.gguf > model.manifest
      edgellm hash --check model.manifest copy.gguf
    """
    from edgellm.gguf_hash import ALGORITHMS, checksums, differing

    path = str(_model.locate(model))
    with Bar("hashing") as bar:
        if check is not None:
            names = differing(path, check, bar)
        else:
            asked = dict(sha256=sha256 or not (sha1 or uuid), sha1=sha1, uuid=uuid)
            algorithms = [name for name in ALGORITHMS if all_of_them or asked[name]]
            lines = list(checksums(path, algorithms, not no_layer, bar))
    if check is None:
        write("".join(f"{line}\n" for line in lines))
    elif names:
        for name in names:
            say(visible(f"{name} differs from {check}."))
        raise typer.Exit(DIFFERS)
    else:
        write(f"{path} agrees with {check}.\n")
