"""The specification: every op of the graph in numpy float32, one by one.

Other back ends are tested against this, op by op. Weights are dequantized; keys and values stay
float32 unless they are to go through a number format; matrix products and sums are numpy's. ``run``
evaluates one sequence from position 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.graph import Graph, Op, Tensor, Weight
from edgellm.kernels.rope import RopeTable
from edgellm.quant import by_name

Array = NDArray[np.float32]
Load = Callable[[Weight], Array]  # dequantized, numpy order: [n_out, n_in] or [n]


class Step:
    """What ops need to know beside their inputs: token ids, positions, and what the sequence left
    in its caches.

    Keys and values of an attention op are its own inputs, which hold all tokens from position 0.
    ``state`` is where a recurrent op starts from; None: at the beginning of a sequence. ``type_k``
    and ``type_v`` are the number formats that keys and values go through before they are read.
    """

    def __init__(
        self, tokens: NDArray[np.integer[Any]], positions: NDArray[np.integer[Any]], load: Load,
        out_rows: NDArray[np.integer[Any]] | None = None, n_ctx: int | None = None,
        state: Array | None = None, type_k: str = "f32", type_v: str = "f32",
    ) -> None:  # fmt: skip
        self.tokens, self.positions, self.load, self.state = tokens, positions, load, state
        self.out_rows = np.arange(len(tokens)) if out_rows is None else out_rows
        self.cache_types = by_name(type_k), by_name(type_v)
        self.n_ctx = n_ctx or int(positions.max()) + 1


def run(
    graph: Graph, tokens: NDArray[np.integer[Any]], load: Load, n_ctx: int | None = None,
    type_k: str = "f32", type_v: str = "f32",
) -> Array:  # fmt: skip
    """Logits [n_tokens, n_vocab] of one sequence from position 0; ``n_ctx``: see RopeTable."""
    step = Step(tokens, np.arange(len(tokens)), load, n_ctx=n_ctx, type_k=type_k, type_v=type_v)
    values: dict[Tensor, Array] = {}
    for op in graph.ops:
        values[op.output] = evaluate(op, [values[x] for x in op.inputs], step)
    return values[graph.output]


def evaluate(op: Op, inputs: list[Array], step: Step) -> Array:
    """One op's output [n_rows, dim]."""
    return OPS[op.kind](op, inputs, step)


def _embed(op: Op, inputs: list[Array], step: Step) -> Array:
    rows: Array = step.load(op.weights["table"])[step.tokens]
    return rows


def _select(op: Op, inputs: list[Array], step: Step) -> Array:
    rows: Array = inputs[0][step.out_rows]
    return rows


def _slice(op: Op, inputs: list[Array], step: Step) -> Array:
    a, x = op.attrs, inputs[0]
    runs = x.reshape(len(x), -1, a["run"])[..., a["start"] : a["start"] + a["n"]]
    return runs.reshape(len(x), -1)


def _join(op: Op, inputs: list[Array], step: Step) -> Array:
    n, heads = len(inputs[0]), op.attrs["n_heads"]
    x, y = (v.reshape(n, -1, op.attrs[k]) for v, k in zip(inputs, ("n_x", "n_y"), strict=True))
    y = np.broadcast_to(y, (n, heads, y.shape[-1]))
    return np.concatenate([x, y], axis=-1).reshape(n, -1)


def _rms_norm(op: Op, inputs: list[Array], step: Step) -> Array:
    x, weight = _runs(op, inputs[0], step)
    mean = np.mean(x * x, axis=-1, keepdims=True)
    y: Array = x / np.sqrt(mean + np.float32(op.attrs["eps"])) * weight
    return y.reshape(inputs[0].shape)


def _layer_norm(op: Op, inputs: list[Array], step: Step) -> Array:
    x, weight = _runs(op, inputs[0], step)
    x = x - np.mean(x, axis=-1, keepdims=True)
    mean = np.mean(x * x, axis=-1, keepdims=True)
    y: Array = x / np.sqrt(mean + np.float32(op.attrs["eps"])) * weight
    if "bias" in op.weights:
        y = y + step.load(op.weights["bias"])
    return y.reshape(inputs[0].shape)


def _runs(op: Op, x: Array, step: Step) -> tuple[Array, Array]:
    """x by runs [n, runs, weight.n_in], and the weight."""
    weight = op.weights["weight"]
    return x.reshape(len(x), -1, weight.n_in), step.load(weight)


def _l2_norm(op: Op, inputs: list[Array], step: Step) -> Array:
    x = inputs[0].reshape(len(inputs[0]), -1, op.attrs["n"])
    total = np.sum(x * x, axis=-1, keepdims=True)
    y: Array = x / np.sqrt(total + np.float32(op.attrs["eps"]))
    return y.reshape(inputs[0].shape)


def _linear(op: Op, inputs: list[Array], step: Step) -> Array:
    y = inputs[0] @ step.load(op.weights["weight"]).T
    return y + step.load(op.weights["bias"]) if "bias" in op.weights else y


def _head_linear(op: Op, inputs: list[Array], step: Step) -> Array:
    weight = op.weights["weight"]
    matrices = step.load(weight).reshape(-1, weight.n_out, weight.n_in)
    x = inputs[0].reshape(len(inputs[0]), -1, weight.n_in)
    y: Array = np.einsum("nhi,hoi->nho", x, matrices)
    return y.reshape(len(x), -1)


def _position_rows(op: Op, inputs: list[Array], step: Step) -> Array:
    rows: Array = step.load(op.weights["table"])[step.positions]
    return rows


def _rope(op: Op, inputs: list[Array], step: Step) -> Array:
    rope, head_dim = op.attrs["rope"], op.attrs["head_dim"]
    table = RopeTable(rope, step.load, step.n_ctx)
    table.fill(int(step.positions.max()) + 1)
    rows = table.rows[step.positions][:, None]  # [n, 1, 2 * dim]
    x = inputs[0].reshape(len(inputs[0]), -1, head_dim)
    turned = x[..., : rope.dim]
    if rope.layout == "neox":
        partner = np.roll(turned, rope.dim // 2, axis=-1)
    else:
        partner = turned.reshape(*turned.shape[:-1], -1, 2)[..., ::-1].reshape(turned.shape)
    y = x.copy()
    y[..., : rope.dim] = turned * rows[..., : rope.dim] + partner * rows[..., rope.dim :]
    return y.reshape(inputs[0].shape)


def _temper(op: Op, inputs: list[Array], step: Step) -> Array:
    factors = temperatures(step.positions, op.attrs["scale"], op.attrs["length"])
    scaled: Array = inputs[0] * factors[:, None]
    return scaled


def temperatures(positions: NDArray[np.integer[Any]], scale: float, length: int) -> Array:
    """The factors of temper by position."""
    factors: Array = (1 + scale * np.log1p(positions // length)).astype(np.float32)
    return factors


def _attention(op: Op, inputs: list[Array], step: Step) -> Array:
    a = op.attrs
    n, heads, kv_heads = len(inputs[0]), a["n_heads"], a["n_kv_heads"]
    q = inputs[0].reshape(n, heads, a["head_dim"])
    k, v = (
        kind.dequantize(kind.quantize(x)).reshape(len(x), kv_heads, -1)
        for kind, x in zip(step.cache_types, inputs[1:], strict=True)
    )
    queries, keys = step.positions[:, None], np.arange(len(k))[None, :]
    hidden = (keys > queries) if a["causal"] else np.zeros((n, len(k)), bool)
    if a["window"] is not None:
        hidden = hidden | (keys <= queries - a["window"])
    sinks = step.load(op.weights["sinks"]) if "sinks" in op.weights else None
    out = np.empty((n, heads, a["v_dim"]), np.float32)
    for h in range(heads):
        scores = q[:, h] @ k[:, h * kv_heads // heads].T * np.float32(a["scale"])
        if a["softcap"] is not None:
            scores = np.float32(a["softcap"]) * np.tanh(scores / np.float32(a["softcap"]))
        scores[hidden] = -np.inf
        top = scores.max(axis=-1, keepdims=True)
        if sinks is not None:
            top = np.maximum(top, sinks[h])
        weights = np.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sinks[h] - top)
        out[:, h] = weights / total @ v[:, h * kv_heads // heads]
    return out.reshape(n, -1)


def _conv1d(op: Op, inputs: list[Array], step: Step) -> Array:
    taps = step.load(op.weights["weight"]).T  # [n_taps, channels]
    past = np.zeros((len(taps) - 1, inputs[0].shape[1]), np.float32)
    x = np.concatenate([past if step.state is None else step.state, inputs[0]])
    n = len(inputs[0])
    out: Array = x[:n] * taps[0]
    for i in range(1, len(taps)):
        out = out + x[i : i + n] * taps[i]
    return out


def _delta_rule(op: Op, inputs: list[Array], step: Step) -> Array:
    k_heads, heads = op.attrs["n_k_heads"], op.attrs["n_v_heads"]
    n, d_k = len(inputs[0]), inputs[0].shape[1] // k_heads
    of_head = np.arange(heads) % k_heads
    q, k = (x.reshape(n, k_heads, d_k)[:, of_head] for x in inputs[:2])
    v = inputs[2].reshape(n, heads, -1)
    decay, beta = np.exp(inputs[3]), inputs[4]
    fresh = np.zeros((heads, d_k, v.shape[-1]), np.float32)
    state = fresh if step.state is None else step.state.reshape(fresh.shape)
    out = np.empty_like(v)
    for t in range(n):
        state = state * decay[t, :, None, None]
        change = beta[t, :, None] * (v[t] - np.einsum("hi,hij->hj", k[t], state))
        state = state + k[t, :, :, None] * change[:, None, :]
        out[t] = np.einsum("hi,hij->hj", q[t], state) * np.float32(d_k**-0.5)
    return out.reshape(n, -1)


def _add_vector(op: Op, inputs: list[Array], step: Step) -> Array:
    return inputs[0] + _first_row(op, step)


def _mul_vector(op: Op, inputs: list[Array], step: Step) -> Array:
    return inputs[0] * _first_row(op, step)


def _first_row(op: Op, step: Step) -> Array:
    row: Array = np.atleast_2d(step.load(op.weights["vector"]))[0]
    return row


def _mul(op: Op, inputs: list[Array], step: Step) -> Array:
    return inputs[0] * inputs[1]


def _add(op: Op, inputs: list[Array], step: Step) -> Array:
    return inputs[0] + inputs[1]


def _scale(op: Op, inputs: list[Array], step: Step) -> Array:
    scaled: Array = inputs[0] * np.float32(op.attrs["factor"])
    return scaled


def _softcap(op: Op, inputs: list[Array], step: Step) -> Array:
    cap = np.float32(op.attrs["cap"])
    capped: Array = cap * np.tanh(inputs[0] / cap)
    return capped


def sigmoid(x: Array) -> Array:
    y: Array = np.float32(1) / (np.float32(1) + np.exp(-x))
    return y


def _sigmoid(op: Op, inputs: list[Array], step: Step) -> Array:
    return sigmoid(inputs[0])


def _softplus(op: Op, inputs: list[Array], step: Step) -> Array:
    y: Array = np.logaddexp(inputs[0], np.float32(0))
    return y


def _silu(op: Op, inputs: list[Array], step: Step) -> Array:
    return inputs[0] * sigmoid(inputs[0])


def gelu(x: Array) -> Array:
    """In float16 on both sides between -10 and 10, as ggml's table has it: models are compared
    with logits that went through it, and without it differ by an NMSE of 1.5e-8."""
    half = x.astype(np.float16).astype(np.float32)
    inner = np.float32(0.7978845608028654) * half * (1 + np.float32(0.044715) * half * half)
    y = np.float32(0.5) * half * (1 + np.tanh(inner))
    rounded = y.astype(np.float16).astype(np.float32)
    gated: Array = np.where(x <= -10, np.float32(0), np.where(x >= 10, x, rounded))
    return gated


def _gelu(op: Op, inputs: list[Array], step: Step) -> Array:
    return gelu(inputs[0])


def _swiglu(op: Op, inputs: list[Array], step: Step) -> Array:
    gate, up = inputs
    return gate * sigmoid(gate) * up


def _geglu(op: Op, inputs: list[Array], step: Step) -> Array:
    gate, up = inputs
    return gelu(gate) * up


def _swiglu_clamped(op: Op, inputs: list[Array], step: Step) -> Array:
    gate = np.minimum(inputs[0], np.float32(7))
    up = np.clip(inputs[1], np.float32(-7), np.float32(7))
    return gate * sigmoid(np.float32(1.702) * gate) * (up + 1)


def _moe_route(op: Op, inputs: list[Array], step: Step) -> Array:
    a, logits = op.attrs, inputs[0]
    n_used = a["n_used"]
    if a["gating"] == "sigmoid":
        shares = sigmoid(logits)
    else:
        shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
        shares = shares / shares.sum(axis=-1, keepdims=True)
    ranked = shares + step.load(op.weights["bias"]) if "bias" in op.weights else shares
    if a["n_groups"] > 1:
        groups = np.sort(ranked.reshape(len(ranked), a["n_groups"], -1), axis=-1)
        score = groups[..., -2:].sum(-1) if "bias" in op.weights else groups[..., -1]
        best = np.argsort(-score, axis=-1, kind="stable")[:, : a["n_groups_used"]]
        taken = np.zeros(score.shape, bool)
        np.put_along_axis(taken, best, True, axis=-1)
        ranked = np.where(np.repeat(taken, groups.shape[-1], axis=-1), ranked, -np.inf)
    elif "bias" not in op.weights and a["gating"] == "softmax":
        ranked = logits  # the same order, without what rounding ties
    ids = np.argsort(-ranked, axis=-1, kind="stable")[:, :n_used]
    weights = np.take_along_axis(shares, ids, axis=-1)
    if a["normalize"]:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    weights = weights * np.float32(a["scale"])
    return np.concatenate([ids.astype(np.float32), weights], axis=1)


def _moe_linear(op: Op, inputs: list[Array], step: Step) -> Array:
    x, route = inputs
    weight, n_used = op.weights["weight"], op.attrs["n_used"]
    experts = step.load(weight)  # [n_experts, n_out, n_in]
    x = np.broadcast_to(x.reshape(len(x), -1, weight.n_in), (len(x), n_used, weight.n_in))
    out = np.empty((len(x), n_used, weight.n_out), np.float32)
    for i, ids in enumerate(route[:, :n_used].astype(int)):
        for rank, expert in enumerate(ids):
            out[i, rank] = experts[expert] @ x[i, rank]
            if "bias" in op.weights:
                out[i, rank] += step.load(op.weights["bias"])[expert]
    return out.reshape(len(x), -1)


def _moe_sum(op: Op, inputs: list[Array], step: Step) -> Array:
    x, route = inputs
    n_used = op.attrs["n_used"]
    parts = x.reshape(len(x), n_used, -1) * route[:, n_used:, None]
    out = parts[:, 0]
    for rank in range(1, n_used):
        out = out + parts[:, rank]
    return out


OPS: dict[str, Callable[[Op, list[Array], Step], Array]] = {
    "embed": _embed,
    "select": _select,
    "slice": _slice,
    "join": _join,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "l2_norm": _l2_norm,
    "linear": _linear,
    "head_linear": _head_linear,
    "position_rows": _position_rows,
    "rope": _rope,
    "temper": _temper,
    "attention": _attention,
    "conv1d": _conv1d,
    "delta_rule": _delta_rule,
    "add": _add,
    "add_vector": _add_vector,
    "mul": _mul,
    "mul_row": _mul,
    "mul_vector": _mul_vector,
    "scale": _scale,
    "softcap": _softcap,
    "sigmoid": _sigmoid,
    "softplus": _softplus,
    "silu": _silu,
    "gelu": _gelu,
    "swiglu": _swiglu,
    "geglu": _geglu,
    "swiglu_clamped": _swiglu_clamped,
    "moe_route": _moe_route,
    "moe_linear": _moe_linear,
    "moe_sum": _moe_sum,
}
