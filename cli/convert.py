"""edgellm convert: a Hugging Face directory to a GGUF file."""

from typing import Annotated

import typer

from edgellm.cli._bar import Bar
from edgellm.cli._options import Force, Threads, threads_or_none
from edgellm.cli._output import say, size, visible, write


def _outtype(value: str) -> str:
    from edgellm.convert.outtype import OUTTYPES

    if value not in OUTTYPES:
        raise typer.BadParameter(f"must be one of {', '.join(OUTTYPES)}")
    return value


def command(
    folder: Annotated[
        str,
        typer.Argument(metavar="HF_DIR", help="With config.json, *.safetensors and a tokenizer."),
    ],
    target: Annotated[
        str | None,
        typer.Argument(metavar="[OUT.gguf]", help="By default NAME-TYPE.gguf in HF_DIR."),
    ] = None,
    outtype: Annotated[
        str,
        typer.Option(
            "--outtype", callback=_outtype,
            help="Of matrices: f16, bf16, f32 or q8_0; auto: bf16 where they are so, else f16.",
        ),
    ] = "auto",
    threads: Threads = -1,
    force: Force = False,
) -> None:  # fmt: skip
    """Convert a model from Hugging Face's form: safetensors, config.json and its tokenizer.

    \b
    Examples:
      edgellm convert Qwen2.5-0.5B-Instruct
      edgellm convert Llama-3.2-1B llama.gguf --outtype q8_0
    """
    from edgellm.convert.model import convert_model

    with Bar("converting") as bar:
        path = convert_model(
            folder, target, outtype=outtype, n_threads=threads_or_none(threads), force=force,
            progress=bar,
        )  # fmt: skip
    say(visible(f"{path}: {size(path.stat().st_size)}."))
    write(f"{path}\n")
