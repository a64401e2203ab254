"""LFM2 (arXiv:2511.23404): most layers mix tokens by a gated short convolution, the others by
attention."""

from __future__ import annotations

from edgellm.kernels.graph import Graph, Tensor
from edgellm.models import blocks
from edgellm.models.config import Config


def build(c: Config) -> Graph:
    g, rope = Graph(), c.rope("neox")
    window = c.integer("attention.sliding_window", 0, 1 << 24, 0) or None
    n_taps = c.integer("shortconv.l_cache", 2, 64)
    x = blocks.embedding(g, c)
    for g.layer in range(c.n_layers):
        h = blocks.rms_norm(g, c, x, "attn_norm")
        if c.kv_heads[g.layer]:
            h = blocks.attention(g, c, h, rope, window=window, qk_norm=blocks.head_norm)
        else:
            h = _short_convolution(g, c, h, n_taps)
        x = g.add(x, h)
        h = blocks.rms_norm(g, c, x, "ffn_norm")
        x = g.add(x, blocks.gated_ffn(g, c, h))
    blocks.logits(g, c, x, name="token_embd_norm")
    return g


def _short_convolution(g: Graph, c: Config, x: Tensor, n_taps: int) -> Tensor:
    """out(gate_out * conv(gate_in * x))"""
    n = c.n_embd
    both = blocks.linear(g, c, x, "shortconv.in_proj", 3 * n)
    gate_in, gate_out, x = (g.slice(both, i * n, n) for i in range(3))
    taps = c.weights.vector(blocks.named(g, "shortconv.conv"), n_taps, n)
    x = g.mul(gate_out, g.conv1d(g.mul(gate_in, x), taps))
    return blocks.linear(g, c, x, "shortconv.out_proj", n)
