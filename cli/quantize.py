"""edgellm quantize: a model in a smaller number format."""

import os
import re
from typing import TYPE_CHECKING, Annotated

import typer

from edgellm.cli import _model
from edgellm.cli._bar import Bar
from edgellm.cli._bench_report import table
from edgellm.cli._options import Chunks, ChunkSize, Force, TextFile, positive
from edgellm.cli._output import say, size, visible, write
from edgellm.cli._quantize_fit import fitted
from edgellm.errors import EdgeLLMError

if TYPE_CHECKING:
    from edgellm.quant.block import QuantType
    from edgellm.quantize import Choice


def command(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="IN.gguf [OUT.gguf] TYPE [THREADS]", autocompletion=_model.complete,
                       help="TYPE is a mix such as Q4_K_M, of which --list shows all; there is "
                       "none with --target-size and --max-kld."),
    ] = [],  # noqa: B006  typer's way to say: none
    imatrix: Annotated[
        str | None,
        typer.Option("--imatrix", metavar="FILE", show_default=False,
                     help="Which columns matter, as `edgellm imatrix` or llama.cpp measured it."),
    ] = None,
    pure: Annotated[bool, typer.Option("--pure", help="The mix's main type for all matrices.")]
    = False,
    leave_output: Annotated[
        bool, typer.Option("--leave-output-tensor", help="output.weight stays as it is.")
    ] = False,
    output_type: Annotated[
        str | None, typer.Option("--output-tensor-type", metavar="TYPE", show_default=False,
                                 help="The type of the output matrix.")
    ] = None,
    embedding_type: Annotated[
        str | None, typer.Option("--token-embedding-type", metavar="TYPE", show_default=False,
                                 help="The type of the embedding table.")
    ] = None,
    tensor_type: Annotated[
        list[str] | None,
        typer.Option("--tensor-type", metavar="PATTERN=TYPE", show_default=False,
                     help="The type of the matrices whose names match; the last match counts."),
    ] = None,
    allow_requantize: Annotated[
        bool, typer.Option("--allow-requantize", help="Also matrices that are quantized already.")
    ] = False,
    target_size: Annotated[
        str | None,
        typer.Option("--target-size", metavar="SIZE", show_default=False,
                     help="A type for each matrix, so that least is lost in such a file: 4.2G."),
    ] = None,
    max_kld: Annotated[
        float | None,
        typer.Option("--max-kld", metavar="NATS", callback=positive, show_default=False,
                     help="A type for each matrix, so that the file is smallest whose predictions "
                     "are on average no further from the model's (KL): 0.02."),
    ] = None,
    file: TextFile = None,
    ctx_size: ChunkSize = 256,
    chunks: Chunks = 2,
    keep_split: Annotated[
        bool, typer.Option("--keep-split", help="As many parts as the source has.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would become of each tensor.")
    ] = False,
    show_list: Annotated[bool, typer.Option("--list", help="The mixes that there are.")] = False,
    force: Force = False,
) -> None:  # fmt: skip
    """Write a model with its matrices in a smaller number format.

    \b
    Which tensor gets which type is as in llama.cpp's quantize. Without OUT the file is
    ggml-model-TYPE.gguf beside the source. To fit a size or a loss, each matrix is damaged in turn
    and a text (-f) is read, which takes minutes. Examples:
      edgellm quantize model-f16.gguf model-q4.gguf Q4_K_M
      edgellm quantize model-f16.gguf Q5_K_M --imatrix imatrix.gguf --dry-run
      edgellm quantize model-f16.gguf small.gguf --target-size 900M -f text.txt
    """
    from edgellm.quant import recipes
    from edgellm.quant.writer import refuse_existing

    if show_list:
        write("".join(f"{name}\n" for name in (*recipes.MIXES, *recipes.ALIASES)))
        return
    is_fitted = target_size is not None or max_kld is not None
    source, out, mix, n_threads = _positional(arguments, is_fitted)
    wishes = recipes.Wishes(
        pure, _type(output_type, "--output-tensor-type"),
        _type(embedding_type, "--token-embedding-type"), leave_output,
        tuple(_pattern(text) for text in tensor_type or []),
    )  # fmt: skip
    path = str(_model.locate(source))
    name = "fitted" if is_fitted else mix
    out = out or os.path.join(os.path.dirname(path), f"ggml-model-{name}.gguf")
    refuse_existing(out, force or dry_run or keep_split)

    from edgellm.quant import imatrix as importance
    from edgellm.quant.gguf import GGUF
    from edgellm.quantize import plan, planned, quantize, size_of

    matrix = importance.read(imatrix) if imatrix else None
    extra = importance.metadata(imatrix, matrix) if imatrix and matrix else {}
    with GGUF(path) as gguf:
        choices = plan(gguf, mix, wishes, imatrix=matrix, allow_requantize=allow_requantize)
        file_type = recipes.MIXES[mix].file_type
        if is_fitted:
            if wishes != recipes.NONE:
                told = "a file is fitted with types of its own choice; leave out flags for types"
                raise typer.BadParameter(told, param_hint="'--target-size' / '--max-kld'")
            text = file, ctx_size, chunks
            fit = fitted(path, target_size, max_kld, text, matrix, extra, n_threads)
            file_type = fit.file_type
            choices = planned(gguf, fit.types, imatrix=matrix, allow_requantize=True)
        if dry_run:
            write(as_text(choices))
            return
        if not is_fitted:
            for line in _notes(choices, mix):
                say(visible(line))
        with Bar("quantizing") as bar:
            names = quantize(
                gguf, out, choices, file_type, extra=extra, n_threads=n_threads,
                keep_split=keep_split, force=force, progress=bar,
            )  # fmt: skip
        say(f"{size(gguf.n_bytes)} became {size(size_of(choices))} of tensors.")
    write("".join(f"{name}\n" for name in names))


def _positional(words: list[str], is_fitted: bool) -> tuple[str, str | None, str, int | None]:
    """Source, target, mix and threads, in the order of llama.cpp's quantize; a fitted file has no
    mix, and is called after the smallest."""
    from edgellm.quant.recipes import MIXES, mix_of

    n_threads = None
    if len(words) > 1 and words[-1].isdecimal():
        n_threads, words = int(words[-1]), words[:-1]
        if not n_threads:
            raise typer.BadParameter("threads must be at least 1", param_hint="'THREADS'")
    if is_fitted:
        words = [*words, "Q2_K"]
    if not 2 <= len(words) <= 3:
        end = "; no TYPE goes with it" if is_fitted else ", and a TYPE such as Q4_K_M"
        told = f"IN.gguf is needed, perhaps OUT.gguf{end}"
        raise typer.BadParameter(told, param_hint="'IN.gguf'")
    mix = mix_of(words[-1])
    if mix is None:
        told = f"{words[-1]!r} is no type; there are {', '.join(MIXES)}"
        raise typer.BadParameter(told, param_hint="'TYPE'")
    return words[0], words[1] if len(words) == 3 else None, mix, n_threads


def _type(name: str | None, flag: str) -> "QuantType | None":
    from edgellm.quant import UnsupportedType, by_name
    from edgellm.quant.recipes import MIXES

    if name is None:
        return None
    try:
        kind = by_name(name)
    except UnsupportedType:
        kind = None
    known = dict.fromkeys(mix.base for mix in MIXES.values())
    if kind is None or kind.name not in known:
        raise EdgeLLMError(f"{flag}: {name!r} is no type; there are {', '.join(known).upper()}.")
    return kind


def _pattern(text: str) -> "tuple[re.Pattern[str], QuantType]":
    pattern, equals, name = text.rpartition("=")
    if not equals or not pattern:
        raise EdgeLLMError(f"--tensor-type takes PATTERN=TYPE, not {text!r}.")
    kind = _type(name, "--tensor-type")
    assert kind is not None  # there is a name
    try:
        return re.compile(pattern), kind
    except re.error as error:
        raise EdgeLLMError(f"--tensor-type {pattern}: no regular expression: {error}.") from None


def _notes(choices: "list[Choice]", mix: str) -> list[str]:
    """What is otherwise than asked."""
    from edgellm.quant import by_name
    from edgellm.quant.recipes import MIXES

    base = by_name(MIXES[mix].base)
    smaller = [c for c in choices if not c.is_copied and c.tensor.shape[0] % base.block]
    if not smaller or base.block == 1:
        return []
    row = smaller[0].tensor.shape[0]
    return [
        f"{len(smaller)} matrices have rows of no whole number of blocks ({row} elements, blocks "
        f"of {base.block}) and get {smaller[0].type} or the like."
    ]


def as_text(choices: "list[Choice]") -> str:
    """A line for each tensor, and the sum."""
    rows = [
        [
            visible(c.tensor.name), " x ".join(map(str, c.tensor.shape)), str(c.tensor.type),
            "copied" if c.is_copied else str(c.type),
            f"{c.tensor.n_bytes / 1e6:.2f}", f"{c.new.n_bytes / 1e6:.2f}",
        ]
        for c in choices
    ]  # fmt: skip
    before, after = sum(c.tensor.n_bytes for c in choices), sum(c.new.n_bytes for c in choices)
    elements = sum(c.tensor.n_bytes // c.tensor.type.bytes * c.tensor.type.block for c in choices)
    head = ["tensor", "shape", "is", "becomes", "MB", "MB then"]
    return (
        table(head, rows) + f"\n{size(before)} become {size(after)}, "
        f"{8 * after / elements:.2f} bits per weight.\n"
    )
