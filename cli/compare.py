"""edgellm compare: what a smaller version of a model loses."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgellm.cli import _model
from edgellm.cli._bench_report import table
from edgellm.cli._options import Chunks, ChunkSize, CpuMask, TextFile, Threads, threads_or_none
from edgellm.cli._output import Status, size, visible, write

if TYPE_CHECKING:
    from edgellm.evaluation.compare import Comparison
    from edgellm.evaluation.divergence import Divergence

_TEMPLATE = 256  # tokens, at most, that a chat template puts around a message
_TASK = 300  # bytes of a task, which are no fewer than its tokens


def command(
    first: Annotated[
        str,
        typer.Argument(metavar="A", autocompletion=_model.complete,
                       help="The model to compare with, usually the larger one."),
    ],
    second: Annotated[
        str, typer.Argument(metavar="B", autocompletion=_model.complete, help="The other.")
    ],
    file: TextFile = None,
    ctx_size: ChunkSize = 512,
    chunks: Chunks = -1,
    prompts: Annotated[
        str | None,
        typer.Option("--prompts", metavar="FILE", show_default=False,
                     help="Prompts to answer, one a line; else some of a hundred that come along."),
    ] = None,
    n_prompts: Annotated[
        int, typer.Option("--n-prompts", min=0, help="How many of those that come along.")
    ] = 20,
    n_tasks: Annotated[
        int, typer.Option("--n-tasks", min=0, help="Tasks of each kind: sums, code, JSON.")
    ] = 20,
    n_predict: Annotated[
        int, typer.Option("-n", "--predict", "--n-predict", min=1, help="Tokens of each answer.")
    ] = 96,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", metavar="FILE.png", show_default=False,
                     help="Draw the divergence over the position."),
    ] = None,
    show_texts: Annotated[
        bool, typer.Option("--texts", help="Show where answers part, side by side.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    threads: Threads = -1,
    cpu_mask: CpuMask = None,
) -> None:  # fmt: skip
    """Compare two models with one vocabulary: predictions over a text, answers to prompts, tasks
    with known answers, speed and memory.

    \b
    Both read the text together, and nothing is stored. Example:
      edgellm compare model-f16.gguf model-q4.gguf -f wiki.test.raw
    """
    from edgellm.cli.run import read_text, text_of

    text = None if file is None else text_of(file)
    asked = None
    if prompts is not None:
        asked = [line for line in read_text(prompts)[0].splitlines() if line.strip()]
        if not asked:
            raise typer.BadParameter(f"{prompts} has no prompt", param_hint="'--prompts'")
    if picture is not None:
        from edgellm.pictures import check

        if text is None:
            raise typer.BadParameter("there is no text to draw: use -f", param_hint="'--picture'")
        check(picture)
    paths = _model.locate(first), _model.locate(second)

    from edgellm.evaluation.compare import compare, shipped_prompts
    from edgellm.evaluation.text import cut
    from edgellm.llm import LLM

    if asked is None:
        asked = shipped_prompts()[:: max(1, 100 // max(n_prompts, 1))][:n_prompts]
    longest = max(len(prompt.encode()) for prompt in (*asked, "x" * _TASK))
    status = Status()
    options: dict[str, Any] = dict(
        n_threads=threads_or_none(threads), cpu_mask=cpu_mask, n_gpu_layers=0, progress=status,
        n_ctx=min(max(ctx_size, longest + _TEMPLATE + n_predict), _trained(paths[0])),
    )  # fmt: skip
    try:
        with LLM(paths[0], **options) as a, LLM(paths[1], **options) as b:
            read = None
            if text is not None:
                read = cut(a, text, ctx_size, None if chunks == -1 else chunks)
            found = compare(a, b, read, asked, n_tasks, n_predict, status)
    finally:
        status.clear()
    if picture is not None and found.divergence is not None:
        from edgellm.evaluation.picture import draw

        draw(picture, found.divergence, (paths[0].name, paths[1].name))
    if as_json:
        write(json.dumps(found.as_dict(), ensure_ascii=False, indent=1) + "\n")
    else:
        write(visible(as_text(found, show_texts)))


def _trained(path: Path) -> int:
    """The longest context that the model knows; a prompt beyond it is refused when it is asked."""
    from edgellm.quant.gguf import GGUF

    with GGUF(path) as gguf:
        return gguf.integer(f"{gguf.architecture}.context_length", low=1)


def as_text(found: "Comparison", show_texts: bool = False) -> str:
    """One table, what the text says in lines below it, and the answers if they are wanted."""
    a, b = found.sides
    rows = [
        ["file", size(a.file_bytes), size(b.file_bytes)],
        ["memory", size(a.memory_bytes), size(b.memory_bytes)],
        ["prefill, tokens/s", f"{a.prefill_speed:.1f}", f"{b.prefill_speed:.1f}"],
        ["decode, tokens/s", f"{a.decode_speed:.1f}", f"{b.decode_speed:.1f}"],
    ]
    if found.divergence:
        p, q = found.divergence.perplexities
        rows.append(["perplexity", str(p), str(q)])
    if found.answers:
        rows.append(["said again, of 4 tokens", _percent(a.repetition), _percent(b.repetition)])
    titles = {"arithmetic": "sums right", "code": "code read right", "json": "JSON right"}
    rows += [[titles[kind], _percent(a.rates[kind]), _percent(b.rates[kind])] for kind in a.rates]
    if a.valid_json is not None and b.valid_json is not None:
        rows.append(["JSON that parses", _percent(a.valid_json), _percent(b.valid_json)])
    lines = [table(["", f"A: {Path(a.path).name}", f"B: {Path(b.path).name}"], rows)]
    if found.divergence:
        lines.append(_about_text(found.divergence))
    if found.answers:
        lines.append(_about_answers(found))
    if show_texts:
        lines += [
            f"\n> {answer.prompt}\nsame for {answer.same_tokens} tokens\nA: {answer.texts[0]}\n"
            f"B: {answer.texts[1]}\n"
            for answer in found.answers
            if not answer.is_same
        ]
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _about_text(found: "Divergence") -> str:
    from edgellm.evaluation.picture import as_letters

    facts = found.as_dict()
    percentiles = ", ".join(f"{q} %: {v:.4f}" for q, v in facts["kl_percentiles"].items())
    return (
        f"Over {facts['tokens']:,} tokens B is {found.mean_kl:.5f} +/- {found.kl_error:.5f} nats "
        f"from A (KL; {percentiles}; most {facts['kl_max']:.3f}).\n"
        f"Same most likely token: {100 * found.agreement:.2f} %; perplexity B / A: "
        f"{found.perplexity_ratio.value:.4f} +/- {found.perplexity_ratio.error:.4f}; probability "
        f"of the text's token changed by {100 * found.probability_change:.2f} % (RMS).\n"
        f"{as_letters(found)}\n"
    )


def _about_answers(found: "Comparison") -> str:
    n, same = len(found.answers), sum(answer.is_same for answer in found.answers)
    parted = sorted(answer.same_tokens for answer in found.answers if not answer.is_same)
    told = f"{same} of {n} answers are the same"
    if parted:
        told += f"; the others part after {parted[len(parted) // 2]} tokens (median; --texts)"
    return f"{told}.\n"
