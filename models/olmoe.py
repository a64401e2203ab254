"""OLMoE (arXiv:2409.02060): experts in every layer, and one norm over all queries or keys."""

from __future__ import annotations

from edgellm.kernels.graph import Graph
from edgellm.models import blocks
from edgellm.models.config import Config


def build(c: Config) -> Graph:
    g, rope = Graph(), c.rope("neox")
    x = blocks.embedding(g, c)
    for g.layer in range(c.n_layers):
        h = blocks.rms_norm(g, c, x, "attn_norm")
        x = g.add(x, blocks.attention(g, c, h, rope, qk_norm=blocks.rms_norm))
        h = blocks.rms_norm(g, c, x, "ffn_norm")
        x = g.add(x, blocks.experts_ffn(g, c, h, normalize=False))
    blocks.logits(g, c, x)
    return g
