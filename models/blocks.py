"""Pieces that architectures share. Names are the GGUF tensors' names."""

from __future__ import annotations

from edgellm.kernels.graph import Graph, Rope, Tensor
from edgellm.models.config import Config


def embedding(g: Graph, c: Config) -> Tensor:
    """Rows of token_embd for the step's tokens."""
    return g.embed(c.weights("token_embd", c.n_embd, vocabulary_size(c)))


def vocabulary_size(c: Config) -> int:
    """Rows of the embedding table; whether the tokenizer agrees is checked with the vocabulary."""
    table = c.gguf.tensors.get("token_embd.weight")
    return table.rows if table is not None else 0  # a missing table is named when it is asked for


def attention(
    g: Graph, c: Config, x: Tensor, rope: Rope, *, window: int | None = None,
    scale: float | None = None, head_norm: bool = False, bias_required: bool = False,
) -> Tensor:  # fmt: skip
    """Grouped-query attention on normalized x; biases where the file has them.

    ``head_norm`` normalizes queries and keys head by head before the rotation.
    """
    w, block = c.weights, f"blk.{g.layer}"
    n_q, n_kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim

    def project(name: str, n_out: int) -> Tensor:
        name = f"{block}.{name}"
        find = w.vector if bias_required else w.optional
        return g.linear(x, w(name, c.n_embd, n_out), find(name, n_out, "bias"))

    q, k, v = project("attn_q", n_q), project("attn_k", n_kv), project("attn_v", n_kv)
    if head_norm:
        q = g.rms_norm(q, w.vector(f"{block}.attn_q_norm", c.head_dim), c.eps)
        k = g.rms_norm(k, w.vector(f"{block}.attn_k_norm", c.head_dim), c.eps)
    out = g.attention(
        g.rope(q, c.head_dim, rope), g.rope(k, c.head_dim, rope), v,
        n_heads=c.n_heads, n_kv_heads=c.n_kv_heads, head_dim=c.head_dim,
        scale=c.head_dim**-0.5 if scale is None else scale, window=window,
    )  # fmt: skip
    name = f"{block}.attn_output"
    return g.linear(out, w(name, n_q, c.n_embd), w.optional(name, c.n_embd, "bias"))


def gated_ffn(g: Graph, c: Config, x: Tensor, activation: str = "swiglu") -> Tensor:
    """down(activation(gate(x)) * up(x))"""
    w, block = c.weights, f"blk.{g.layer}"
    gate = g.linear(x, w(f"{block}.ffn_gate", c.n_embd, c.n_ff))
    up = g.linear(x, w(f"{block}.ffn_up", c.n_embd, c.n_ff))
    hidden = g.swiglu(gate, up) if activation == "swiglu" else g.geglu(gate, up)
    return g.linear(hidden, w(f"{block}.ffn_down", c.n_ff, c.n_embd))


def experts_ffn(g: Graph, c: Config, x: Tensor, n_ff: int, normalize: bool) -> Tensor:
    """The gated feed-forward of the chosen experts, summed by their softmax weights."""
    w, block, n = c.weights, f"blk.{g.layer}", c.n_experts
    logits = g.linear(x, w(f"{block}.ffn_gate_inp", c.n_embd, n))
    route = g.moe_route(logits, c.n_experts_used, normalize)
    gate = g.moe_linear(x, route, w(f"{block}.ffn_gate_exps", c.n_embd, n_ff, n))
    up = g.moe_linear(x, route, w(f"{block}.ffn_up_exps", c.n_embd, n_ff, n))
    down = w(f"{block}.ffn_down_exps", n_ff, c.n_embd, n)
    return g.moe_sum(g.moe_linear(g.swiglu(gate, up), route, down), route)


def logits(g: Graph, c: Config, x: Tensor) -> Tensor:
    """Norm and output matrix for the wanted tokens; the embedding table where there is none."""
    w = c.weights
    x = g.rms_norm(g.select(x), w.vector("output_norm", c.n_embd), c.eps)
    name = "output" if "output" in w else "token_embd"
    return g.linear(x, w(name, c.n_embd, vocabulary_size(c)))
