"""Llama (arXiv:2302.13971, 2307.09288, 2407.21783) and Mixtral (arXiv:2401.04088)."""

from __future__ import annotations

from edgellm.kernels.graph import Graph, Rope
from edgellm.models import blocks
from edgellm.models.config import Config


def build(c: Config) -> Graph:
    g, w = Graph(), c.weights
    factors = w.optional("rope_freqs", c.rope_dim // 2)
    rope = Rope(c.rope_dim, c.rope_base, "norm", c.rope_scale, factors)
    x = blocks.embedding(g, c)
    for g.layer in range(c.n_layers):
        h = g.rms_norm(x, w.vector(f"blk.{g.layer}.attn_norm", c.n_embd), c.eps)
        x = g.add(x, blocks.attention(g, c, h, rope))
        h = g.rms_norm(x, w.vector(f"blk.{g.layer}.ffn_norm", c.n_embd), c.eps)
        if c.n_experts:
            x = g.add(x, blocks.experts_ffn(g, c, h, c.n_ff, normalize=True))
        else:
            x = g.add(x, blocks.gated_ffn(g, c, h))
    g.layer = None
    blocks.logits(g, c, x)
    return g
