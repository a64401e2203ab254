"""Granite 3 (IBM): Llama with factors on embeddings, scores, residuals and logits (after maximal
update parametrization, arXiv:2203.03466)."""

from __future__ import annotations

from edgellm.kernels.graph import Graph
from edgellm.models import blocks
from edgellm.models.config import Config


def build(c: Config) -> Graph:
    g = Graph()
    rope = c.rope("norm") if c.flag("rope.scaling.finetuned", True) else None
    scale = c.number("attention.scale", 0.0, 1e3, 0.0) or None
    residual = c.number("residual_scale", 0.0, 1e3, 0.0) or 1.0
    x = blocks.embedding(g, c)
    if factor := c.number("embedding_scale", 0.0, 1e4, 0.0):
        x = g.scale(x, factor)
    for g.layer in range(c.n_layers):
        h = blocks.rms_norm(g, c, x, "attn_norm")
        x = g.add(x, g.scale(blocks.attention(g, c, h, rope, scale=scale), residual))
        h = blocks.rms_norm(g, c, x, "ffn_norm")
        x = g.add(x, g.scale(blocks.gated_ffn(g, c, h), residual))
    x = blocks.logits(g, c, x)
    g.scale(x, 1 / c.number("logit_scale", 1e-6, 1e6))
    return g
