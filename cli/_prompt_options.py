"""Flags that all commands which talk to a model share, and the template they choose."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    pass


def _object(value: str | None) -> str | None:
    if value is not None:
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise typer.BadParameter("must be a JSON object, as '{\"enable_thinking\": false}'")
    return value


def _switch(value: str) -> str:
    if value not in ("auto", "on", "off"):
        raise typer.BadParameter("must be auto, on or off")
    return value


System = Annotated[
    str | None,
    typer.Option("-sys", "--system", envvar="EDGELLM_SYSTEM", help="System message."),
]
SystemFile = Annotated[
    str | None,
    typer.Option(
        "-sysf", "--system-prompt-file", envvar="EDGELLM_SYSTEM_PROMPT_FILE",
        help="Read the system message from a file.",
    ),
]  # fmt: skip
Template = Annotated[
    str | None,
    typer.Option(
        "--chat-template",
        "--chat-template-file",
        envvar="EDGELLM_CHAT_TEMPLATE",
        metavar="NAME|FILE",
        help="Another chat template: one of the model's by name, chatml, gemma, llama2, llama3, "
        "mistral, phi3, plain, vicuna, zephyr, or a file.",
    ),
]
TemplateArguments = Annotated[
    str | None,
    typer.Option(
        "--chat-template-kwargs",
        envvar="EDGELLM_CHAT_TEMPLATE_KWARGS",
        metavar="JSON",
        callback=_object,
        help="Variables for the chat template.",
    ),
]
Reasoning = Annotated[
    str,
    typer.Option(
        "-rea",
        "--reasoning",
        envvar="EDGELLM_REASONING",
        callback=_switch,
        help="Thinking before the answer, where the model can: on, off, or auto (its own choice).",
    ),
]
ShowTimings = Annotated[
    bool,
    typer.Option(
        "--show-timings/--no-show-timings",
        envvar="EDGELLM_SHOW_TIMINGS",
        help="Speed, on stderr, in text output.",
    ),
]


def system_message(text: str | None, file: str | None) -> str | None:
    """The system message from the one place where it is given."""
    if file is None:
        return text
    hint = "'-sysf' / '--system-prompt-file'"
    if text is not None:
        raise typer.BadParameter("the system message is given twice", param_hint=hint)
    try:
        with open(file, encoding="utf-8") as source:
            return source.read().rstrip("\n")
    except OSError as error:
        raise typer.BadParameter(f"{file}: {error.strerror or error}", param_hint=hint) from None
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{file} is not UTF-8 text", param_hint=hint) from None


def template_variables(arguments: str | None, reasoning: str) -> dict[str, Any]:
    """What the template may ask for."""
    variables: dict[str, Any] = (
        {} if reasoning == "auto" else {"enable_thinking": reasoning == "on"}
    )
    return variables | (json.loads(arguments) if arguments else {})


def prestart_helper(path: Any, asked: str | None) -> None:
    """Start the process that renders unknown chat templates while the model loads, if this model
    will need it."""
    import os

    from edgellm.template_helper import HELPER
    from edgellm.template_source import built_in, is_known

    if asked is None:
        source = _peek(path)
        wanted = source is not None and not is_known(source)
    else:
        wanted = asked not in built_in() and os.path.isfile(asked)
    if wanted:
        HELPER.start()


def _peek(path: Any) -> str | None:
    """The template of a GGUF file by searching its first bytes: a guess, but a quick one."""
    import mmap

    key = b"tokenizer.chat_template\x08\x00\x00\x00"  # followed by the length of a string
    try:
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view,
        ):
            place = view.find(key, 0, 32 << 20)
            if place < 0:
                return None
            start = place + len(key) + 8
            size = int.from_bytes(view[place + len(key) : start], "little")
            return view[start : start + min(size, 1 << 20)].decode("utf-8", "replace")
    except (OSError, ValueError):
        return None


def speed(timings: Mapping[str, Any]) -> str:
    """The speed line."""
    prompt = f"prompt {timings['prompt_n']} tokens, {timings['prompt_per_second']:.1f} tokens/s"
    answer = (
        f"answer {timings['predicted_n']} tokens, {timings['predicted_per_second']:.1f} tokens/s"
    )
    return f"{prompt}; {answer}{drafts(timings)}"


def drafts(timings: Mapping[str, Any]) -> str:
    """What speculation came to, if it guessed anything; else nothing."""
    n, n_right = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
    return f", {n_right} of {n} drafted tokens right" if n else ""
