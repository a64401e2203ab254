"""edgellm run: one prompt, one answer."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgellm.cli import _model
from edgellm.cli._batch import Shape, open_batch, run_batch
from edgellm.cli._lora import with_lora
from edgellm.cli._offload import OffloadFlags, with_offload
from edgellm.cli._options import (
    CacheTypeK,
    CacheTypeV,
    ContextPolicy,
    CpuMask,
    CtxSize,
    Model,
    ModelFlag,
    Threads,
    automatic_or_positive,
)
from edgellm.cli._output import say, write
from edgellm.cli._overrides import with_overrides
from edgellm.cli._prompt_options import (
    Reasoning,
    ShowTimings,
    System,
    SystemFile,
    Template,
    TemplateArguments,
    speed,
    system_message,
    template_variables,
)
from edgellm.cli._prompt_tokens import no_system_message, prompt_tokens
from edgellm.cli._sampling import Sampling, with_sampling
from edgellm.cli._speculation import SpeculationFlags, with_speculation
from edgellm.errors import EdgeLLMError

if TYPE_CHECKING:
    from edgellm.llm import LLM


def _format(value: str) -> str:
    if value not in ("text", "json"):
        raise typer.BadParameter("must be text or json")
    return value


@with_speculation()
@with_offload
@with_lora
@with_overrides
@with_sampling
def command(
    model_argument: Model = None,
    prompt_argument: Annotated[
        str | None, typer.Argument(metavar="PROMPT", show_default=False, help="The prompt.")
    ] = None,
    model: ModelFlag = None,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", help="The prompt.", show_default=False)
    ] = None,
    file: Annotated[
        str | None,
        typer.Option("-f", "--file", help="Read the prompt from a file; -: stdin."),
    ] = None,
    system: System = None,
    system_file: SystemFile = None,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw",
            envvar="EDGELLM_RAW",
            help="Continue the prompt as it is, without chat template.",
        ),
    ] = False,
    output: Annotated[
        str,
        typer.Option(
            "-o", "--output", envvar="EDGELLM_OUTPUT", callback=_format, help="text or json."
        ),
    ] = "text",
    batch: Annotated[
        str | None,
        typer.Option(
            "--batch",
            metavar="FILE",
            help="Answer every line of a JSONL file, each with prompt or messages, and an id and "
            "sampling parameters if you like; -: stdin.",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Where the answers of --batch go; what is there already is not computed again.",
        ),
    ] = None,
    parallel: Annotated[
        int,
        typer.Option(
            "-np",
            "--parallel",
            envvar="EDGELLM_PARALLEL",
            callback=automatic_or_positive,
            help="Lines of --batch that run together; -1: 8.",
        ),
    ] = -1,
    chat_template: Template = None,
    template_arguments: TemplateArguments = None,
    reasoning: Reasoning = "auto",
    ctx_size: CtxSize = 0,
    context_policy: ContextPolicy = "error",
    cache_type_k: CacheTypeK = "f16",
    cache_type_v: CacheTypeV = "f16",
    threads: Threads = -1,
    cpu_mask: CpuMask = None,
    show_timings: ShowTimings = True,
    *,
    sampling: Sampling,
    overrides: dict[str, Any],
    adapters: dict[str, Any],
    offload: OffloadFlags,
    speculation: SpeculationFlags,
) -> None:
    """Answer one prompt: the text to stdout, everything else to stderr.

    \b
    Examples:
      edgellm run -p "Name three colours."
      edgellm run model.gguf -f question.txt --temp 0
      git diff | edgellm run model.gguf -sys "Summarise this change in one line."
      edgellm run model.gguf -p "2+2=" --raw -n 8 --output json
      edgellm run model.gguf -p "Sure?" -j '{"enum": ["yes", "no"]}'
      edgellm run model.gguf --batch in.jsonl --out out.jsonl
    """
    if model is not None and model_argument is not None and prompt_argument is None:
        model_argument, prompt_argument = None, model_argument  # run -m MODEL PROMPT
    name = _model.pick(model_argument, model)
    system, cache_types = system_message(system, system_file), (cache_type_k, cache_type_v)
    if raw and system is not None:
        raise no_system_message("--raw is given")
    if batch is not None or out is not None:
        texts = (prompt_argument, prompt, file)
        source = open_batch(batch, out, any(text is not None for text in texts))
        shape = Shape(system, raw, chat_template, template_arguments, reasoning)
        run_batch(
            _model.locate(name), source, str(out), sampling.params(), shape,
            (ctx_size, threads, parallel, context_policy, cpu_mask, cache_types),
            {**overrides, **adapters},
            offload, speculation,
        )  # fmt: skip
        return
    text = _prompt(prompt_argument, prompt, file)
    path = _model.locate(name)

    from edgellm.cli._engine import load, what_was_dropped

    params = sampling.params()
    llm = load(
        path, ctx_size, threads, chat_template, policy=context_policy, cpu_mask=cpu_mask,
        overrides={**overrides, **adapters}, cache_types=cache_types, offload=offload,
        speculation=speculation,
    )  # fmt: skip
    with llm:
        variables = template_variables(template_arguments, reasoning)
        tokens = prompt_tokens(llm, text, system, raw, chat_template, variables)
        if output == "json":
            _print_json(llm, str(path), tokens, params)
        else:
            _print_text(llm, tokens, params, show_timings)
        if dropped := what_was_dropped(llm):
            say(dropped)
        if llm.context_full:
            raise EdgeLLMError(
                f"The context of {llm.n_ctx:,} tokens is full, so the answer ends here; ask for a "
                "larger one (-c), or go on with --context-policy ring."
            )


def _prompt(argument: str | None, flag: str | None, file: str | None) -> str:
    """The prompt from the one place where it is given; stdin when it is nowhere else."""
    given = [text for text in (argument, flag, file) if text is not None]
    if len(given) > 1:
        raise typer.BadParameter(
            "the prompt is given twice", param_hint="PROMPT, '-p' / '--prompt', '-f' / '--file'"
        )
    if file is None and given:
        text, origin = given[0], "the prompt"
    elif file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise typer.BadParameter(
            "none is given: use -p TEXT or -f FILE, or pipe the text in", param_hint="PROMPT"
        )
    else:
        text, origin = read_text(file)
    if not text:
        raise typer.BadParameter(f"{origin} is empty", param_hint="PROMPT")
    return text


def text_of(file: str | None) -> str:
    """The text that a command works on; a usage error without one."""
    if file is None:
        raise typer.BadParameter("a text is needed: use -f FILE", param_hint="'-f' / '--file'")
    return read_text(file)[0]


def read_text(file: str | None) -> tuple[str, str]:
    """(text without the newline that ends it, where it came from)"""
    origin = "stdin" if file in (None, "-") else str(file)
    hint = "'-f' / '--file'"
    try:
        if origin == "stdin":
            data = sys.stdin.buffer.read()
        else:
            with open(origin, "rb") as source:
                data = source.read()
        text = data.decode("utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{origin}: {error.strerror or error}", param_hint=hint) from None
    except UnicodeDecodeError as error:
        raise typer.BadParameter(
            f"{origin} is not UTF-8 text (byte {error.start})", param_hint=hint
        ) from None
    return text.removesuffix("\n").removesuffix("\r"), origin


def _print_text(llm: "LLM", tokens: list[int], params: Any, show_timings: bool) -> None:
    stream = llm.stream(tokens, params)  # what cannot be answered is refused here
    try:
        for piece in stream:
            if piece.text:
                write(piece.text)
    finally:
        write("\n")
    if show_timings:
        say(speed(llm.timings))


def _print_json(llm: "LLM", path: str, tokens: list[int], params: Any) -> None:
    import json
    from dataclasses import replace

    params = replace(params, seed=params.resolved_seed())  # so that the answer can be had again
    pieces = list(llm.stream(tokens, params))
    answer = {
        "model": path,
        "text": "".join(piece.text for piece in pieces),
        "tokens": list(_generated(pieces)),
        "finish_reason": pieces[-1].finish_reason if pieces else None,
        "seed": params.seed,
        "prompt_tokens": len(tokens),
        "timings": llm.timings,
    }
    write(json.dumps(answer, ensure_ascii=False) + "\n")


def _generated(pieces: list[Any]) -> Iterator[int]:
    """Token ids; a last piece that only carries text held back has none."""
    return (int(piece.token) for piece in pieces if piece.token is not None)
