"""edgellm plan: what a model would take of this machine, and how fast it would be."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgellm.cli import _model
from edgellm.cli._bench_report import table
from edgellm.cli._lists import numbers
from edgellm.cli._offload import layers_of
from edgellm.cli._options import Model, ModelFlag, one_of
from edgellm.cli._output import Status, say, size, visible, write

if TYPE_CHECKING:
    from edgellm.plan import Line, Planner


def _list(text: str | None) -> str | None:
    if text is not None:
        numbers(text)
    return text


def _layers(text: str | None) -> str | None:
    if text is not None:
        _each_layer(text)
    return text


def _each_layer(text: str) -> list[int | None]:
    found: list[int | None] = []
    for part in text.split(","):
        found += numbers(part) if part[:1].isdecimal() else [layers_of(part.strip())]
    return found


def command(
    model_argument: Model = None,
    model: ModelFlag = None,
    contexts: Annotated[
        str | None,
        typer.Option("-c", "--ctx-size", callback=_list, show_default=False,
                     help="Contexts in tokens (0: the model's); else some up to the model's."),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option("-ngl", "--ngl", callback=_layers, show_default=False,
                     help="Layers on the GPU: numbers, auto, all; else 0, half, auto and all."),
    ] = None,
    users: Annotated[
        int, typer.Option("--users", min=1, help="Who talk at once, each with a whole context.")
    ] = 1,
    n_prompt: Annotated[
        int, typer.Option("-p", "--n-prompt", min=1, help="Tokens before the first of an answer.")
    ] = 512,
    fit_margin: Annotated[
        int | None,
        typer.Option("--fit-margin", metavar="MIB", min=0, show_default=False,
                     help="MiB of each GPU that stay free."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Load the best line's model and compare.")
    ] = False,
    output: Annotated[
        str, typer.Option("-o", "--output", callback=one_of(("md", "json")), help="md or json.")
    ] = "md",
) -> None:  # fmt: skip
    """Foretell memory and speed for numbers of GPU layers, contexts and cache types, from the
    file's sizes and this machine's measured bandwidths; mark the best.

    \b
    Examples:
      edgellm plan model.gguf
      edgellm plan model.gguf -c 8192 --users 4
      edgellm plan model.gguf --check
    """
    path = _model.locate(_model.pick(model_argument, model))

    from edgellm.plan import Planner

    status = Status()
    status("measuring this machine")
    planner = Planner(path, users, n_prompt, None if fit_margin is None else fit_margin << 20)
    try:
        status.clear()
        lines = planner.lines(
            _each_layer(layers) if layers is not None else None,
            [n or planner.config.n_ctx for n in numbers(contexts)] if contexts else (),
        )
        best = planner.best(lines)
        rows = []
        if check and best is not None:
            status("measuring the best line")
            rows = planner.check(best)
            status.clear()
    finally:
        status.clear()
        planner.close()
    if output == "json":
        found = {
            "speeds": planner.speeds.as_dict(), "users": users, "n_prompt": n_prompt,
            "lines": [line.as_dict() for line in lines],
            "best": None if best is None else lines.index(best), "check": rows,
        }  # fmt: skip
        write(json.dumps(found, indent=1) + "\n")
        return
    write(visible(as_text(planner, lines, best, rows)))
    if best is None:
        say("Nothing of this fits into memory: ask for a shorter context (-c) or take a smaller "
            "model.")  # fmt: skip


def as_text(
    planner: "Planner", lines: "list[Line]", best: "Line | None", rows: list[dict[str, Any]]
) -> str:
    head = ["", "ngl", "context", "cache", "CPU", "GPU", "fits", "t/s at most", "first token"]
    if planner.users > 1:
        head.insert(-1, f"t/s of {planner.users}")
    cells = []
    for line in lines:
        cells.append([
            "*" if line is best else "", _layers_of(line), f"{line.n_ctx:,}", line.type_kv,
            size(line.cpu_bytes), size(sum(line.gpu_bytes.values())) if line.gpu_bytes else "",
            "yes" if line.fits else "no", f"{line.tokens_per_second:.1f}",
            *([f"{line.all_tokens_per_second:.1f}"] if planner.users > 1 else []),
            f"{line.first_token_seconds:.2f} s",
        ])  # fmt: skip
    said = [table(head, cells)]
    said.append(
        f"Speeds are floors of memory and arithmetic, at half of the context and behind a prompt "
        f"of {planner.n_prompt} tokens; kernels reach 0.3 to 1 of them.\n"
    )
    for place, speed in planner.speeds.of.items():
        copies = f", copies to it {speed.copy / 1e9:.1f} GB/s" if place != "cpu" else ""
        said.append(
            f"{place}: reads {speed.read / 1e9:.1f} GB/s, multiplies {speed.dots / 1e9:.3g} G/s"
            f"{copies}\n"
        )
    for note in dict.fromkeys([planner.reason, *(note for line in lines for note in line.notes)]):
        if note:
            said.append(note + "\n")
    if best is not None:
        parts = ", ".join(f"{name} {size(n)}" for name, n in best.bill.items() if n)
        said.append(f"Best (*): {parts}.\n")
    if rows:
        head = ["measured", "planned", "there is", "ratio"]
        said.append(table(head, [
            [row["what"], _number(row["planned"]), _number(row["measured"]),
             f"{row['ratio']:.2f}" if row["ratio"] else ""]
            for row in rows
        ]))  # fmt: skip
    return "".join(said)


def _layers_of(line: "Line") -> str:
    streamed = f" ({line.n_streamed} streamed)" if line.n_streamed else ""
    return f"{line.n_gpu_layers}{streamed}"


def _number(x: float) -> str:
    return size(int(x)) if x > 1e5 else f"{x:.3g}"
