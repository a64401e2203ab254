"""GLM-4.5 (arXiv:2508.06471): dense layers first, then experts chosen by sigmoids with a bias that
balances their load (arXiv:2408.15664), beside a shared expert."""

from __future__ import annotations

from edgellm.kernels.graph import Graph
from edgellm.models import blocks
from edgellm.models.config import Config


def build(c: Config) -> Graph:
    g, rope = Graph(), c.rope("neox")
    n_dense = c.integer("leading_dense_block_count", 0, c.n_layers, 0)
    n_shared = c.integer("expert_shared_count", 0, 1024)
    sigmoid = c.integer("expert_gating_func", 0, 2, 2) != 1
    normalize = c.flag("expert_weights_norm", False)
    scale = c.number("expert_weights_scale", 0.0, 1e3, 1.0) or 1.0
    x = blocks.embedding(g, c)
    for g.layer in range(c.n_layers):
        h = blocks.rms_norm(g, c, x, "attn_norm")
        x = g.add(x, blocks.attention(g, c, h, rope, qk_norm=blocks.optional_head_norm))
        h = blocks.rms_norm(g, c, x, "post_attention_norm")
        if g.layer < n_dense:
            x = g.add(x, blocks.gated_ffn(g, c, h))
            continue
        out = blocks.experts_ffn(g, c, h, normalize=normalize, sigmoid=sigmoid, scale=scale)
        if n_shared:
            n_ff = n_shared * c.n_ff_expert
            out = g.add(out, blocks.gated_ffn(g, c, h, n_ff=n_ff, suffix="_shexp"))
        x = g.add(x, out)
    blocks.logits(g, c, x)
    return g
