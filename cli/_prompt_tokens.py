"""A prompt or messages as the token ids that the model expects."""

from typing import TYPE_CHECKING, Any

import typer

from edgellm.cli._output import say

if TYPE_CHECKING:
    from edgellm.llm import LLM


def no_system_message(why: str) -> typer.BadParameter:
    return typer.BadParameter(
        f"{why}, so there is no system message; put it into the prompt",
        param_hint="'-sys' / '--system'",
    )


def has_template(llm: "LLM", chat_template: str | None) -> bool:
    """Whether the model, or the command, has a chat template."""
    return llm.chat_template is not None or chat_template is not None


def prompt_tokens(
    llm: "LLM",
    text: str,
    system: str | None,
    raw: bool,
    chat_template: str | None,
    variables: dict[str, Any],
) -> list[int]:
    """The prompt as the model expects it."""
    if raw or not has_template(llm, chat_template):
        if system is not None:
            raise no_system_message("the model has no chat template")
        if not raw:
            say("The model has no chat template: it continues the prompt as it is.")
        return llm.tokenize(text, add_special=True)
    messages = [{"role": "user", "content": text}]
    return message_tokens(llm, messages, system, chat_template, variables)


def message_tokens(
    llm: "LLM",
    messages: list[dict[str, Any]],
    system: str | None,
    chat_template: str | None,
    variables: dict[str, Any],
) -> list[int]:
    """Messages in the model's template; ``system`` goes before them, unless they have their own."""
    from edgellm.chat_tokens import render_tokens
    from edgellm.conversation import template_of

    if system is not None and messages[0].get("role") != "system":
        messages = [{"role": "system", "content": system}, *messages]
    template = template_of(llm, chat_template)
    return render_tokens(llm.tokenizer, template, messages, variables=variables)
