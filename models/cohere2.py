"""Command R7B (arXiv:2504.00698): attention and feed-forward side by side; three layers with a
window and rotation to each that sees everything without positions."""

from __future__ import annotations

from edgellm.kernels.graph import Graph
from edgellm.models import blocks
from edgellm.models.config import Config


def build(c: Config) -> Graph:
    g, rope = Graph(), c.rope("norm")
    window = c.integer("attention.sliding_window", 1, 1 << 24)
    sliding = c.sliding_layers(4)
    x = blocks.embedding(g, c)
    for g.layer in range(c.n_layers):
        place, reach = (rope, window) if sliding[g.layer] else (None, None)
        h = blocks.layer_norm(g, c, x, "attn_norm")
        h = g.add(
            blocks.attention(g, c, h, place, window=reach), blocks.gated_ffn(g, c, h)
        )  # fmt: skip
        x = g.add(x, h)
    x = blocks.logits(g, c, x, blocks.layer_norm)
    g.scale(x, c.number("logit_scale", 0.0, 1e6) or 1.0)
    return g
