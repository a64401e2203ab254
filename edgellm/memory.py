"""What a model will take of the memory, reckoned from its file alone."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from edgellm.quant.gguf import GGUF

STEP_TOKENS = 256  # tokens of one prefill step, for which the activations are laid out
KV_ELEMENT = 2  # bytes: f16


@dataclass(frozen=True)
class Bill:
    """Bytes. The arena is an estimate; the rest follows from the file."""

    n_ctx: int
    weights: int
    kv_per_token: int
    arena: int
    window: int | None  # tokens that some layers keep at most, so that the cache stays below `kv`

    @property
    def kv(self) -> int:
        """The cache of one sequence as long as the context."""
        return self.kv_per_token * self.n_ctx

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.arena


def bill(model: GGUF, n_ctx: int | None = None) -> Bill | None:
    """None for a file that holds no language model, as a vocabulary."""
    arch = model.string("general.architecture", "")
    n_layers = model.integer(f"{arch}.block_count", 0, low=1, high=4096)
    n_embd = model.integer(f"{arch}.embedding_length", 0, low=1, high=1 << 24)
    n_heads = _most(model.integers(f"{arch}.attention.head_count", None))
    if not (n_layers and n_embd and n_heads and model.tensors):
        return None
    of_heads = model.integers(f"{arch}.attention.head_count_kv", np.array([n_heads]))
    kv_heads = [int(of_heads[min(layer, len(of_heads) - 1)]) for layer in range(n_layers)]
    key = model.integer(f"{arch}.attention.key_length", n_embd // n_heads, low=1, high=1 << 16)
    value = model.integer(f"{arch}.attention.value_length", n_embd // n_heads, low=1, high=1 << 16)
    n_ff = _most(model.integers(f"{arch}.feed_forward_length", None))
    # Residual and its norm, queries with the attention's result, keys and values, both ffn halves.
    row = 2 * n_embd + 2 * n_heads * key + max(kv_heads) * (key + value) + 2 * n_ff
    trained = model.integer(f"{arch}.context_length", 2048, low=1)
    return Bill(
        n_ctx=n_ctx or trained,
        weights=sum(tensor.n_bytes for tensor in model.tensors.values()),
        kv_per_token=sum(kv_heads) * (key + value) * KV_ELEMENT,
        arena=STEP_TOKENS * row * 4 + 4 * _rows(model, ("output.weight", "token_embd.weight")),
        window=model.integer(f"{arch}.attention.sliding_window", None),
    )


def _most(values: Iterable[int] | None) -> int:
    """The largest of a value per layer, which a file may also give once for all; 0 for none."""
    return max((int(value) for value in values), default=0) if values is not None else 0


def _rows(model: GGUF, names: Iterable[str]) -> int:
    """The vocabulary: rows of the first of these tensors that is there."""
    return next((model.tensors[name].rows for name in names if name in model.tensors), 0)
