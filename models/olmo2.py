"""OLMo 2 and 3 (arXiv:2501.00656): no norm before a block but one after it, and one over all
queries and all keys. OLMo 3 has sliding windows, whose layers rotate without scaling."""

from __future__ import annotations

from edgellm.kernels.graph import Graph
from edgellm.models import blocks
from edgellm.models.config import Config


def build(c: Config) -> Graph:
    g = Graph()
    window = c.integer("attention.sliding_window", 0, 1 << 24, 0) or None
    sliding = c.sliding_layers(4) if window else [False] * c.n_layers
    everywhere, local = c.rope("neox"), c.rope("neox", scaled=False)
    x = blocks.embedding(g, c)
    for g.layer in range(c.n_layers):
        rope, reach = (local, window) if sliding[g.layer] else (everywhere, None)
        h = blocks.attention(g, c, x, rope, window=reach, qk_norm=blocks.rms_norm)
        x = g.add(x, blocks.rms_norm(g, c, h, "post_attention_norm"))
        h = blocks.gated_ffn(g, c, x)
        x = g.add(x, blocks.rms_norm(g, c, h, "post_ffw_norm"))
    blocks.logits(g, c, x)
    return g
