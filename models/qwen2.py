"""Qwen2 and Qwen2.5 (arXiv:2407.10671): Llama with biases on q, k and v and neox rotation."""

from __future__ import annotations

from edgellm.kernels.graph import Graph, Rope
from edgellm.models import blocks
from edgellm.models.config import Config


def build(c: Config) -> Graph:
    g, w = Graph(), c.weights
    rope = Rope(c.rope_dim, c.rope_base, "neox", c.rope_scale)
    x = blocks.embedding(g, c)
    for g.layer in range(c.n_layers):
        h = g.rms_norm(x, w.vector(f"blk.{g.layer}.attn_norm", c.n_embd), c.eps)
        x = g.add(x, blocks.attention(g, c, h, rope, bias_required=True))
        h = g.rms_norm(x, w.vector(f"blk.{g.layer}.ffn_norm", c.n_embd), c.eps)
        x = g.add(x, blocks.gated_ffn(g, c, h))
    g.layer = None
    blocks.logits(g, c, x)
    return g
