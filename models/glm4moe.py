"""GLM-4.5 (arXiv:2508.06471): dense layers first, then experts chosen by sigmoids with a bias that
balances their load (arXiv:2408.15664), beside a shared expert."""

from __future__ import annotations

from edgellm.kernels.graph import Graph
from edgellm.models import blocks
from edgellm.models.config import Config


def build(c: Config) -> Graph:
    g, rope = Graph(), c.rope("neox")
    x = blocks.embedding(g, c)
    for g.layer in range(c.n_layers):
        h = blocks.rms_norm(g, c, x, "attn_norm")
        x = g.add(x, blocks.attention(g, c, h, rope, qk_norm=blocks.optional_head_norm))
        h = blocks.rms_norm(g, c, x, "post_attention_norm")
        x = g.add(x, blocks.mixed_ffn(g, c, h, blocks.SIGMOID))
    blocks.logits(g, c, x)
    return g
