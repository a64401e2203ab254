"""Gemma 3 (arXiv:2503.19786): five sliding-window layers to each global one, norms before and
after every block and on queries and keys, rotation bases apart for the two kinds of layer."""

from __future__ import annotations

import math

from edgellm.kernels.graph import Graph, Rope
from edgellm.models import blocks
from edgellm.models.config import Config, ModelError


def build(c: Config) -> Graph:
    # outliers: with 8-bit activations the 270M diverges ten times as much (KL 0.006 to 0.02)
    g, w, key = Graph(precise=True), c.weights, c.architecture
    window = c.gguf.integer(f"{key}.attention.sliding_window", low=1, high=1 << 24)
    sliding = _sliding_layers(c)
    # linear scaling, where a file has it, stretches the global layers only
    everywhere = Rope(c.rope_dim, c.rope_base, "neox", c.rope_scale)
    local_base = c.gguf.number(f"{key}.rope.freq_base_swa", 10000.0, low=1e-3, high=1e15)
    local = Rope(c.rope_dim, local_base, "neox")
    # the 27B model scales queries by the width of the model over its heads, not of a head
    scale = (c.n_embd / c.n_heads if c.n_layers == 62 else c.head_dim) ** -0.5
    x = g.scale(blocks.embedding(g, c), math.sqrt(c.n_embd))
    for g.layer in range(c.n_layers):
        block = f"blk.{g.layer}"
        rope, reach = (local, window) if sliding[g.layer] else (everywhere, None)
        h = g.rms_norm(x, w.vector(f"{block}.attn_norm", c.n_embd), c.eps)
        h = blocks.attention(g, c, h, rope, window=reach, scale=scale, head_norm=True)
        h = g.rms_norm(h, w.vector(f"{block}.post_attention_norm", c.n_embd), c.eps)
        x = g.add(x, h)
        h = g.rms_norm(x, w.vector(f"{block}.ffn_norm", c.n_embd), c.eps)
        h = blocks.gated_ffn(g, c, h, "geglu")
        h = g.rms_norm(h, w.vector(f"{block}.post_ffw_norm", c.n_embd), c.eps)
        x = g.add(x, h)
    g.layer = None
    blocks.logits(g, c, x)
    return g


def _sliding_layers(c: Config) -> list[bool]:
    """Which layers see only the window: by the file's pattern, else all but every sixth."""
    key = f"{c.architecture}.attention.sliding_window_pattern"
    value = c.gguf.metadata.get(key, 6)
    if isinstance(value, int):
        period = c.gguf.integer(key, 6, low=1, high=1024)
        return [(layer + 1) % period != 0 for layer in range(c.n_layers)]
    flags = [bool(flag) for flag in c.gguf.integers(key)]
    if len(flags) != c.n_layers:
        raise ModelError(c.gguf.path, 0, key, f"has {len(flags)} entries for {c.n_layers} layers")
    return flags
