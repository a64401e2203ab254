"""The catalogue of short names, as data (models/catalog.toml)."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from edgellm.hub.store import Item


@dataclass(frozen=True)
class Entry(Item):
    """One model of the catalogue.

    size and sha256 are None where the source knows them itself (Hugging Face tells both for each
    file, and what it tells is checked).
    """

    name: str
    sources: tuple[Mapping[str, Any], ...]
    file: str | None = None  # its name in the cache folder; None for a model of Hugging Face alone
    sha256: str | None = None
    draft: str | None = None  # the entry of a small model that guesses for this one


@cache
def catalogue() -> tuple[str, dict[str, Entry]]:
    """(name of the default model, entries by short name)."""
    # Not files("edgellm.models"), which would import the architectures.
    text = (resources.files("edgellm") / "models" / "catalog.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    entries = {
        name: Entry(
            name=name,
            title=fields["title"],
            licence=fields["licence"],
            size=fields.get("size"),
            sha256=fields.get("sha256"),
            file=fields.get("file"),
            draft=fields.get("draft"),
            sources=tuple(fields["sources"]),
        )
        for name, fields in table["models"].items()
    }
    return table["default"], entries
