"""edgellm chat: a conversation on the terminal, or one answer to what is piped in."""

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgellm.api_keys import sent_key
from edgellm.cli import _model
from edgellm.cli._chat_model import Files, Served, Source
from edgellm.cli._lora import say_unused_adapters, with_lora
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
)
from edgellm.cli._output import say
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
from edgellm.cli._sampling import Sampling, with_sampling
from edgellm.cli._speculation import SpeculationFlags, with_speculation

if TYPE_CHECKING:
    from edgellm.cli._chat import Chat, Settings, Terminal
    from edgellm.llm import LLM

NOTHING_PIPED = (
    "Nothing was piped in, so the model is greeted, to show that it works. On a terminal, "
    "`edgellm chat` opens a conversation; `echo 'Why is the sky blue?' | edgellm chat` answers "
    "one question."
)


def _color(value: str) -> str:
    if value not in ("auto", "on", "off"):
        raise typer.BadParameter("must be auto, on or off")
    return value


@with_speculation("auto")
@with_offload
@with_lora
@with_overrides
@with_sampling
def command(
    model_argument: Model = None,
    model: ModelFlag = None,
    prompt: Annotated[
        str | None,
        typer.Option("-p", "--prompt", help="The first message.", show_default=False),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            metavar="URL",
            help="Talk with a model of an OpenAI-style server instead; -m is its name there.",
            show_default=False,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            help="Of --server: the first line is sent; else OPENAI_API_KEY is.",
            show_default=False,
        ),
    ] = None,
    system: System = None,
    system_file: SystemFile = None,
    session: Annotated[
        str | None,
        typer.Option(
            "--session",
            envvar="EDGELLM_SESSION",
            metavar="NAME",
            help="Keep the conversation under this name, and go on with it if it is there.",
        ),
    ] = None,
    single_turn: Annotated[
        bool, typer.Option("-st", "--single-turn", help="Leave after the first answer.")
    ] = False,
    multiline: Annotated[
        bool,
        typer.Option(
            "-mli",
            "--multiline-input",
            envvar="EDGELLM_MULTILINE_INPUT",
            help="Enter begins a new line, an empty line sends.",
        ),
    ] = False,
    chat_template: Template = None,
    template_arguments: TemplateArguments = None,
    reasoning: Reasoning = "auto",
    hide_thinking: Annotated[
        bool,
        typer.Option(
            "--hide-thinking/--no-hide-thinking",
            "--hidethinking",
            envvar="EDGELLM_HIDE_THINKING",
            help="Fold the model's thinking into one line.",
        ),
    ] = False,
    ctx_size: CtxSize = 0,
    context_policy: ContextPolicy = "error",
    cache_type_k: CacheTypeK = "f16",
    cache_type_v: CacheTypeV = "f16",
    threads: Threads = -1,
    cpu_mask: CpuMask = None,
    show_timings: ShowTimings = True,
    color: Annotated[
        str,
        typer.Option(
            "-co", "--color", envvar="EDGELLM_COLOR", callback=_color, help="auto, on or off."
        ),
    ] = "auto",
    simple_io: Annotated[
        bool,
        typer.Option(
            "--simple-io",
            envvar="EDGELLM_SIMPLE_IO",
            help="Print only: no colours, no cursor movement, no line editing.",
        ),
    ] = False,
    *,
    sampling: Sampling,
    overrides: dict[str, Any],
    adapters: dict[str, Any],
    offload: OffloadFlags,
    speculation: SpeculationFlags,
) -> None:
    """Talk with a model. Piped input is answered once, as `edgellm run` does.

    In the chat, /? lists the commands, Ctrl-C stops an answer and Ctrl-D leaves.

    \b
    Examples:
      edgellm chat
      edgellm chat model.gguf -sys "Answer in one sentence." --temp 0.2
      edgellm chat --session trip
      git diff | edgellm chat -p "Summarise this change."
      edgellm chat --server http://127.0.0.1:8080
    """
    from edgellm.cli._chat import Settings

    name = _model.pick(model_argument, model)
    system = system_message(system, system_file)
    variables = template_variables(template_arguments, reasoning)
    settings = Settings(name, system, variables, session, show_timings, hide_thinking)

    def load(path: Path) -> "LLM":
        from edgellm.cli._engine import load as load_engine

        return load_engine(
            path,
            ctx_size,
            threads,
            chat_template,
            simple_io,
            policy=context_policy,
            cpu_mask=cpu_mask,
            overrides={**overrides, **adapters},
            cache_types=(cache_type_k, cache_type_v),
            offload=offload,
            speculation=speculation,
        )

    if server is not None:
        offload.say_unused("What runs on a GPU is the server's to choose")
        speculation.say_unused("What guesses tokens is the server's to choose")
        say_unused_adapters(adapters, "What adapters a model has is the server's to choose")
        source: Source = Served(server, sent_key(api_key_file))
        settings.model = model_argument or model
    else:
        source = Files(load, chat_template)
    if sys.stdin is None or not sys.stdin.isatty():
        _answer_once(settings, sampling, prompt, source)
        return
    chat = _open(settings, sampling, _terminal(simple_io, multiline, color), source)
    with contextlib.closing(chat):
        chat.run(prompt, once=single_turn)


def _open(settings: "Settings", sampling: Sampling, terminal: "Terminal", source: Source) -> "Chat":
    from edgellm.cli._chat import Chat

    sampling.params()  # bad flags are said before a model is fetched
    return Chat(settings, sampling, terminal, source)


def _answer_once(
    settings: "Settings", sampling: Sampling, prompt: str | None, source: Source
) -> None:
    """The answer to stdin alone goes to stdout."""
    from edgellm.cli._chat import Terminal
    from edgellm.cli._input import SimpleReader
    from edgellm.cli._view import PipeView
    from edgellm.cli.run import read_text

    piped = read_text("-")[0] if sys.stdin is not None else ""
    text = "\n\n".join(part for part in (prompt, piped) if part and part.strip())
    if not text:
        say(NOTHING_PIPED)
        text = "Hello!"
    terminal = Terminal(SimpleReader(False), PipeView, lambda line, style: line)
    chat = _open(settings, sampling, terminal, source)
    with contextlib.closing(chat):
        from edgellm import session

        if settings.session and (state := session.load(settings.session)):
            chat.conversation.restore(state, state.get("model") == chat.model_id())
            if settings.system is not None:
                chat.conversation.system = settings.system
            chat.load_cache(settings.session)
        view = PipeView(settings.hide_thinking)
        try:
            for part in chat.conversation.ask(text, sampling.params()):
                view.show(part)
        finally:
            view.end()
        chat.save()
        chat.save_cache()
        if chat.conversation.last.context_full:
            say("The answer was cut: the context is full (-c makes it larger).")
        if settings.show_timings and (timings := chat.conversation.last.timings):
            say(speed(timings))


def _terminal(simple: bool, multiline: bool, color: str) -> "Terminal":
    """What this terminal can do."""
    from edgellm.cli import _slash
    from edgellm.cli._chat import Terminal, is_plain
    from edgellm.cli._input import RichReader, SimpleReader
    from edgellm.cli._view import PlainView, RichView

    if is_plain(simple):
        return Terminal(SimpleReader(multiline), PlainView, lambda line, style: line)
    from rich.console import Console

    from edgellm.session import SessionError, private_dir

    colored = color == "on" or (color == "auto" and not os.environ.get("NO_COLOR"))
    force = True if color == "on" else None
    try:
        history: str | None = str(private_dir("history") / "chat")
    except SessionError:  # no place for one
        history = None
    reader = RichReader(multiline, history, _slash.complete, colored)

    def view(hide_thinking: bool) -> RichView:
        # made anew for each answer, for the window may have changed its size
        console = Console(no_color=not colored, force_terminal=force, highlight=False)
        return RichView(console, hide_thinking)

    codes = {"dim": "2", "red": "31" if colored else "1"}
    return Terminal(reader, view, lambda line, style: f"\x1b[{codes[style]}m{line}\x1b[0m")
