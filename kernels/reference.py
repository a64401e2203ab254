"""The specification: every op of the graph in numpy float32, one by one.

Other back ends are tested against this, op by op. Weights are dequantized; keys and values stay
float32; matrix products and sums are numpy's. ``run`` evaluates one sequence from position 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.graph import Graph, Op, Tensor, Weight
from edgellm.kernels.rope import RopeTable

Array = NDArray[np.float32]
Load = Callable[[Weight], Array]  # dequantized, numpy order: [n_out, n_in] or [n]


class Step:
    """What ops need to know beside their inputs: token ids, positions and keys and values so far.

    ``keys``/``values`` are [n_past + n_tokens, n_kv_heads, head_dim] when an attention op runs on
    its own; in ``run`` they are the op's own k and v, for a sequence from position 0.
    """

    def __init__(self, tokens: NDArray[np.integer[Any]], positions: NDArray[np.integer[Any]],
                 load: Load, out_rows: NDArray[np.integer[Any]] | None = None) -> None:  # fmt: skip
        self.tokens, self.positions, self.load = tokens, positions, load
        self.out_rows = np.arange(len(tokens)) if out_rows is None else out_rows


def run(graph: Graph, tokens: NDArray[np.integer[Any]], load: Load) -> Array:
    """Logits [n_tokens, n_vocab] of one sequence from position 0."""
    step = Step(tokens, np.arange(len(tokens)), load)
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


def _rms_norm(op: Op, inputs: list[Array], step: Step) -> Array:
    weight = step.load(op.weights["weight"])
    x = inputs[0].reshape(len(inputs[0]), -1, len(weight))
    mean = np.mean(x * x, axis=-1, keepdims=True)
    y: Array = x / np.sqrt(mean + np.float32(op.attrs["eps"])) * weight
    return y.reshape(inputs[0].shape)


def _linear(op: Op, inputs: list[Array], step: Step) -> Array:
    y = inputs[0] @ step.load(op.weights["weight"]).T
    return y + step.load(op.weights["bias"]) if "bias" in op.weights else y


def _rope(op: Op, inputs: list[Array], step: Step) -> Array:
    rope, head_dim = op.attrs["rope"], op.attrs["head_dim"]
    factors = step.load(rope.factors) if rope.factors is not None else None
    table = RopeTable(rope, factors, int(step.positions.max()) + 1)
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


def _attention(op: Op, inputs: list[Array], step: Step) -> Array:
    a = op.attrs
    n, heads, kv_heads, dim = len(inputs[0]), a["n_heads"], a["n_kv_heads"], a["head_dim"]
    q = inputs[0].reshape(n, heads, dim)
    k, v = (x.reshape(-1, kv_heads, dim) for x in inputs[1:])
    queries, keys = step.positions[:, None], np.arange(len(k))[None, :]
    hidden = keys > queries
    if a["window"] is not None:
        hidden |= keys <= queries - a["window"]
    out = np.empty_like(q)
    for h in range(heads):
        scores = q[:, h] @ k[:, h * kv_heads // heads].T * np.float32(a["scale"])
        scores[hidden] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[:, h] = weights @ v[:, h * kv_heads // heads]
    return out.reshape(n, heads * dim)


def _add(op: Op, inputs: list[Array], step: Step) -> Array:
    return inputs[0] + inputs[1]


def _scale(op: Op, inputs: list[Array], step: Step) -> Array:
    scaled: Array = inputs[0] * np.float32(op.attrs["factor"])
    return scaled


def _swiglu(op: Op, inputs: list[Array], step: Step) -> Array:
    gate, up = inputs
    product: Array = gate / (1 + np.exp(-gate)) * up
    return product


def _geglu(op: Op, inputs: list[Array], step: Step) -> Array:
    gate, up = inputs
    inner = np.float32(0.7978845608028654) * gate * (1 + np.float32(0.044715) * gate * gate)
    product: Array = np.float32(0.5) * gate * (1 + np.tanh(inner)) * up
    return product


def _moe_route(op: Op, inputs: list[Array], step: Step) -> Array:
    n_used = op.attrs["n_used"]
    shifted = np.exp(inputs[0] - inputs[0].max(axis=-1, keepdims=True))
    shares = shifted / shifted.sum(axis=-1, keepdims=True)
    ids = np.argsort(-inputs[0], axis=-1, kind="stable")[:, :n_used]
    weights = np.take_along_axis(shares, ids, axis=-1)
    if op.attrs["normalize"]:
        weights = weights / weights.sum(axis=-1, keepdims=True)
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
    "rms_norm": _rms_norm,
    "linear": _linear,
    "rope": _rope,
    "attention": _attention,
    "add": _add,
    "scale": _scale,
    "swiglu": _swiglu,
    "geglu": _geglu,
    "moe_route": _moe_route,
    "moe_linear": _moe_linear,
    "moe_sum": _moe_sum,
}
