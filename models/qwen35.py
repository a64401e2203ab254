"""Qwen3.5 (after Qwen3-Next): three layers of the gated delta rule (arXiv:2412.06464) to each of
gated attention (arXiv:2505.06708)."""

from __future__ import annotations

from edgellm.kernels.graph import Graph, Rope, Tensor
from edgellm.models import blocks
from edgellm.models.config import Config


def build(c: Config, feed_forward: blocks.FeedForward = blocks.gated_ffn) -> Graph:
    # the rotation's sections are for pictures; for text all hold the same position
    g, rope = Graph(), c.rope("neox")
    if c.has("attention.recurrent_layers"):
        recurrent = c.flags("attention.recurrent_layers")
    else:
        recurrent = c.sliding_layers(4, "full_attention_interval")
    x = blocks.embedding(g, c)
    for g.layer in range(c.n_layers):
        h = blocks.rms_norm(g, c, x, "attn_norm")
        x = g.add(x, _delta_net(g, c, h) if recurrent[g.layer] else _attention(g, c, h, rope))
        h = blocks.rms_norm(g, c, x, "post_attention_norm")
        x = g.add(x, feed_forward(g, c, h))
    blocks.logits(g, c, x)
    return g


def _attention(g: Graph, c: Config, x: Tensor, rope: Rope) -> Tensor:
    """Each head of attn_q holds a query and a gate for the head's output."""
    layer = g.layer or 0
    n_heads, n_kv_heads, dim = c.heads[layer], c.kv_heads[layer], c.head_dim
    q, k, v = blocks.qkv(g, c, x, 2 * n_heads * dim, n_kv_heads * dim, n_kv_heads * c.v_dim)
    gate = g.slice(q, dim, dim, 2 * dim)
    q = blocks.head_norm(g, c, g.slice(q, 0, dim, 2 * dim), "attn_q_norm")
    k = blocks.head_norm(g, c, k, "attn_k_norm")
    out = g.attention(
        g.rope(q, dim, rope), g.rope(k, dim, rope), v,
        n_heads=n_heads, n_kv_heads=n_kv_heads, scale=dim**-0.5,
    )  # fmt: skip
    return blocks.linear(g, c, g.mul(out, g.sigmoid(gate)), "attn_output", c.n_embd)


def _delta_net(g: Graph, c: Config, x: Tensor) -> Tensor:
    w, dim = c.weights, c.integer("ssm.state_size", 16, 4096)
    n_k_heads = c.integer("ssm.group_count", 1, 1024)
    n_v_heads = c.integer("ssm.time_step_rank", 1, 1024)
    n_k, n_v = n_k_heads * dim, n_v_heads * dim
    if c.integer("ssm.inner_size", 1, 1 << 22) != n_v or n_v_heads % n_k_heads or dim % 16:
        raise c.refuse("ssm.inner_size", f"must be {n_v_heads} heads, shared by {n_k_heads} key "
                       f"heads, of {dim} elements, a multiple of 16")  # fmt: skip
    mixed = blocks.linear(g, c, x, "attn_qkv", 2 * n_k + n_v)
    n_taps = c.integer("ssm.conv_kernel", 2, 64)
    taps = w.vector(blocks.named(g, "ssm_conv1d"), n_taps, 2 * n_k + n_v)
    mixed = g.silu(g.conv1d(mixed, taps))
    q, k = (g.l2_norm(g.slice(mixed, i * n_k, n_k), dim, c.eps) for i in range(2))
    v = g.slice(mixed, 2 * n_k, n_v)
    step = w(blocks.named(g, "ssm_alpha"), c.n_embd, n_v_heads)
    bias = w.vector(blocks.named(g, "ssm_dt"), n_v_heads, suffix="bias")
    rate = w.vector(blocks.named(g, "ssm_a"), n_v_heads, suffix="")
    decay = g.mul(g.softplus(g.linear(x, step, bias)), rate)
    beta = g.sigmoid(blocks.linear(g, c, x, "ssm_beta", n_v_heads))
    out = g.delta_rule(q, k, v, decay, beta, n_k_heads=n_k_heads, n_v_heads=n_v_heads)
    out = g.rms_norm(out, w.vector(blocks.named(g, "ssm_norm"), dim), c.eps)
    gate = blocks.linear(g, c, x, "attn_gate", n_v)
    return blocks.linear(g, c, g.swiglu(gate, out), "ssm_out", c.n_embd)
