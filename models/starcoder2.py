"""StarCoder2 (arXiv:2402.19173): layer norms, biases everywhere, a plain feed-forward."""

from __future__ import annotations

from edgellm.kernels.graph import Graph
from edgellm.models import blocks
from edgellm.models.config import Config


def build(c: Config) -> Graph:
    g, rope = Graph(), c.rope("neox")
    x = blocks.embedding(g, c)
    for g.layer in range(c.n_layers):
        h = blocks.layer_norm(g, c, x, "attn_norm")
        x = g.add(x, blocks.attention(g, c, h, rope))
        h = blocks.layer_norm(g, c, x, "ffn_norm")
        x = g.add(x, blocks.plain_ffn(g, c, h))
    blocks.logits(g, c, x, blocks.layer_norm)
    return g
