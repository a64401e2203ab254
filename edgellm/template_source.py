"""Which chat template to use: the file's own, a named one of the file, one of ours, or a user's.

templates/*.jinja are ours, written for this project in the formats that the model families know;
templates/known.txt lists by checksum the templates that were looked at and do no harm.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from edgellm.errors import EdgeLLMError

KEY = "tokenizer.chat_template"


class TemplateNotFound(EdgeLLMError):
    """No template of this name, or none that can be read."""


@dataclass(frozen=True)
class TemplateSource:
    """``origin`` tells people where it comes from; ``is_own``: from the model's file."""

    text: str
    origin: str
    is_own: bool


def choose(
    metadata: Mapping[str, Any], asked: str | None = None, tools: bool = False
) -> TemplateSource | None:
    """The template of a model, or the one ``asked`` for by name or file; None: it has none.

    A file names one of several templates "tool_use", which is meant for requests with tools.
    """
    if asked is None:
        named = _in_model(metadata, "tool_use") if tools else None
        return named or _in_model(metadata, "")
    own = _in_model(metadata, "" if asked == "default" else asked)
    if own is not None:
        return own
    if asked in built_in():
        text = (resources.files("edgellm") / "templates" / f"{asked}.jinja").read_text("utf-8")
        return TemplateSource(text, f"the built-in template {asked}", False)
    return _read(metadata, asked)


def _in_model(metadata: Mapping[str, Any], name: str) -> TemplateSource | None:
    text = metadata.get(f"{KEY}.{name}" if name else KEY)
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    if not isinstance(text, str):
        return None
    return TemplateSource(text, f"the model's template {name}".rstrip(), True)


def _read(metadata: Mapping[str, Any], asked: str) -> TemplateSource:
    path = Path(asked).expanduser()
    try:
        return TemplateSource(path.read_text(encoding="utf-8"), str(path), False)
    except UnicodeDecodeError:
        raise TemplateNotFound(f"The chat template {asked} is not UTF-8 text.") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        if path.suffix or len(path.parts) > 1:
            reason = getattr(error, "strerror", None) or error
            raise TemplateNotFound(f"The chat template {asked} cannot be read: {reason}.") from None
        start = f"{KEY}."
        own = [key.removeprefix(start) for key in metadata if key.startswith(start)]
        names = ", ".join(own + sorted(built_in()))
        raise TemplateNotFound(
            f"There is no chat template {asked!r}: name a file, or one of {names}."
        ) from None


@cache
def built_in() -> frozenset[str]:
    """Names of our templates."""
    folder = resources.files("edgellm") / "templates"
    names = (entry.name for entry in folder.iterdir())
    return frozenset(n.removesuffix(".jinja") for n in names if n.endswith(".jinja"))


def checksum(source: str) -> str:
    """Of the text without the white space around it and with plain line ends."""
    return hashlib.sha256(source.replace("\r\n", "\n").strip().encode()).hexdigest()


@cache
def _known() -> frozenset[str]:
    text = (resources.files("edgellm") / "templates" / "known.txt").read_text("utf-8")
    return frozenset(line.split()[0] for line in text.splitlines() if line and line[0] != "#")


def is_known(source: str) -> bool:
    """Whether this template is on the list of those that do no harm."""
    try:
        return checksum(source) in _known()
    except UnicodeEncodeError:  # a lone surrogate
        return False
