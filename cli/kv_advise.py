"""edgellm kv-advise: which types of keys and values suit a model and a text."""

import json
from typing import Annotated, Any

import typer

from edgellm.cli import _model
from edgellm.cli._bench_report import table
from edgellm.cli._options import CpuMask, Model, ModelFlag, Threads, threads_or_none
from edgellm.cli._output import Status, visible, write

FORMATS = ("md", "json")


def _format(value: str) -> str:
    if value not in FORMATS:
        raise typer.BadParameter("must be md or json")
    return value


def command(
    model_argument: Model = None,
    model: ModelFlag = None,
    file: Annotated[
        str | None,
        typer.Option("-f", "--file", help="The text, such as the model is used for; -: stdin."),
    ] = None,
    n_tokens: Annotated[
        int, typer.Option("-n", "--n-tokens", min=64, help="Tokens of the text that are used.")
    ] = 1024,
    most_kl: Annotated[
        float,
        typer.Option(
            "--max-kl", min=0.0, help="Mean KL divergence up to which a cache is recommended."
        ),
    ] = 0.01,
    threads: Threads = -1,
    cpu_mask: CpuMask = None,
    output: Annotated[
        str, typer.Option("-o", "--output", callback=_format, help="md or json.")
    ] = "md",
) -> None:
    """Measure what each type of keys and values (-ctk, -ctv) changes on a text of yours, its size
    and its speed; recommend one.

    \b
    Examples:
      edgellm kv-advise model.gguf -f notes.txt
      edgellm kv-advise model.gguf -f main.py -n 4096 -o json
    """
    from edgellm.cli.run import read_text

    if file is None:
        raise typer.BadParameter("a text is needed: use -f FILE", param_hint="'-f' / '--file'")
    text, origin = read_text(file)
    if not text.strip():
        raise typer.BadParameter(f"{origin} is empty", param_hint="'-f' / '--file'")
    path = _model.locate(_model.pick(model_argument, model))

    from edgellm.kv_advise import advise

    status = Status()
    try:
        found = advise(
            str(path), text, n_tokens, most_kl, threads_or_none(threads), cpu_mask, status
        )
    finally:
        status.clear()
    write(json.dumps(found, indent=1) + "\n" if output == "json" else as_text(found))


def as_text(found: dict[str, Any]) -> str:
    head = ["keys", "values", "bytes/token", "mean KL", "99 % KL", "same top token", "decode t/s"]
    lines = [
        [
            row["type_k"], row["type_v"], f"{row['bytes_per_token']:,}", f"{row['kl_mean']:.2g}",
            f"{row['kl_99']:.2g}", f"{100 * row['same_top']:.1f} %",
            f"{row['tokens_per_second']:.1f}",
        ]
        for row in found["rows"]
    ]  # fmt: skip
    best = found["recommended"]
    left_out = f"Not compared: {found['left_out']}\n" if found["left_out"] else ""
    return visible(
        f"{table(head, lines)}KL in nats from keys and values in f32, over the last "
        f"{found['n_compared']:,} of {found['n_tokens']:,} tokens; decode behind all of them.\n"
        "What f16 has is what rounding of activations makes of any change: a floor for all.\n"
        f"{left_out}Recommended: -ctk {best['type_k']} -ctv {best['type_v']}: {found['reason']}.\n"
    )
