"""SmolLM3 (Hugging Face): Llama without rotation in every fourth layer (arXiv:2501.18795)."""

from __future__ import annotations

from edgellm.kernels.graph import Graph
from edgellm.models import blocks
from edgellm.models.config import Config


def build(c: Config) -> Graph:
    g, rope = Graph(), c.rope("norm")
    x = blocks.embedding(g, c)
    for g.layer in range(c.n_layers):
        h = blocks.rms_norm(g, c, x, "attn_norm")
        is_rotated = (g.layer + 1) % 4 != 0
        x = g.add(x, blocks.attention(g, c, h, rope if is_rotated else None))
        h = blocks.rms_norm(g, c, x, "ffn_norm")
        x = g.add(x, blocks.gated_ffn(g, c, h))
    blocks.logits(g, c, x)
    return g
