"""edgellm set-meta: change metadata of a model file."""

from pathlib import Path
from typing import Annotated

import typer

from edgellm.cli import _model
from edgellm.cli._bar import Bar
from edgellm.cli._options import Force
from edgellm.cli._output import write
from edgellm.errors import EdgeLLMError


def command(
    model: Annotated[
        str,
        typer.Argument(metavar="IN.gguf", autocompletion=_model.complete, help="The model."),
    ],
    values: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=TYPE:VALUE...", show_default=False,
                       help="As for --override-kv; TYPE is int, float, bool or str."),
    ] = None,
    from_file: Annotated[
        list[str] | None,
        typer.Option("--file", metavar="KEY=PATH", show_default=False,
                     help="A text from a file, such as tokenizer.chat_template=chat.jinja."),
    ] = None,
    remove: Annotated[
        list[str] | None,
        typer.Option("--remove", metavar="KEY", show_default=False, help="Take a key out."),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="OUT.gguf", show_default=False,
                     help="The file to write."),
    ] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Replace the model once the new file is written.")
    ] = False,
    force: Force = False,
) -> None:  # fmt: skip
    """Write a model with other metadata; tensors stay as they are. A key that is there keeps its
    type.

    \b
    Examples:
      edgellm set-meta in.gguf general.name=str:Mine -o out.gguf
      edgellm set-meta in.gguf --file tokenizer.chat_template=chat.jinja --in-place
    """
    from edgellm.gguf_files import set_metadata
    from edgellm.overrides import parse

    if (out is None) != in_place:
        raise typer.BadParameter("give one of -o OUT.gguf and --in-place", param_hint="'--output'")
    asked = dict(parse(value, "set-meta") for value in values or [])
    asked |= dict(_read(pair) for pair in from_file or [])
    if not asked and not remove:
        raise typer.BadParameter("nothing is to be changed", param_hint="'KEY=TYPE:VALUE...'")
    path = str(_model.locate(model))
    with Bar("writing") as bar:
        set_metadata(path, out or path, asked, remove or [], force=force or in_place, progress=bar)
    write(f"{out or path}\n")


def _read(pair: str) -> tuple[str, str]:
    key, equals, path = pair.partition("=")
    if not (key and equals and path):
        raise EdgeLLMError(f"--file takes KEY=PATH, not {pair!r}.")
    try:
        return key, Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise EdgeLLMError(f"--file {key}: {path} is not text in UTF-8.") from None
