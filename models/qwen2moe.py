"""Qwen1.5-MoE and Qwen2-57B-A14B (arXiv:2407.10671): Qwen2 with experts, and a shared expert behind
a gate of its own."""

from __future__ import annotations

from edgellm.kernels.graph import Graph, Tensor
from edgellm.models import blocks
from edgellm.models.config import Config


def build(c: Config) -> Graph:
    g, rope = Graph(), c.rope("neox")
    x = blocks.embedding(g, c)
    for g.layer in range(c.n_layers):
        h = blocks.rms_norm(g, c, x, "attn_norm")
        x = g.add(x, blocks.attention(g, c, h, rope))
        h = blocks.rms_norm(g, c, x, "ffn_norm")
        h = g.add(blocks.experts_ffn(g, c, h, normalize=False), shared_expert(g, c, h))
        x = g.add(x, h)
    blocks.logits(g, c, x)
    return g


def shared_expert(g: Graph, c: Config, x: Tensor) -> Tensor:
    """sigmoid(gate . x) * ffn(x)"""
    n_ff = c.integer("expert_shared_feed_forward_length", 0, 1 << 22, 0) or c.n_ff[g.layer or 0]
    out = blocks.gated_ffn(g, c, x, n_ff=n_ff, suffix="_shexp")
    return g.mul(out, g.sigmoid(blocks.linear(g, c, x, "ffn_gate_inp_shexp", 1)))
