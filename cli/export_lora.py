"""edgellm export-lora: a model with its adapters merged in."""

from typing import Annotated, Any

import typer

from edgellm.cli import _model
from edgellm.cli._bar import Bar
from edgellm.cli._lora import with_lora
from edgellm.cli._options import Force, Model, ModelFlag, Threads, threads_or_none
from edgellm.cli._output import say, visible, write


@with_lora
def command(
    model_argument: Model = None,
    model: ModelFlag = None,
    out: Annotated[
        str, typer.Option("-o", "--output", metavar="OUT.gguf", help="The file to write.")
    ] = "ggml-lora-merged.gguf",
    threads: Threads = -1,
    force: Force = False,
    *,
    adapters: dict[str, Any],
) -> None:
    """Write a copy of a model with LoRA adapters merged into its matrices, each in the type it has.

    \b
    Example:
      edgellm export-lora -m base.gguf --lora adapter.gguf:0.5 -o merged.gguf
    """
    if not adapters:
        raise typer.BadParameter("an adapter is needed", param_hint="'--lora'")
    name = _model.pick(model_argument, model)
    if name is None:
        raise typer.BadParameter("the base is needed", param_hint="'-m' / '--model'")
    path = _model.locate(name)

    from edgellm.lora_merge import merge

    with Bar("merging") as bar:
        changed = merge(
            str(path),
            adapters["lora"],
            out,
            n_threads=threads_or_none(threads),
            force=force,
            progress=bar,
        )
    types = ", ".join(f"{n} {kind}" for kind, n in changed.items())
    say(visible(f"{out}: merged into {types} matrices, which keep their type."))
    write(out + "\n")
