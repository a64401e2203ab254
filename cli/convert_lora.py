"""edgellm convert-lora: a PEFT directory to a GGUF adapter."""

from typing import Annotated

import typer

from edgellm.cli import _model
from edgellm.cli._bar import Bar
from edgellm.cli._options import Force, one_of
from edgellm.cli._output import say, size, visible, write


def command(
    folder: Annotated[
        str,
        typer.Argument(
            metavar="PEFT_DIR", help="With adapter_config.json and adapter_model.safetensors."
        ),
    ],
    target: Annotated[str, typer.Argument(metavar="OUT.gguf", help="The adapter to write.")],
    base: Annotated[
        str,
        typer.Option("--base", metavar="MODEL", help="The GGUF model that the adapter is for."),
    ],
    outtype: Annotated[
        str,
        typer.Option(
            "--outtype", callback=one_of(("f32", "f16", "bf16")), help="f32, f16 or bf16."
        ),
    ] = "f32",
    force: Force = False,
) -> None:
    """Convert a LoRA adapter of PEFT for `--lora`.

    \b
    Example:
      edgellm convert-lora my-adapter adapter.gguf --base model.gguf
    """
    from edgellm.convert.adapter import convert_adapter

    path = str(_model.locate(base))
    with Bar("converting") as bar:
        out = convert_adapter(folder, target, path, outtype=outtype, force=force, progress=bar)
    say(visible(f"{out}: {size(out.stat().st_size)}."))
    write(f"{out}\n")
