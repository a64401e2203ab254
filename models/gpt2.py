"""GPT-2 (Radford and others, 2019): positions are learned vectors added to the embeddings."""

from __future__ import annotations

from edgellm.kernels.graph import Graph
from edgellm.models import blocks
from edgellm.models.config import Config


def build(c: Config) -> Graph:
    g = Graph()
    x = blocks.embedding(g, c)
    x = g.add(x, g.position_rows(c.weights("position_embd", c.n_embd, c.n_ctx)))
    for g.layer in range(c.n_layers):
        h = blocks.layer_norm(g, c, x, "attn_norm")
        x = g.add(x, blocks.attention(g, c, h, None))
        h = blocks.layer_norm(g, c, x, "ffn_norm")
        x = g.add(x, blocks.plain_ffn(g, c, h))
    blocks.logits(g, c, x, blocks.layer_norm)
    return g
