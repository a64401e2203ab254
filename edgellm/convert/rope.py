"""Rotary embeddings of config.json -> metadata and tables of factors.

Fields are rope_theta and rope_scaling, or both within rope_parameters (from version 5 of the
transformers package on), there also by kind of layer.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.convert.config import HFConfig, is_number
from edgellm.convert.errors import reading

Tables = dict[str, NDArray[np.float32]]  # tensor name -> factors


def rope_base(config: HFConfig) -> float:
    """rope_theta, wherever it stands."""
    inner = rope_parameters(config).get("rope_theta")
    value = config.number("rope_theta", 10000.0) if inner is None else inner
    if not is_number(value) or value <= 0:
        raise config.refuse("rope_theta", f"is {value!r}; a positive number is needed")
    return float(value)


def rope_parameters(config: HFConfig, layer_type: str = "full_attention") -> dict[str, Any]:
    """The scaling's fields; of the given kind of layer where kinds differ."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise config.refuse("rope_scaling", f"is {found!r}; an object is needed")
    inner = found.get(layer_type)
    return inner if isinstance(inner, dict) else found


def rope_metadata(config: HFConfig, dim: int) -> tuple[dict[str, Any], Tables]:
    """Keys (without the architecture's prefix) and tables. ``dim``: rotated elements of a head."""
    scaling = rope_parameters(config)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    keys: dict[str, Any] = {"rope.freq_base": rope_base(config)}
    n_ctx = config.integer("max_position_embeddings")

    def number(name: str, default: float | None = None) -> float:
        value = scaling.get(name, default)
        if not is_number(value) or value <= 0:
            raise config.refuse(
                "rope_scaling", f"has {name} {value!r}; a positive number is needed"
            )
        return float(value)

    def original(default: int | None = None) -> int:
        name = "original_max_position_embeddings"
        value = int(number(name, config.get(name) or default))
        if not 1 < value <= 1 << 24:  # its logarithm is divided by
            raise config.refuse("rope_scaling", f"has {name} {value}; needed: 2 to {1 << 24}")
        return value

    if kind in ("default", "dynamic"):  # dynamic: nothing changes up to max_position_embeddings
        return keys, {}
    if kind == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": number("factor")}
        return keys, {}
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if low >= high:
            raise config.refuse("rope_scaling", "has no high_freq_factor above its low_freq_factor")
        base = rope_base(config)
        table = llama3_factors(base, dim, number("factor"), low, high, original(8192))
        return keys, {"rope_freqs.weight": table}
    if kind == "yarn":
        return keys | yarn(scaling, number, original(n_ctx)), {}
    if kind in ("longrope", "su"):
        tables: Tables = {}
        for name in ("long", "short"):
            with reading(config.path), np.errstate(over="ignore"):
                factors = np.asarray(scaling.get(f"{name}_factor"), np.float32)
            if factors.shape != (dim // 2,) or not np.all((factors > 0) & (factors < np.inf)):
                reason = f"must have a {name}_factor of {dim // 2} positive numbers"
                raise config.refuse("rope_scaling", reason)
            tables[f"rope_factors_{name}.weight"] = factors
        short = original()
        factor = n_ctx / short
        magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(short))
        keys["rope.scaling.original_context_length"] = short
        keys["rope.scaling.attn_factor"] = number("attention_factor", magnitude)
        return keys, tables
    raise config.refuse(
        "rope_scaling",
        f"is of type {kind!r}; supported: default, dynamic, linear, llama3, longrope, yarn",
    )


def yarn(scaling: dict[str, Any], number: Any, n_ctx: int) -> dict[str, Any]:
    """YaRN's keys (arXiv:2309.00071). A runner multiplies queries and keys by 0.1 ln(factor) + 1 of
    its own accord, so another attention factor is stated in proportion to that."""
    factor = number("factor")

    def magnitude(name: str) -> float:
        return 0.1 * number(name) * math.log(factor) + 1 if factor > 1 else 1.0

    keys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": n_ctx,
    }
    own = usual = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        usual = magnitude("mscale") / magnitude("mscale_all_dim")
    wanted = usual if scaling.get("attention_factor") is None else number("attention_factor")
    if wanted != own:
        keys["rope.scaling.attn_factor"] = wanted / own
    for name in ("beta_fast", "beta_slow"):
        if scaling.get(name) is not None:
            keys[f"rope.scaling.yarn_{name}"] = number(name)
    return keys


def llama3_factors(
    base: float, dim: int, factor: float, low: float, high: float, n_ctx: int
) -> NDArray[np.float32]:
    """What frequencies are divided by (Llama 3.1's model card): waves that turn more than ``high``
    times in the original context stay, those that turn less than ``low`` times are stretched by
    ``factor``, between them a ramp leads from one to the other."""
    frequencies = base ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    turns = n_ctx * frequencies / (2 * math.pi)
    ramp = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - ramp) / factor + ramp)).astype(np.float32)
