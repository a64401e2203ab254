"""edgellm run: one prompt, one answer."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgellm.cli import _model
from edgellm.cli._options import CtxSize, GpuLayers, Model, ModelFlag, Threads, threads_or_none
from edgellm.cli._output import Status, say, write

if TYPE_CHECKING:
    from edgellm.llm import LLM


def _limit(value: int) -> int:
    if value == 0 or value < -1:
        raise typer.BadParameter("must be at least 1, or -1 for no limit")
    return value


def _format(value: str) -> str:
    if value not in ("text", "json"):
        raise typer.BadParameter("must be text or json")
    return value


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
    system: Annotated[
        str | None,
        typer.Option("-sys", "--system", envvar="EDGELLM_SYSTEM", help="System message."),
    ] = None,
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
    predict: Annotated[
        int,
        typer.Option(
            "-n",
            "--predict",
            "--n-predict",
            envvar="EDGELLM_N_PREDICT",
            callback=_limit,
            help="Most tokens to generate; -1: until the model stops or the context is full.",
        ),
    ] = -1,
    ctx_size: CtxSize = 0,
    threads: Threads = -1,
    seed: Annotated[
        int,
        typer.Option("-s", "--seed", envvar="EDGELLM_SEED", min=-1, help="-1: random."),
    ] = -1,
    temp: Annotated[
        float,
        typer.Option(
            "--temp", "--temperature", envvar="EDGELLM_TEMP", min=0, help="0: most likely token."
        ),
    ] = 0.8,
    top_k: Annotated[
        int, typer.Option("--top-k", envvar="EDGELLM_TOP_K", min=0, help="0: off.")
    ] = 40,
    top_p: Annotated[
        float, typer.Option("--top-p", envvar="EDGELLM_TOP_P", min=0, max=1, help="1: off.")
    ] = 0.95,
    min_p: Annotated[
        float, typer.Option("--min-p", envvar="EDGELLM_MIN_P", min=0, max=1, help="0: off.")
    ] = 0.05,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", help="Stop before this text; may be given several times."),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", envvar="EDGELLM_IGNORE_EOS", help="Go on when the model wants to stop."
        ),
    ] = False,
    gpu_layers: GpuLayers = "auto",
    show_timings: Annotated[
        bool,
        typer.Option(
            "--show-timings/--no-show-timings",
            envvar="EDGELLM_SHOW_TIMINGS",
            help="Speed, on stderr, in text output.",
        ),
    ] = True,
) -> None:
    """Answer one prompt: the text to stdout, everything else to stderr."""
    if model is not None and model_argument is not None and prompt_argument is None:
        model_argument, prompt_argument = None, model_argument  # run -m MODEL PROMPT
    name = _model.pick(model_argument, model)
    if raw and system is not None:
        raise _no_system_message("--raw is given")
    text = _prompt(prompt_argument, prompt, file)
    path = _model.locate(name)

    from edgellm.llm import LLM
    from edgellm.sampling import SamplingParams

    params = SamplingParams(
        max_tokens=None if predict == -1 else predict,
        temperature=temp,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    status = Status()
    n_threads = threads_or_none(threads)
    try:
        llm = LLM(
            path, n_ctx=ctx_size or None, n_threads=n_threads, max_num_seqs=1, progress=status
        )
    finally:
        status.clear()
    with llm:
        tokens = _tokens(llm, text, system, raw)
        if output == "json":
            _print_json(llm, str(path), tokens, params)
        else:
            _print_text(llm, tokens, params, show_timings)


def _no_system_message(why: str) -> typer.BadParameter:
    return typer.BadParameter(
        f"{why}, so there is no system message; put it into the prompt",
        param_hint="'-sys' / '--system'",
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
        text, origin = _read(file)
    if not text:
        raise typer.BadParameter(f"{origin} is empty", param_hint="PROMPT")
    return text


def _read(file: str | None) -> tuple[str, str]:
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


def _tokens(llm: "LLM", text: str, system: str | None, raw: bool) -> list[int]:
    """The prompt as the model expects it."""
    if raw or llm.chat_template is None:
        if system is not None:
            raise _no_system_message("the model has no chat template")
        if not raw:
            say("The model has no chat template: it continues the prompt as it is.")
        return llm.tokenize(text, add_special=True)

    from edgellm.chat import render, special_texts

    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    rendered = render(llm.chat_template, messages, *special_texts(llm.tokenizer))
    # The template has written the special tokens, the first one included.
    return llm.tokenize(rendered, add_special=False, parse_special=True)


def _print_text(llm: "LLM", tokens: list[int], params: Any, show_timings: bool) -> None:
    try:
        for piece in llm.stream(tokens, params):
            if piece.text:
                write(piece.text)
    finally:
        write("\n")
    if show_timings:
        say(_speed(llm.timings))


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


def _speed(timings: dict[str, Any]) -> str:
    prompt = f"prompt {timings['prompt_n']} tokens, {timings['prompt_per_second']:.1f} tokens/s"
    answer = (
        f"answer {timings['predicted_n']} tokens, {timings['predicted_per_second']:.1f} tokens/s"
    )
    return f"{prompt}; {answer}"
