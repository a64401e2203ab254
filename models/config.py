"""Hyper-parameters of a file, typed and ranged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from edgellm.kernels.graph import Rope, Yarn
from edgellm.models.weights import ModelError, Weights
from edgellm.quant.gguf import GGUF

__all__ = ["Config", "ModelError", "Weights"]


@dataclass(frozen=True)
class Config:
    """What nearly every architecture has. An architecture asks for its own keys through
    ``integer``, ``number``, ``flag``, ``by_layer`` and ``flags``."""

    gguf: GGUF
    architecture: str
    n_layers: int
    n_embd: int
    n_heads: int  # the most of any layer
    heads: tuple[int, ...]  # by layer
    kv_heads: tuple[int, ...]  # by layer; 0: the layer has no attention
    head_dim: int
    v_dim: int  # length of a head's values
    rope_dim: int
    eps: float
    n_ctx: int  # context length the model was trained for
    n_experts: int
    n_experts_used: int

    @classmethod
    def read(cls, gguf: GGUF) -> Config:
        """Raises GGUFError naming the key that is missing, mistyped or out of range."""
        keys = _Keys(gguf, gguf.architecture)
        n_layers = keys.integer("block_count", 1, 1024)
        # layers behind the last are drafts of further tokens, for speculation
        n_layers -= keys.integer("nextn_predict_layers", 0, n_layers - 1, 0)
        n_embd = keys.integer("embedding_length", 1, 1 << 20)
        heads = keys.by_layer("attention.head_count", n_layers, 0, 1024)
        n_heads = max(heads)
        kv_heads = keys.by_layer("attention.head_count_kv", n_layers, 0, 1024, heads)
        for n, n_kv in zip(heads, kv_heads, strict=True):
            if n_kv and n % n_kv:
                raise keys.refuse(
                    "attention.head_count_kv",
                    f"is impossible: {n} heads cannot share {n_kv} key-value heads",
                )
        if n_heads == 0:
            raise keys.refuse("attention.head_count", "is impossible: no layer has a head")
        if "attention.key_length" not in keys and n_embd % n_heads:
            raise keys.refuse(
                "attention.head_count",
                f"is impossible: {n_embd} elements cannot be split over {n_heads} heads",
            )
        head_dim = keys.integer("attention.key_length", 1, 4096, n_embd // n_heads)
        v_dim = keys.integer("attention.value_length", 1, 4096, head_dim)
        for name, length in (("key", head_dim), ("value", v_dim)):
            if length % 16:
                raise keys.refuse(
                    f"attention.{name}_length", f"is {length}; heads must be a multiple of 16 long"
                )
        rope_dim = keys.integer("rope.dimension_count", 2, head_dim, head_dim)
        if rope_dim % 2:
            raise keys.refuse("rope.dimension_count", "must be even")
        n_experts = keys.integer("expert_count", 0, 4096, 0)
        norm = "layer_norm" if "attention.layer_norm_epsilon" in keys else "layer_norm_rms"
        return cls(
            gguf=gguf,
            architecture=gguf.architecture,
            n_layers=n_layers,
            n_embd=n_embd,
            n_heads=n_heads,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            v_dim=v_dim,
            rope_dim=rope_dim,
            eps=keys.number(f"attention.{norm}_epsilon", 1e-14, 0.5),
            n_ctx=keys.integer("context_length", 1, 1 << 24),
            n_experts=n_experts,
            n_experts_used=keys.integer("expert_used_count", 1, n_experts) if n_experts else 0,
        )

    @cached_property
    def weights(self) -> Weights:
        return Weights(self.gguf)

    @cached_property
    def _keys(self) -> _Keys:
        return _Keys(self.gguf, self.architecture)

    def has(self, key: str) -> bool:
        return key in self._keys

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """The architecture's key; without a default a missing one is refused."""
        return self._keys.integer(key, low, high, default)

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        return self._keys.number(key, low, high, default)

    def flag(self, key: str, default: bool) -> bool:
        return self.gguf.boolean(f"{self.architecture}.{key}", default)

    def refuse(self, key: str, reason: str) -> ModelError:
        return self._keys.refuse(key, reason)

    @cached_property
    def n_ff(self) -> tuple[int, ...]:
        """Width of the feed-forward network by layer."""
        return self._keys.by_layer("feed_forward_length", self.n_layers, 1, 1 << 22)

    @cached_property
    def n_ff_expert(self) -> int:
        """Width of an expert; by default the width of the network shared out."""
        key = "expert_feed_forward_length"
        if not self.has(key):
            return self.n_ff[-1]
        widths = set(self._keys.by_layer(key, self.n_layers, 0, 1 << 22)) - {0}
        if len(widths) != 1:
            raise self.refuse(key, "must be one width for all layers that have experts")
        return widths.pop()

    def sliding_layers(self, period: int, key: str = "attention.sliding_window_pattern"
                       ) -> list[bool]:  # fmt: skip
        """Which layers see only the window: by the file's list, else all but every period-th."""
        value = self.gguf.metadata.get(f"{self.architecture}.{key}", period)
        if isinstance(value, int) and not isinstance(value, bool):
            period = self.integer(key, 0, 1024, period)
            return [period == 0 or (i + 1) % period != 0 for i in range(self.n_layers)]
        return self.flags(key)

    def flags(self, key: str) -> list[bool]:
        """A truth value for each layer."""
        return [bool(flag) for flag in self._keys.by_layer(key, self.n_layers, 0, 1)]

    def rope(
        self, layout: Literal["neox", "norm"], *, base: float | None = None, dim: int | None = None,
        scaled: bool = True,
    ) -> Rope:  # fmt: skip
        """The file's rotation; ``base`` instead of its own, ``scaled`` False without its scaling
        to longer contexts."""
        own_base = self.number("rope.freq_base", 1e-3, 1e15, 10000.0)
        dim, base = dim or self.rope_dim, own_base if base is None else base
        if not scaled:
            return Rope(dim, base, layout)
        kind = self.gguf.string(f"{self.architecture}.rope.scaling.type", "linear")
        if kind not in ("none", "linear", "yarn", "longrope"):
            raise self.refuse(
                "rope.scaling.type", f"is {kind!r}; supported: none, linear, yarn, longrope"
            )
        legacy = self.number("rope.scale_linear", 1e-3, 1e6, 1.0)
        factor = self.number("rope.scaling.factor", 0.0, 1e6, legacy) or 1.0
        if kind == "none":
            factor = 1.0
        w, half = self.weights, dim // 2
        magnitude = self.number("rope.scaling.attn_factor", 1e-3, 1e3, 1.0)
        n_ctx = self.integer("rope.scaling.original_context_length", 1, 1 << 24, self.n_ctx)
        magnitude *= self.number("rope.scaling.yarn_attn_factor", 0.0, 1e3, 1.0)
        # how much of YaRN's mixture of frequencies; below 0: as the kind of scaling says
        mixture = self.number("rope.scaling.yarn_ext_factor", -1.0, 1e3, -1.0)
        mixture = float(kind == "yarn") if mixture < 0 else mixture
        yarn = None
        if mixture:
            yarn = Yarn(
                n_ctx, mixture,
                self.number("rope.scaling.yarn_beta_fast", 1e-3, 1e6, 32.0),
                self.number("rope.scaling.yarn_beta_slow", 1e-3, 1e6, 1.0),
            )  # fmt: skip
            magnitude *= yarn_magnitude(factor) / yarn_magnitude(factor, self.yarn_log_multiplier)
        factors, long_factors = w.optional("rope_freqs", half), None
        if factors is None:
            factors = w.optional("rope_factors_short", half)
            long_factors = w.optional("rope_factors_long", half)
        if self.n_ctx <= n_ctx:  # not a model whose context was extended
            long_factors = None
        return Rope(dim, base, layout, 1.0 / factor, factors, long_factors, n_ctx, yarn, magnitude)

    @property
    def yarn_log_multiplier(self) -> float:
        """How much of YaRN's magnitude the scale of the scores takes over."""
        return self.number("rope.scaling.yarn_log_multiplier", 0.0, 1e3, 0.0)


def yarn_magnitude(factor: float, multiplier: float = 1.0) -> float:
    """YaRN's 0.1 ln(s) + 1, by which queries and keys grow."""
    return 1.0 + 0.1 * multiplier * math.log(factor) if factor > 1 else 1.0


class _Keys:
    """An architecture's metadata keys, without their prefix."""

    def __init__(self, gguf: GGUF, architecture: str) -> None:
        self.gguf, self.prefix = gguf, architecture

    def __contains__(self, key: str) -> bool:
        return f"{self.prefix}.{key}" in self.gguf.metadata

    def refuse(self, key: str, reason: str) -> ModelError:
        return ModelError(self.gguf.path, 0, f"{self.prefix}.{key}", reason)

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        key = f"{self.prefix}.{key}"
        if default is None:
            return self.gguf.integer(key, low=low, high=high)
        return self.gguf.integer(key, default, low=low, high=high)

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        key = f"{self.prefix}.{key}"
        if default is None:
            return self.gguf.number(key, low=low, high=high)
        return self.gguf.number(key, default, low=low, high=high)

    def by_layer(
        self, key: str, n_layers: int, low: int, high: int, default: tuple[int, ...] | None = None
    ) -> tuple[int, ...]:
        """One number for all layers, or a list with one for each."""
        if key not in self and default is not None:
            return default
        full = f"{self.prefix}.{key}"
        values = [int(v) for v in self.gguf.integers(full)]
        if len(values) == 1:
            values *= n_layers
        if len(values) < n_layers:
            raise self.refuse(key, f"has {len(values)} entries for {n_layers} layers")
        if bad := [v for v in values if not low <= v <= high]:
            raise self.refuse(key, f"has {bad[0]}; allowed: at least {low}, at most {high}")
        return tuple(values[:n_layers])
