"""Qwen2 and Qwen2.5 (arXiv:2407.10671): Llama with biases on q, k and v and neox rotation."""

from __future__ import annotations

from edgellm.kernels.graph import Graph
from edgellm.models import blocks
from edgellm.models.config import Config


def build(c: Config) -> Graph:
    g, rope = Graph(), c.rope("neox")
    x = blocks.embedding(g, c)
    for g.layer in range(c.n_layers):
        h = blocks.rms_norm(g, c, x, "attn_norm")
        x = g.add(x, blocks.attention(g, c, h, rope))
        h = blocks.rms_norm(g, c, x, "ffn_norm")
        x = g.add(x, blocks.gated_ffn(g, c, h))
    blocks.logits(g, c, x)
    return g
