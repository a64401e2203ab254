"""Hyper-parameters of a file, typed and ranged, and its tensors with the shapes they must have."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from edgellm.kernels.graph import Weight
from edgellm.quant.gguf import GGUF, GGUFError


class ModelError(GGUFError):
    """The file is sound but is not a model this architecture can run."""


@dataclass(frozen=True)
class Config:
    """What nearly every architecture has. ``gguf`` gives an architecture its own keys."""

    gguf: GGUF
    architecture: str
    n_layers: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope_dim: int
    rope_base: float
    rope_scale: float  # 1 / factor of linear scaling
    eps: float
    n_ctx: int  # context length the model was trained for
    n_experts: int
    n_experts_used: int

    @classmethod
    def read(cls, gguf: GGUF) -> Config:
        """Raises GGUFError naming the key that is missing, mistyped or out of range."""
        arch = gguf.architecture

        def integer(key: str, low: int, high: int, default: int | None = None) -> int:
            key = f"{arch}.{key}"
            if default is None:
                return gguf.integer(key, low=low, high=high)
            return gguf.integer(key, default, low=low, high=high)

        n_embd = integer("embedding_length", 1, 1 << 20)
        n_heads = integer("attention.head_count", 1, 1024)
        n_kv_heads = integer("attention.head_count_kv", 1, 1024, n_heads)
        if n_heads % n_kv_heads:
            raise ModelError(
                gguf.path, 0, f"{arch}.attention.head_count_kv",
                f"is impossible: {n_heads} heads cannot share {n_kv_heads} key-value heads",
            )  # fmt: skip
        if f"{arch}.attention.key_length" not in gguf.metadata and n_embd % n_heads:
            raise ModelError(
                gguf.path, 0, f"{arch}.attention.head_count",
                f"is impossible: {n_embd} elements cannot be split over {n_heads} heads",
            )  # fmt: skip
        head_dim = integer("attention.key_length", 1, 4096, max(1, n_embd // n_heads))
        if integer("attention.value_length", 1, 4096, head_dim) != head_dim:
            raise ModelError(
                gguf.path, 0, f"{arch}.attention.value_length",
                f"must equal the length of keys, {head_dim}",
            )  # fmt: skip
        if head_dim % 16:
            raise ModelError(
                gguf.path, 0, f"{arch}.attention.key_length",
                f"is {head_dim}; heads must be a multiple of 16 long",
            )  # fmt: skip
        rope_dim = integer("rope.dimension_count", 2, head_dim, head_dim)
        if rope_dim % 2:
            raise ModelError(gguf.path, 0, f"{arch}.rope.dimension_count", "must be even")
        scaling = gguf.string(f"{arch}.rope.scaling.type", "none")
        if scaling not in ("none", "linear"):
            raise ModelError(
                gguf.path, 0, f"{arch}.rope.scaling.type",
                f"is {scaling!r}; supported: none, linear",
            )  # fmt: skip
        factor = gguf.number(f"{arch}.rope.scaling.factor", 1.0, low=1e-3, high=1e6)
        n_experts = integer("expert_count", 0, 4096, 0)
        return cls(
            gguf=gguf,
            architecture=arch,
            n_layers=integer("block_count", 1, 1024),
            n_embd=n_embd,
            n_ff=integer("feed_forward_length", 1, 1 << 22),
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            rope_dim=rope_dim,
            rope_base=gguf.number(f"{arch}.rope.freq_base", 10000.0, low=1e-3, high=1e15),
            rope_scale=1.0 / factor if scaling == "linear" else 1.0,
            eps=gguf.number(f"{arch}.attention.layer_norm_rms_epsilon", low=1e-12, high=0.5),
            n_ctx=integer("context_length", 1, 1 << 24),
            n_experts=n_experts,
            n_experts_used=integer("expert_used_count", 1, n_experts) if n_experts else 0,
        )

    @cached_property
    def weights(self) -> Weights:
        return Weights(self.gguf)


class Weights:
    """The file's tensors by name, checked against the exact shape the architecture derives."""

    def __init__(self, gguf: GGUF) -> None:
        self.gguf = gguf
        self.used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return f"{name}.weight" in self.gguf.tensors

    def __call__(self, name: str, *shape: int, suffix: str = "weight") -> Weight:
        """The tensor ``name.weight`` of ``shape`` in GGUF order; ModelError when it is missing or
        has another shape."""
        full = f"{name}.{suffix}"
        info = self.gguf.tensors.get(full)
        if info is None:
            raise ModelError(
                self.gguf.path, 0, f"tensor {full}",
                "is missing: the file is incomplete or of another architecture",
            )  # fmt: skip
        if info.shape != shape:
            raise ModelError(
                self.gguf.path, 0, f"tensor {full}",
                f"has shape {list(info.shape)}; its hyper-parameters ask for {list(shape)}",
            )  # fmt: skip
        self.used.add(full)
        return Weight(full, info.type, info.shape)

    def vector(self, name: str, n: int, suffix: str = "weight") -> Weight:
        """A vector that kernels read as it is: it has to be F32."""
        weight = self(name, n, suffix=suffix)
        if weight.type.name != "f32":
            raise ModelError(
                self.gguf.path, 0, f"tensor {weight.name}", f"must be F32, not {weight.type}"
            )
        return weight

    def optional(self, name: str, n: int, suffix: str = "weight") -> Weight | None:
        """A vector that the file may leave out."""
        return self.vector(name, n, suffix) if f"{name}.{suffix}" in self.gguf.tensors else None

    @property
    def unused(self) -> list[str]:
        """Tensors of the file that the graph does not read."""
        return [name for name in self.gguf.tensors if name not in self.used]
