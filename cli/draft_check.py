"""edgellm draft-check: whether a draft model suits a target."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from edgellm.cli import _model
from edgellm.cli._bench_report import table
from edgellm.cli._options import CpuMask, CtxSize, Threads, cache_type, one_of, threads_or_none
from edgellm.cli._output import Status, say, visible, write

if TYPE_CHECKING:
    from edgellm.speculative.check import DraftCheck

FORMATS = ("md", "json")


def command(
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", autocompletion=_model.complete,
                       help="The model that answers, named as for `edgellm run`."),
    ],
    draft: Annotated[
        str,
        typer.Argument(metavar="DRAFT", autocompletion=_model.complete,
                       help="The model that is to guess for it."),
    ],
    file: Annotated[
        str | None,
        typer.Option("-f", "--file", help="Prompts such as are asked, one a line; -: stdin."),
    ] = None,
    n_predict: Annotated[
        int, typer.Option("-n", "--predict", "--n-predict", min=8, help="Tokens of each answer.")
    ] = 96,
    temperature: Annotated[float, typer.Option("--temp", min=0.0, help="0: greedy.")] = 0.0,
    draft_cores: Annotated[
        str | None,
        typer.Option("--draft-cores", metavar="HEX", show_default=False,
                     help="CPUs that the draft model has for itself."),
    ] = None,
    draft_type: Annotated[
        str, typer.Option("-ctkd", "--cache-type-draft", callback=cache_type,
                          help="What its keys and values are kept in.")
    ] = "f16",
    ctx_size: CtxSize = 0,
    threads: Threads = -1,
    cpu_mask: CpuMask = None,
    output: Annotated[
        str, typer.Option("-o", "--output", callback=one_of(FORMATS), help="md or json.")
    ] = "md",
) -> None:  # fmt: skip
    """Compare the vocabularies of two models, measure how often the one guesses what the other
    says, and what that brings; advise.

    \b
    Examples:
      edgellm draft-check qwen2.5-coder-1.5b qwen2.5-coder-0.5b -f prompts.txt
    """
    from edgellm.cli.run import read_text

    if file is None:
        raise typer.BadParameter("prompts are needed: use -f FILE", param_hint="'-f' / '--file'")
    text, origin = read_text(file)
    prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise typer.BadParameter(f"{origin} has no prompt", param_hint="'-f' / '--file'")
    paths = _model.locate(target), _model.locate(draft)

    from edgellm.cli._prompt_tokens import prompt_tokens
    from edgellm.llm import LLM
    from edgellm.sampling_params import SamplingParams
    from edgellm.speculative.check import draft_check
    from edgellm.speculative.options import SpeculationOptions

    options = SpeculationOptions(
        "draft", model=str(paths[1]), cores=draft_cores, type_k=draft_type, type_v=draft_type
    )
    params = SamplingParams(max_tokens=n_predict, temperature=temperature, seed=1)
    status = Status()
    try:
        with LLM(
            paths[0], n_ctx=ctx_size or None, n_threads=threads_or_none(threads), max_num_seqs=1,
            cpu_mask=cpu_mask, speculation=options, progress=status,
        ) as llm:  # fmt: skip
            status.clear()
            for notice in llm.notices:
                say(visible(notice))
            n_vocab = llm.n_vocab
            tokens = [prompt_tokens(llm, p, None, False, None, {}) for p in prompts]
            found = draft_check(llm, tokens, params, status)
    finally:
        status.clear()
    if output == "json":
        write(json.dumps(found.as_dict(), indent=1) + "\n")
    else:
        write(as_text(found, n_vocab))


def as_text(found: "DraftCheck", n_vocab: int) -> str:
    head = ["guess", "right if those before were", "all up to it right", "step with it"]
    lines, chance = [], 1.0
    for i, rate in enumerate(found.rates):
        chance *= rate
        seconds = found.check_seconds[i]
        lines.append([
            str(i + 1), f"{100 * rate:.0f} %", f"{100 * chance:.0f} %",
            f"{1e3 * seconds:.1f} ms, {seconds / found.step_seconds:.2f} x",
        ])  # fmt: skip
    how = "on its own cores" if found.is_apart else "on the target's cores"
    return (
        f"Vocabularies match ({n_vocab:,} tokens).\n{table(head, lines)}"
        f"Of {found.n_tokens:,} tokens of {found.n_prompts} answers; where the first guess was "
        f"wrong, the second choice was right in {100 * found.second_rate:.0f} %.\n"
        f"A step of the target takes {1e3 * found.step_seconds:.1f} ms, one of the draft model "
        f"{1e3 * found.draft_seconds:.1f} ms, {how}.\n"
        f"Expected: {found.expected_gain:.2f} x with {found.n_guesses} guesses each time; measured "
        f"with the controller: {found.measured_gain:.2f} x of {found.speed:.1f} tokens/s.\n"
        f"{found.advice}\n"
    )
