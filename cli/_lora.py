"""Flags that name LoRA adapters; names are llama.cpp's."""

from typing import Annotated, Any

import typer

from edgellm.cli._flags import with_flags
from edgellm.cli._output import say

FLAGS: dict[str, tuple[Any, Any]] = {
    "lora": (Annotated[
        list[str] | None,
        typer.Option(
            "--lora", metavar="FILE[:SCALE]", show_default=False,
            help="A LoRA adapter (GGUF) to add to the model; several: again, or with commas.",
        ),
    ], None),
    "lora_scaled": (Annotated[
        list[str] | None,
        typer.Option("--lora-scaled", metavar="FILE:SCALE", show_default=False,
                     help="The same with a scale."),
    ], None),
}  # fmt: skip


def _adapters(given: dict[str, Any]) -> dict[str, Any]:
    """An argument of LLM, if there are any."""
    if not any(given.values()):
        return {}
    from edgellm.lora import parse

    def parts(name: str) -> list[str]:
        return [part for text in given[name] or () for part in text.split(",") if part]

    scaled = [parse(part) for part in parts("lora_scaled")]
    for adapter, text in zip(scaled, parts("lora_scaled"), strict=True):
        if adapter.path == text:
            raise typer.BadParameter(
                f"{text} has no scale; give FILE:SCALE", param_hint="'--lora-scaled'"
            )
    found = [*map(parse, parts("lora")), *scaled]
    if not found:
        raise typer.BadParameter("a file is needed", param_hint="'--lora'")
    return {"lora": found}


with_lora = with_flags("adapters", FLAGS, _adapters)


def say_unused_adapters(adapters: dict[str, Any], why: str) -> None:
    """That adapters which were given have no effect."""
    if adapters:
        say(f"{why}: --lora changes nothing.")
