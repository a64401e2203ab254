"""edgellm bench: how fast a model is, and how far from what the machine allows."""

from typing import Annotated, Any

import typer

from edgellm.cli import _bench_report, _model
from edgellm.cli._lists import numbers
from edgellm.cli._lora import with_lora
from edgellm.cli._offload import OffloadFlags, with_offload
from edgellm.cli._options import (
    CacheTypeK,
    CacheTypeV,
    CpuMask,
    Model,
    ModelFlag,
    Threads,
    one_of,
    threads_or_none,
)
from edgellm.cli._output import Status, say, write

FORMATS = {"md": _bench_report.as_markdown, "json": _bench_report.as_json,
           "csv": _bench_report.as_csv}  # fmt: skip
SLOWER = 1  # exit code of --compare


def _widths(text: str) -> str:
    if 0 in (found := numbers(text)) and len(found) > 1:
        raise typer.BadParameter("no step has 0 sequences")
    return text


def _list(text: str) -> str:
    numbers(text)
    return text


@with_offload
@with_lora
def command(
    model_argument: Model = None,
    model: ModelFlag = None,
    n_prompt: Annotated[
        str,
        typer.Option("-p", "--n-prompt", callback=_list, help="Sizes of prompts; 0: none."),
    ] = "512",
    n_gen: Annotated[
        str,
        typer.Option(
            "-n", "--n-gen", callback=_list, help="Numbers of tokens computed one by one; 0: none."
        ),
    ] = "128",
    depth: Annotated[
        str,
        typer.Option(
            "-d", "--n-depth", callback=_list, help="Tokens that are in the cache already."
        ),
    ] = "0",
    batch: Annotated[
        str,
        typer.Option(
            "--batch",
            callback=_widths,
            help="Numbers of sequences that are decoded together, a step each; 0: none.",
        ),
    ] = "1-16",
    repetitions: Annotated[
        int, typer.Option("-r", "--repetitions", min=1, help="Of each test, in turns.")
    ] = 5,
    cache_type_k: CacheTypeK = "f16",
    cache_type_v: CacheTypeV = "f16",
    block_size: Annotated[
        int, typer.Option("--block-size", help="Tokens of keys and values that lie together.")
    ] = 32,
    threads: Threads = -1,
    cpu_mask: CpuMask = None,
    output: Annotated[
        str, typer.Option("-o", "--output", callback=one_of(FORMATS), help="md, json or csv.")
    ] = "md",
    save: Annotated[
        str | None, typer.Option("--save", metavar="FILE", help="Keep the report for --compare.")
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            "--compare",
            metavar="FILE",
            help="Compare with a report kept before: slower, same or faster; exit code 1 when a "
            "test is slower.",
        ),
    ] = None,
    *,
    offload: OffloadFlags,
    adapters: dict[str, Any],
) -> None:
    """Measure prefill (pp), decode (tg) and several sequences together, against the limits of
    memory and dot products measured in the same run.

    \b
    Lists are 512,1024 or 1-16 or 0-4096+1024 or 1-64*2. Examples:
      edgellm bench model.gguf
      edgellm bench model.gguf -p 256 -n 64 -d 0,4096 --batch 1,4,8
      edgellm bench model.gguf --save benchmarks/baseline.json
      edgellm bench model.gguf --compare benchmarks/baseline.json
    """
    path = _model.locate(_model.pick(model_argument, model))

    from edgellm import baseline
    from edgellm.bench import bench, workloads

    old = baseline.load(compare) if compare is not None else None
    if save is not None:
        baseline.check_place(save)
    widths = [n for n in numbers(batch) if n]
    tests = workloads(numbers(n_prompt), numbers(n_gen), numbers(depth), widths)
    status = Status()
    try:
        rows = bench(
            str(path), tests, repetitions, threads_or_none(threads), cpu_mask, status.on_terminal,
            cache_type_k, cache_type_v, block_size, offload.options, **adapters,
        )  # fmt: skip
    finally:
        status.clear()
    write(FORMATS[output](rows))
    if save is not None:
        baseline.save(save, rows)
    if old is not None:
        changes, notes = baseline.compare(rows, old)
        say(_bench_report.changes_table(changes).rstrip("\n"))
        for note in notes:
            say(note)
        if any(change.ratio.verdict == "slower" for change in changes):
            raise typer.Exit(SLOWER)
