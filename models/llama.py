"""Llama (arXiv:2302.13971, 2307.09288, 2407.21783) and Mixtral (arXiv:2401.04088)."""

from __future__ import annotations

from edgellm.kernels.graph import Graph
from edgellm.models import blocks
from edgellm.models.config import Config


def build(c: Config) -> Graph:
    g, rope = Graph(), c.rope("norm")
    x = blocks.embedding(g, c)
    for g.layer in range(c.n_layers):
        h = blocks.rms_norm(g, c, x, "attn_norm")
        x = g.add(x, blocks.attention(g, c, h, rope))
        h = blocks.rms_norm(g, c, x, "ffn_norm")
        if c.n_experts:
            x = g.add(x, blocks.experts_ffn(g, c, h, normalize=True))
        else:
            x = g.add(x, blocks.gated_ffn(g, c, h))
    blocks.logits(g, c, x)
    return g
