"""Gemma 2 (arXiv:2408.00118): every other layer sees a window, norms before and after each block,
scores and logits capped by tanh."""

from __future__ import annotations

import math

from edgellm.kernels.graph import Graph
from edgellm.models import blocks
from edgellm.models.config import Config


def build(c: Config) -> Graph:
    g, rope = Graph(), c.rope("neox")
    window = c.integer("attention.sliding_window", 1, 1 << 24, 4096)
    sliding = c.sliding_layers(2)
    cap = c.number("attn_logit_softcapping", 1e-3, 1e6, 50.0)
    # the 27B model scales queries by the width of the model over its heads, not of a head
    scale = (c.n_embd / c.n_heads if c.n_layers == 46 else c.head_dim) ** -0.5
    x = g.scale(blocks.embedding(g, c), math.sqrt(c.n_embd))
    for g.layer in range(c.n_layers):
        reach = window if sliding[g.layer] else None
        h = blocks.rms_norm(g, c, x, "attn_norm")
        h = blocks.attention(g, c, h, rope, window=reach, scale=scale, softcap=cap)
        x = g.add(x, blocks.rms_norm(g, c, h, "post_attention_norm"))
        h = blocks.rms_norm(g, c, x, "ffn_norm")
        h = blocks.gated_ffn(g, c, h, Graph.geglu)
        x = g.add(x, blocks.rms_norm(g, c, h, "post_ffw_norm"))
    x = blocks.logits(g, c, x)
    g.softcap(x, c.number("final_logit_softcapping", 1e-3, 1e6, 30.0))
    return g
