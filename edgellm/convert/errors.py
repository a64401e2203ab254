"""What conversion refuses, and the packages that it needs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from edgellm.errors import EdgeLLMError


class ConvertError(EdgeLLMError):
    """The directory holds nothing that can be converted; one sentence says what and why."""


def library(name: str) -> Any:
    """A package of the extra `convert`."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ConvertError(
            f"Converting needs the package {error.name}: pip install 'edgellm[convert]'."
        ) from None
