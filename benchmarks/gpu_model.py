"""What gpu_check measures on: shapes of models, and random weights of the size that real ones have.

Needs numpy alone, as gpu_check does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.quant import by_name

# Where a type keeps its float16 scales, and how large they are: an element is about scale * code,
# of 6 bit scales and 4 bit codes a few hundred * d.
_SCALES = {"q4_k": ((0, 1.5e-3), (2, 1e-2)), "q6_k": ((208, 1.2e-3),)}
_SCALE = ((0, 1e-2),)  # of the other types


@dataclass(frozen=True)
class Sizes:
    n_layers: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_vocab: int
    n_ctx: int
    n_prompt: int
    n_generated: int


MODELS = {
    "8b": Sizes(32, 4096, 14336, 32, 8, 128, 128256, 1024, 512, 128),
    "tiny": Sizes(2, 256, 512, 4, 2, 64, 512, 128, 64, 3),
}
FREQ_BASE = 500000.0


def matrices_of_layer(s: Sizes) -> dict[str, tuple[int, int]]:
    """(n_in, n_out) by the name that llama.cpp's files have behind "attn_" or "ffn_"."""
    n_heads, n_kv = s.n_heads * s.head_dim, s.n_kv_heads * s.head_dim
    return {
        "q": (s.n_embd, n_heads), "k": (s.n_embd, n_kv), "v": (s.n_embd, n_kv),
        "o": (n_heads, s.n_embd), "gate": (s.n_embd, s.n_ff), "up": (s.n_embd, s.n_ff),
        "down": (s.n_ff, s.n_embd),
    }  # fmt: skip


def type_of(name: str, layer: int) -> str:
    """Q4_K_M gives half of the layers six bits for the values and what goes back."""
    return "q6_k" if name in ("v", "down") and layer % 2 else "q4_k"


def random_blocks(
    rng: np.random.Generator, kind: str, n_in: int, n_blocks: int
) -> NDArray[np.uint8]:
    """[n_blocks, bytes of a block] of a matrix whose results keep the size of their input."""
    of = by_name(kind)
    blocks: NDArray[Any] = rng.integers(0, 256, (n_blocks, of.bytes), np.uint8)
    for at, size in _SCALES.get(kind, _SCALE):
        d = (rng.choice((-1, 1), n_blocks) * size / np.sqrt(n_in)).astype("<f2")
        blocks[:, at : at + 2] = d.view(np.uint8).reshape(n_blocks, 2)
    return blocks
