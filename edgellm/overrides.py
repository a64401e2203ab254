"""What a caller says instead of the file: rotation settings, and metadata by key.

All of it becomes metadata before the model is built, so an architecture reads one place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypedDict

from edgellm.errors import EdgeLLMError
from edgellm.quant.gguf import GGUF

SCALINGS = ("none", "linear", "yarn", "longrope")
Value = int | float | bool | str


class Overrides(TypedDict, total=False):
    """Keyword arguments of LLM, with llama.cpp's names. ``rope_scale`` is the factor by which the
    context grows, ``rope_freq_scale`` its inverse."""

    rope_freq_base: float
    rope_freq_scale: float
    rope_scale: float
    rope_scaling: str
    yarn_orig_ctx: int
    yarn_ext_factor: float
    yarn_attn_factor: float
    yarn_beta_fast: float
    yarn_beta_slow: float
    kv_overrides: Mapping[str, Value]


_KEYS = {
    "rope_freq_base": "rope.freq_base",
    "rope_scale": "rope.scaling.factor",
    "rope_scaling": "rope.scaling.type",
    "yarn_orig_ctx": "rope.scaling.original_context_length",
    "yarn_ext_factor": "rope.scaling.yarn_ext_factor",
    "yarn_attn_factor": "rope.scaling.yarn_attn_factor",
    "yarn_beta_fast": "rope.scaling.yarn_beta_fast",
    "yarn_beta_slow": "rope.scaling.yarn_beta_slow",
}


def apply(gguf: GGUF, overrides: Mapping[str, Any]) -> None:
    """Change the file's metadata in memory. Raises EdgeLLMError."""
    settings = dict(overrides)
    if unknown := set(settings) - set(Overrides.__annotations__):
        raise EdgeLLMError(f"LLM has no argument {sorted(unknown)[0]!r}.")
    values = settings.pop("kv_overrides", None) or {}
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise EdgeLLMError("kv_overrides must map metadata keys to values.")
    gguf.override(values)
    settings = {name: value for name, value in settings.items() if value is not None}
    for name, value in settings.items():
        _check(name, value)
    for name in ("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"):
        if settings.get(name, 0) < 0:  # llama.cpp's word for what the file says
            del settings[name]
    if "rope_freq_scale" in settings:
        if "rope_scale" in settings:
            raise EdgeLLMError("rope_scale and rope_freq_scale say the same: give one of them.")
        settings["rope_scale"] = 1.0 / settings.pop("rope_freq_scale")
    prefix = gguf.architecture
    found = {f"{prefix}.{_KEYS[name]}": value for name, value in settings.items()}
    if settings.get("rope_scaling") == "yarn" and "rope_scale" in settings:
        found |= _longer_context(gguf, settings)
    gguf.override(found)


def _longer_context(gguf: GGUF, settings: Mapping[str, Any]) -> dict[str, Value]:
    """YaRN extends the context that the model counts as trained for."""
    own, old = (f"{gguf.architecture}.{key}" for key in ("context_length", _KEYS["yarn_orig_ctx"]))
    trained = gguf.integer(own, low=1, high=1 << 24)
    n_ctx = gguf.integer(old, trained, low=1, high=1 << 24)
    n_ctx = int(settings.get("yarn_orig_ctx", n_ctx))
    return {old: n_ctx, own: min(1 << 24, max(1, int(n_ctx * settings["rope_scale"])))}


def _check(name: str, value: Any) -> None:
    if name == "rope_scaling":
        if value not in SCALINGS:
            raise EdgeLLMError(f"rope_scaling must be {', '.join(SCALINGS)}, not {value!r}.")
        return
    whole = name == "yarn_orig_ctx"
    kind = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind):
        raise EdgeLLMError(f"{name} must be a {'whole ' * whole}number, not {value!r}.")
    if not math.isfinite(value):
        raise EdgeLLMError(f"{name} must be a finite number, not {value!r}.")
    if name.startswith("rope_") and value <= 0:
        raise EdgeLLMError(f"{name} must be above 0, not {value!r}.")


def parse(text: str, flag: str = "--override-kv") -> tuple[str, Value]:
    """KEY=TYPE:VALUE as llama.cpp writes it; TYPE is int, float, bool or str. EdgeLLMError names
    the flag."""
    key, equals, rest = text.partition("=")
    kind, colon, value = rest.partition(":")
    if not (key and equals and colon):
        raise EdgeLLMError(f"{flag} takes KEY=TYPE:VALUE, not {text!r}.")
    try:
        if kind == "int":
            return key, int(value)
        if kind == "float":
            return key, float(value)
        if kind == "bool":
            return key, {"true": True, "false": False}[value]
    except (ValueError, KeyError):
        raise EdgeLLMError(f"{flag} {key}: {value!r} is no {kind}.") from None
    if kind != "str":
        raise EdgeLLMError(f"{flag} {key}: the type is int, float, bool or str.")
    return key, value
