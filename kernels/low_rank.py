"""Adapters in the graph: W x becomes W x + scale * B (A x) (LoRA, arXiv:2106.09685).

The correction is made of ordinary ops behind the matrix's own, so a back end needs to know nothing
of it, and a row's result depends on its company as little as without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from edgellm.kernels.graph import Graph, Op, Tensor, Weight


class LowRankPair(NamedTuple):
    a: Weight  # [n_in, rank]
    b: Weight  # [rank, n_out]
    scale: float


def with_low_rank(graph: Graph, added: Mapping[str, Sequence[LowRankPair]]) -> Graph:
    """The same graph with what is added to each matrix, by its name. Who read the matrix's output
    reads the sum: the last op of a correction makes the tensor that the matrix made."""
    out, number = Graph(graph.precise), len(graph.ops)

    def tensor(like: Tensor, dim: int) -> Tensor:
        nonlocal number
        number += 1
        return Tensor(dim, like.rows, number)

    for op in graph.ops:
        pairs = added.get(op.weights["weight"].name, ()) if op.kind == "linear" else ()
        if not pairs:
            out.ops.append(op)
            continue
        x, total = op.inputs[0], tensor(op.output, op.output.dim)
        out.adapted[op.weights["weight"].name] = op.output
        out.ops.append(Op(op.kind, op.inputs, total, op.layer, op.weights, op.attrs))
        for k, pair in enumerate(pairs):
            inner = tensor(x, pair.a.n_out)
            out.ops.append(Op("linear", (x,), inner, op.layer, {"weight": pair.a}))
            if pair.scale != 1:
                scaled = tensor(x, inner.dim)
                attrs = {"factor": pair.scale}
                out.ops.append(Op("scale", (inner,), scaled, op.layer, attrs=attrs))
                inner = scaled
            correction = tensor(x, op.output.dim)
            out.ops.append(Op("linear", (inner,), correction, op.layer, {"weight": pair.b}))
            is_last = k == len(pairs) - 1
            more = op.output if is_last else tensor(op.output, op.output.dim)
            out.ops.append(Op("add", (total, correction), more, op.layer))
            total = more
    return out
