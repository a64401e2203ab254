"""GLM-4-0414 (arXiv:2406.12793): norms before and after each block, half of each head rotated."""

from __future__ import annotations

from edgellm.kernels.graph import Graph
from edgellm.models import blocks
from edgellm.models.config import Config


def build(c: Config) -> Graph:
    g = Graph()
    # a file with sections for pictures pairs halves; for text all sections hold the same position
    rope = c.rope("neox" if c.has("rope.dimension_sections") else "norm")
    x = blocks.embedding(g, c)
    for g.layer in range(c.n_layers):
        h = blocks.rms_norm(g, c, x, "attn_norm")
        h = blocks.attention(g, c, h, rope)
        x = g.add(x, blocks.rms_norm(g, c, h, "post_attention_norm"))
        h = blocks.rms_norm(g, c, x, "ffn_norm")
        h = blocks.gated_ffn(g, c, h)
        x = g.add(x, blocks.rms_norm(g, c, h, "post_ffw_norm"))
    blocks.logits(g, c, x)
    return g
