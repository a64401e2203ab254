"""Gemma (arXiv:2403.08295): embeddings scaled by the root of their length, GeGLU."""

from __future__ import annotations

import math

from edgellm.kernels.graph import Graph
from edgellm.models import blocks
from edgellm.models.config import Config


def build(c: Config) -> Graph:
    g, rope = Graph(), c.rope("neox")
    x = g.scale(blocks.embedding(g, c), math.sqrt(c.n_embd))
    for g.layer in range(c.n_layers):
        h = blocks.rms_norm(g, c, x, "attn_norm")
        x = g.add(x, blocks.attention(g, c, h, rope))
        h = blocks.rms_norm(g, c, x, "ffn_norm")
        x = g.add(x, blocks.gated_ffn(g, c, h, Graph.geglu))
    blocks.logits(g, c, x)
    return g
