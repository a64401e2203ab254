"""Mistral 3 and Ministral 3: Llama with YaRN and queries that grow with the position."""

from __future__ import annotations

from edgellm.kernels.graph import Graph
from edgellm.models import blocks
from edgellm.models.config import Config


def build(c: Config) -> Graph:
    g, rope = Graph(), c.rope("norm")
    temperature = None
    if growth := c.number("attention.temperature_scale", 0.0, 100.0, 0.0):
        temperature = growth, c.integer("rope.scaling.original_context_length", 1, 1 << 24, c.n_ctx)
    x = blocks.embedding(g, c)
    for g.layer in range(c.n_layers):
        h = blocks.rms_norm(g, c, x, "attn_norm")
        x = g.add(x, blocks.attention(g, c, h, rope, temperature=temperature))
        h = blocks.rms_norm(g, c, x, "ffn_norm")
        if c.n_experts:
            x = g.add(x, blocks.experts_ffn(g, c, h, normalize=True))
        else:
            x = g.add(x, blocks.gated_ffn(g, c, h))
    blocks.logits(g, c, x)
    return g
