"""gpt-oss (arXiv:2508.10925): experts with biases and a clamped SwiGLU, every other layer a window,
and for each head a learned score that takes its share of the attention."""

from __future__ import annotations

from edgellm.kernels.graph import Graph
from edgellm.models import blocks
from edgellm.models.config import Config


def build(c: Config) -> Graph:
    g, rope = Graph(), c.rope("neox")
    window = c.integer("attention.sliding_window", 1, 1 << 24)
    sliding = c.sliding_layers(2)
    x = blocks.embedding(g, c)
    for g.layer in range(c.n_layers):
        reach = window if sliding[g.layer] else None
        h = blocks.rms_norm(g, c, x, "attn_norm")
        x = g.add(x, blocks.attention(g, c, h, rope, window=reach, has_sinks=True))
        h = blocks.rms_norm(g, c, x, "post_attention_norm")
        h = blocks.experts_ffn(
            g, c, h, normalize=True, activation=Graph.swiglu_clamped, has_biases=True
        )  # fmt: skip
        x = g.add(x, h)
    blocks.logits(g, c, x)
    return g
