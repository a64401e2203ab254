"""config.json, with the type that one expects of a field."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from edgellm.convert.errors import ConvertError

_REQUIRED = object()
_MOST = 3.4028234663852886e38  # that float32 holds, as which GGUF has numbers


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value of JSON is a finite number that fits float32."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and -_MOST <= value <= _MOST


class HFConfig:
    """The fields of the language model. Those of models with more than text stand in text_config.

    ``defaults`` are what the class of the model takes for a field that the file leaves out,
    ``names`` what other architectures call it (name here -> name in the file).
    """

    def __init__(
        self, path: Path, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.path, self.names = path, dict(names or {})
        inner = values.get("text_config")
        given = {**values, **inner} if isinstance(inner, dict) else dict(values)
        self.values = {**(defaults or {}), **{k: v for k, v in given.items() if v is not None}}

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    def get(self, name: str) -> Any:
        """The field as it is, None where there is none."""
        return self.values.get(self.names.get(name, name))

    def refuse(self, name: str, reason: str) -> ConvertError:
        return ConvertError(f"{self.path}: {self.names.get(name, name)} {reason}.")

    def integer(self, name: str, default: Any = _REQUIRED, most: int = 1 << 24) -> int:
        value = self._known(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise self.refuse(name, f"is {value!r}; a whole number up to {most} is needed")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        value = self._known(name, default)
        if not is_number(value):
            raise self.refuse(name, f"is {value!r}; a number is needed")
        return float(value)

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        value = self._known(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, f"is {value!r}; true or false is needed")
        return value

    def must_be(self, name: str, expected: Any, default: Any) -> None:
        """Refuse a variation that no GGUF model of this architecture has."""
        value = self.get(name)
        if (default if value is None else value) != expected:
            raise self.refuse(name, f"is {value!r}; models of this kind are supported with "
                              f"{expected!r} only")  # fmt: skip

    def _known(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise self.refuse(name, "is missing")
        return default

    @property
    def n_layers(self) -> int:
        return self.integer("num_hidden_layers", most=1024)

    @property
    def head_dim(self) -> int:
        return self.integer(
            "head_dim", self.integer("hidden_size") // max(1, self.integer("num_attention_heads"))
        )
