"""Pieces that architectures share. Names are the GGUF tensors' names, without the layer's prefix:
inside a layer "attn_q" is blk.N.attn_q.weight."""

from __future__ import annotations

from collections.abc import Callable

from edgellm.kernels.graph import Graph, Rope, Tensor
from edgellm.models.config import Config

Norm = Callable[[Graph, Config, Tensor, str], Tensor]
FeedForward = Callable[[Graph, Config, Tensor], Tensor]


def named(g: Graph, name: str) -> str:
    """The tensor's whole name: that of the layer at hand, or of the model outside the layers."""
    return name if g.layer is None else f"blk.{g.layer}.{name}"


# ---- in and out ---------------------------------------------------------------------------------


def embedding(g: Graph, c: Config) -> Tensor:
    """Rows of token_embd for the step's tokens."""
    return g.embed(c.weights("token_embd", c.n_embd, vocabulary_size(c)))


def vocabulary_size(c: Config) -> int:
    """Rows of the embedding table; whether the tokenizer agrees is checked with the vocabulary."""
    table = c.gguf.tensors.get("token_embd.weight")
    return table.rows if table is not None else 0  # a missing table is named when it is asked for


SOFTMAX, SIGMOID = 1, 2  # values of expert_gating_func; 0: the architecture's own


def mixed_ffn(g: Graph, c: Config, x: Tensor, gating: int) -> Tensor:
    """DeepSeek's feed-forward (arXiv:2401.06066): dense in the first layers, then chosen experts
    beside shared ones; ``gating`` where the file names none."""
    n_dense = c.integer("leading_dense_block_count", 0, c.n_layers, 0)
    n_shared = c.integer("expert_shared_count", 0, 1024)
    sigmoid = (c.integer("expert_gating_func", 0, 2, 0) or gating) == SIGMOID
    normalize = c.flag("expert_weights_norm", False)
    scale = c.number("expert_weights_scale", 0.0, 1e3, 1.0) or 1.0
    if (g.layer or 0) < n_dense:
        return gated_ffn(g, c, x)
    out = experts_ffn(g, c, x, normalize=normalize, sigmoid=sigmoid, scale=scale)
    if n_shared:
        shared = gated_ffn(g, c, x, n_ff=n_shared * c.n_ff_expert, suffix="_shexp")
        out = g.add(out, shared)
    return out


def logits(g: Graph, c: Config, x: Tensor, norm: Norm | None = None, name: str = "output_norm"
           ) -> Tensor:  # fmt: skip
    """Norm and output matrix for the wanted tokens; the embedding table where there is none."""
    g.layer, w = None, c.weights
    x = (norm or rms_norm)(g, c, g.select(x), name)
    matrix = w("output" if "output" in w else "token_embd", c.n_embd, vocabulary_size(c))
    return g.linear(x, matrix, w.optional("output", vocabulary_size(c), suffix="bias"))


# ---- norms --------------------------------------------------------------------------------------


def rms_norm(g: Graph, c: Config, x: Tensor, name: str) -> Tensor:
    return g.rms_norm(x, c.weights.vector(named(g, name), x.dim), c.eps)


def head_norm(g: Graph, c: Config, x: Tensor, name: str) -> Tensor:
    """rms_norm of each head, with one weight for all."""
    return g.rms_norm(x, c.weights.vector(named(g, name), c.head_dim), c.eps)


def optional_head_norm(g: Graph, c: Config, x: Tensor, name: str) -> Tensor:
    return head_norm(g, c, x, name) if named(g, name) in c.weights else x


def layer_norm(g: Graph, c: Config, x: Tensor, name: str) -> Tensor:
    """With a bias where the file has one."""
    w, name = c.weights, named(g, name)
    return g.layer_norm(x, w.vector(name, x.dim), w.optional(name, x.dim, suffix="bias"), c.eps)


# ---- attention ----------------------------------------------------------------------------------


def linear(g: Graph, c: Config, x: Tensor, name: str, n_out: int) -> Tensor:
    """A matrix, with a bias where the file has one."""
    w, name = c.weights, named(g, name)
    return g.linear(x, w(name, x.dim, n_out), w.optional(name, n_out, suffix="bias"))


def qkv(g: Graph, c: Config, x: Tensor, n_q: int, n_k: int, n_v: int
        ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries, keys and values by one matrix or by three."""
    if named(g, "attn_qkv") in c.weights:
        fused = linear(g, c, x, "attn_qkv", n_q + n_k + n_v)
        return (
            g.slice(fused, 0, n_q), g.slice(fused, n_q, n_k), g.slice(fused, n_q + n_k, n_v)
        )  # fmt: skip
    return (
        linear(g, c, x, "attn_q", n_q), linear(g, c, x, "attn_k", n_k),
        linear(g, c, x, "attn_v", n_v),
    )  # fmt: skip


def attention(
    g: Graph, c: Config, x: Tensor, rope: Rope | None, *, window: int | None = None,
    scale: float | None = None, qk_norm: Norm | None = None, softcap: float | None = None,
    has_sinks: bool = False, temperature: tuple[float, int] | None = None, causal: bool = True,
) -> Tensor:  # fmt: skip
    """Grouped-query attention on normalized x. ``qk_norm`` normalizes queries and keys before the
    rotation; ``rope`` None: a layer without positions; ``temperature``: see Graph.temper."""
    layer = g.layer or 0
    n_heads, n_kv_heads = c.heads[layer], c.kv_heads[layer]
    q, k, v = qkv(g, c, x, n_heads * c.head_dim, n_kv_heads * c.head_dim, n_kv_heads * c.v_dim)
    if qk_norm is not None:
        q, k = qk_norm(g, c, q, "attn_q_norm"), qk_norm(g, c, k, "attn_k_norm")
    if rope is not None:
        q, k = g.rope(q, c.head_dim, rope), g.rope(k, c.head_dim, rope)
    if temperature is not None:
        q = g.temper(q, *temperature)
    sinks = c.weights.vector(named(g, "attn_sinks"), n_heads) if has_sinks else None
    out = g.attention(
        q, k, v, n_heads=n_heads, n_kv_heads=n_kv_heads, window=window, softcap=softcap,
        sinks=sinks, scale=c.head_dim**-0.5 if scale is None else scale, causal=causal,
    )  # fmt: skip
    return linear(g, c, out, "attn_output", c.n_embd)


# ---- feed-forward -------------------------------------------------------------------------------

Activation = Callable[[Graph, Tensor, Tensor], Tensor]


def gated_ffn(
    g: Graph, c: Config, x: Tensor, activation: Activation = Graph.swiglu, *,
    n_ff: int | None = None, suffix: str = "",
) -> Tensor:  # fmt: skip
    """down(activation(gate(x), up(x))); without ffn_gate the first half of ffn_up is the gate.
    ``suffix`` "_shexp" are the shared experts of a mixture."""
    n_ff = n_ff or c.n_ff[g.layer or 0]
    if named(g, f"ffn_gate{suffix}") in c.weights:
        gate = linear(g, c, x, f"ffn_gate{suffix}", n_ff)
        up = linear(g, c, x, f"ffn_up{suffix}", n_ff)
    else:
        both = linear(g, c, x, f"ffn_up{suffix}", 2 * n_ff)
        gate, up = g.slice(both, 0, n_ff), g.slice(both, n_ff, n_ff)
    return linear(g, c, activation(g, gate, up), f"ffn_down{suffix}", c.n_embd)


def plain_ffn(g: Graph, c: Config, x: Tensor) -> Tensor:
    """down(gelu(up(x)))"""
    hidden = linear(g, c, x, "ffn_up", c.n_ff[g.layer or 0])
    return linear(g, c, g.gelu(hidden), "ffn_down", c.n_embd)


def experts_ffn(
    g: Graph, c: Config, x: Tensor, *, normalize: bool, activation: Activation = Graph.swiglu,
    sigmoid: bool = False, scale: float = 1.0, has_biases: bool = False,
) -> Tensor:  # fmt: skip
    """The gated feed-forward of the chosen experts, summed by their weights (Graph.moe_route). The
    choice heeds exp_probs_b and groups of experts where the file has them."""
    w, n, n_ff = c.weights, c.n_experts, c.n_ff_expert
    n_groups = max(1, c.integer("expert_group_count", 0, max(1, n), 1))
    if n % n_groups:
        raise c.refuse("expert_group_count", f"is {n_groups}; {n} experts cannot be split so")
    route = g.moe_route(
        linear(g, c, x, "ffn_gate_inp", n), c.n_experts_used, normalize=normalize,
        gating="sigmoid" if sigmoid else "softmax", scale=scale, n_groups=n_groups,
        bias=w.optional(named(g, "exp_probs_b"), n, suffix="bias"),
        n_groups_used=max(1, c.integer("expert_group_used_count", 0, n_groups, n_groups)),
    )  # fmt: skip

    def experts(x: Tensor, name: str, n_in: int, n_out: int) -> Tensor:
        name = named(g, name)
        bias = w.vector(name, n_out, n, suffix="bias") if has_biases else None
        return g.moe_linear(x, route, w(name, n_in, n_out, n), bias)

    if named(g, "ffn_gate_up_exps") in w:
        both = experts(x, "ffn_gate_up_exps", c.n_embd, 2 * n_ff)
        gate, up = g.slice(both, 0, n_ff, 2 * n_ff), g.slice(both, n_ff, n_ff, 2 * n_ff)
    else:
        gate = experts(x, "ffn_gate_exps", c.n_embd, n_ff)
        up = experts(x, "ffn_up_exps", c.n_embd, n_ff)
    down = experts(activation(g, gate, up), "ffn_down_exps", n_ff, c.n_embd)
    return g.moe_sum(down, route)
