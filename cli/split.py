"""edgellm split: a model file in parts."""

from typing import Annotated

import typer

from edgellm.cli import _model
from edgellm.cli._bar import Bar
from edgellm.cli._options import Force
from edgellm.cli._output import say, size, visible, write


def command(
    model: Annotated[
        str,
        typer.Argument(metavar="IN.gguf", autocompletion=_model.complete, help="The model."),
    ],
    prefix: Annotated[
        str | None,
        typer.Argument(metavar="PREFIX", show_default=False,
                       help="PREFIX-00001-of-00003.gguf ...; without: the model's name."),
    ] = None,
    max_tensors: Annotated[
        int | None,
        typer.Option("--split-max-tensors", "--max-tensors", min=1, show_default="128",
                     help="Tensors in each part."),
    ] = None,
    max_size: Annotated[
        str | None,
        typer.Option("--split-max-size", "--max-size", metavar="N(M|G)", show_default=False,
                     help="Data in each part, such as 2G, in place of a number of tensors."),
    ] = None,
    no_tensor_first: Annotated[
        bool,
        typer.Option("--no-tensor-first-split", help="The first part holds the metadata alone."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written.")] = False,
    force: Force = False,
) -> None:  # fmt: skip
    """Write a model as several files, named as gguf-split (llama.cpp) names them. Any of them opens
    the whole model.

    \b
    Example:
      edgellm split model.gguf --split-max-size 2G
    """
    from edgellm.gguf_files import MAX_TENSORS, n_bytes_of, split

    if max_tensors is not None and max_size is not None:
        raise typer.BadParameter("give it or --split-max-size", param_hint="'--split-max-tensors'")
    max_bytes = None if max_size is None else n_bytes_of(max_size, "--split-max-size")
    path = str(_model.locate(model))
    with Bar("splitting") as bar:
        parts = split(
            path, prefix or path.removesuffix(".gguf"), max_bytes=max_bytes,
            max_tensors=max_tensors or (None if max_bytes else MAX_TENSORS),
            is_first_empty=no_tensor_first, force=force, dry_run=dry_run, progress=bar,
        )  # fmt: skip
    for name, tensors in parts:
        n_bytes = sum(t.n_bytes for t in tensors)
        say(visible(f"{len(tensors)} tensors, {size(n_bytes)}: {name}"))
    write(parts[0][0] + "\n")
