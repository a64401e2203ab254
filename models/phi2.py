"""Phi-2 (and Phi-1.5, arXiv:2309.05463): attention and feed-forward read the same norm and are
added together; part of each head is rotated."""

from __future__ import annotations

from edgellm.kernels.graph import Graph
from edgellm.models import blocks
from edgellm.models.config import Config


def build(c: Config) -> Graph:
    g, rope = Graph(), c.rope("neox")
    x = blocks.embedding(g, c)
    for g.layer in range(c.n_layers):
        h = blocks.layer_norm(g, c, x, "attn_norm")
        h = g.add(blocks.attention(g, c, h, rope), blocks.plain_ffn(g, c, h))
        x = g.add(x, h)
    blocks.logits(g, c, x, blocks.layer_norm)
    return g
