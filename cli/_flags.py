"""Groups of flags that several commands take as one argument."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from edgellm.cli._output import say

Command = Callable[..., None]


def with_flags(
    argument: str, flags: dict[str, tuple[Any, Any]], combine: Callable[[dict[str, Any]], Any]
) -> Callable[[Command], Command]:
    """Give a command flags (name -> annotation and default); it gets what ``combine`` makes of
    their values as one ``argument``."""

    def decorated(command: Command) -> Command:
        @wraps(command)
        def flagged(**given: Any) -> None:
            values = {name: given.pop(name) for name in flags}
            command(**given, **{argument: combine(values)})

        signature = inspect.signature(command)
        own = [p for name, p in signature.parameters.items() if name != argument]
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default,
                              annotation=kind)
            for name, (kind, default) in flags.items()
        ]  # fmt: skip
        flagged.__signature__ = signature.replace(parameters=own + added)  # type: ignore[attr-defined]
        flagged.__annotations__ = {p.name: p.annotation for p in own + added}
        del flagged.__wrapped__
        return flagged

    return decorated


def say_unused(flags: dict[str, tuple[Any, Any]], given: dict[str, Any], why: str) -> None:
    """That those of ``flags`` which were given have no effect."""
    names = []
    for key, value in given.items():
        if value not in (flags[key][1], []):
            option = flags[key][0].__metadata__[0]
            # typer keeps the first name of an annotated option in the place of its default
            spellings = (option.default, *(option.param_decls or ()))
            names.append(next(name for name in spellings if str(name).startswith("--")))
    if names:
        say(f"{why}: {', '.join(names)} changes nothing.")
