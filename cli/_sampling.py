"""The one place that maps flags, and names typed in a chat, to SamplingParams.

A new sampler needs a line in FLAGS; commands that sample are declared with ``@with_sampling``.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgellm.errors import EdgeLLMError

if TYPE_CHECKING:
    from edgellm.sampling import SamplingParams


def _limit(value: int) -> int:
    if value == 0 or value < -1:
        raise typer.BadParameter("must be at least 1, or -1 for no limit")
    return value


@dataclass(frozen=True)
class Flag:
    """``field`` of SamplingParams, the type of its flag, its default there and its option."""

    field: str
    type: Any
    default: Any
    option: Any


def _flag(
    field: str, type_: Any, default: Any, *names: str, env: str | None = None, **more: Any
) -> Flag:
    """The environment variable is EDGELLM_<ENV>, or has the name of the first long flag."""
    if env is None:
        long = next(name for name in names if name.startswith("--"))
        env = long.strip("-").replace("-", "_").upper()
    envvar = f"EDGELLM_{env}" if env else None
    return Flag(field, type_, default, typer.Option(*names, envvar=envvar, **more))


FLAGS = (
    _flag(
        "max_tokens", int, -1, "-n", "--predict", "--n-predict", env="N_PREDICT", callback=_limit,
        help="Most tokens to generate; -1: until the model stops or the context is full.",
    ),
    _flag("seed", int, -1, "-s", "--seed", min=-1, help="-1: random."),
    _flag(
        "temperature", float, 0.8, "--temp", "--temperature", min=0, help="0: most likely token.",
    ),
    _flag("top_k", int, 40, "--top-k", min=0, help="0: off."),
    _flag("top_p", float, 0.95, "--top-p", min=0, max=1, help="1: off."),
    _flag("min_p", float, 0.05, "--min-p", min=0, max=1, help="0: off."),
    _flag(
        "stop", list[str] | None, None, "--stop", "-r", "--reverse-prompt", env="",
        help="Stop before this text; may be given several times.",
    ),
    _flag(
        "ignore_eos", bool, False, "--ignore-eos", help="Go on when the model wants to stop.",
    ),
)  # fmt: skip

# Other names for fields that people type: llama.cpp's and Ollama's.
SYNONYMS = {
    "temp": "temperature",
    "predict": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "n": "max_tokens",
}


class Sampling:
    """The sampling settings of a command, which a chat may change."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = {"stop": (), **values}

    def params(self) -> "SamplingParams":
        """What the engine takes. Raises what it raises for bad values."""
        from edgellm.sampling import SamplingParams

        values = dict(self._values)
        values["stop"] = tuple(values["stop"] or ())
        if values["max_tokens"] == -1:
            values["max_tokens"] = None
        return SamplingParams(**values)

    def set(self, name: str, text: str) -> str:
        """Change one by a name and a value as typed; the field's real name. Raises EdgeLLMError."""
        field = self.field(name)
        flag = next(flag for flag in FLAGS if flag.field == field)
        value: Any = text
        try:
            if flag.type in (int, float):
                value = flag.type(text)
            elif flag.type is bool:
                value = {"1": True, "true": True, "on": True, "enabled": True, "yes": True}.get(
                    text.lower(), False
                )
            elif field == "stop":
                value = (text,) if text else ()
        except ValueError:
            kind = "a whole number" if flag.type is int else "a number"
            raise EdgeLLMError(f"{name} must be {kind}, not {text!r}.") from None
        before = self._values[field]
        self._values[field] = value
        try:
            self.params()
        except ValueError:
            self._values[field] = before
            raise
        return field

    @staticmethod
    def field(name: str) -> str:
        """The field that a typed name means."""
        plain = name.strip("-").replace("-", "_").lower()
        plain = SYNONYMS.get(plain, plain)
        if plain not in {flag.field for flag in FLAGS}:
            known = ", ".join(flag.field for flag in FLAGS)
            raise EdgeLLMError(f"There is no parameter {name!r}; there are {known}.")
        return plain

    def as_dict(self) -> dict[str, Any]:
        """Field names and values, as plain data."""
        return {key: list(v) if isinstance(v, tuple) else v for key, v in self._values.items()}


def with_sampling(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the sampling flags; it gets them as one argument, ``sampling``."""

    @wraps(command)
    def flagged(**given: Any) -> None:
        values = {flag.field: given.pop(flag.field) for flag in FLAGS}
        command(**given, sampling=Sampling(values))

    signature = inspect.signature(command)
    own = [p for name, p in signature.parameters.items() if name != "sampling"]
    added = [
        inspect.Parameter(
            flag.field,
            inspect.Parameter.KEYWORD_ONLY,
            default=flag.default,
            annotation=Annotated[flag.type, flag.option],
        )
        for flag in FLAGS
    ]
    flagged.__signature__ = signature.replace(parameters=own + added)  # type: ignore[attr-defined]
    flagged.__annotations__ = {p.name: p.annotation for p in own + added}
    del flagged.__wrapped__
    return flagged
