"""Gemma 3 (arXiv:2503.19786): five sliding-window layers to each global one, norms before and
after every block and on queries and keys, rotation bases apart for the two kinds of layer."""

from __future__ import annotations

import math

from edgellm.kernels.graph import Graph
from edgellm.models import blocks
from edgellm.models.config import Config


def build(c: Config) -> Graph:
    # with 8-bit activations these inputs move the loss of the 270M by 0.001 to 0.006, all others
    # together by less than 0.001
    g = Graph(precise=("attn_q", "attn_k", "attn_v", "attn_output", "ffn_down"))
    window = c.integer("attention.sliding_window", 1, 1 << 24)
    sliding = c.sliding_layers(6)
    # linear scaling, where a file has it, stretches the global layers only
    everywhere = c.rope("neox")
    local_base = c.number("rope.freq_base_swa", 1e-3, 1e15, 10000.0)
    local = c.rope("neox", base=local_base, scaled=False)
    # the 27B model scales queries by the width of the model over its heads, not of a head
    scale = (c.n_embd / c.n_heads if c.n_layers == 62 else c.head_dim) ** -0.5
    x = g.scale(blocks.embedding(g, c), math.sqrt(c.n_embd))
    for g.layer in range(c.n_layers):
        rope, reach = (local, window) if sliding[g.layer] else (everywhere, None)
        h = blocks.rms_norm(g, c, x, "attn_norm")
        h = blocks.attention(
            g, c, h, rope, window=reach, scale=scale, qk_norm=blocks.head_norm
        )  # fmt: skip
        x = g.add(x, blocks.rms_norm(g, c, h, "post_attention_norm"))
        h = blocks.rms_norm(g, c, x, "ffn_norm")
        h = blocks.gated_ffn(g, c, h, Graph.geglu)
        x = g.add(x, blocks.rms_norm(g, c, h, "post_ffw_norm"))
    x = blocks.logits(g, c, x)
    if cap := c.number("final_logit_softcapping", 0.0, 1e6, 0.0):
        g.softcap(x, cap)
    return g
