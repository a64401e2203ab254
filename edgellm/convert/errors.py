"""What conversion refuses, and the packages that it needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from edgellm.errors import EdgeLLMError


class ConvertError(EdgeLLMError):
    """The directory holds nothing that can be converted; one sentence says what and why."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Of a file whose values have any form: what does not have the expected one is refused."""
    try:
        yield
    except EdgeLLMError:
        raise
    except (
        AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError,
    ) as error:  # fmt: skip
        reason = " ".join(str(error).split())
        raise ConvertError(f"{path}: has a value of an unexpected form: {reason}.") from None


def library(name: str) -> Any:
    """A package of the extra `convert`."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ConvertError(
            f"Converting needs the package {error.name}: pip install 'edgellm[convert]'."
        ) from None
