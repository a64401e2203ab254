"""Phi-3, Phi-3.5 and Phi-4 (arXiv:2404.14219): Llama with fused matrices and LongRoPE."""

from __future__ import annotations

from edgellm.kernels.graph import Graph
from edgellm.models import blocks
from edgellm.models.config import Config


def build(c: Config) -> Graph:
    # files state a sliding window of 2047 for the 4k model, within its context of 4096; like
    # llama.cpp all layers see everything
    g, rope = Graph(), c.rope("neox")
    x = blocks.embedding(g, c)
    for g.layer in range(c.n_layers):
        h = blocks.rms_norm(g, c, x, "attn_norm")
        x = g.add(x, blocks.attention(g, c, h, rope))
        h = blocks.rms_norm(g, c, x, "ffn_norm")
        x = g.add(x, blocks.gated_ffn(g, c, h))
    blocks.logits(g, c, x)
    return g
