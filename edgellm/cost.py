"""What a step has to read and to multiply, whatever the kernels: for distances from the limits."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.kernels.cpu import targets
from edgellm.kernels.cpu.weights import linear_kernel
from edgellm.kernels.graph import MATRIX_OPS, Graph
from edgellm.kernels.rows import select_early
from edgellm.memory import kv_row_bytes


@dataclass(frozen=True)
class Cost:
    """``n_bytes``: weights once and the keys and values in sight once. ``dots``: multiply-adds of
    bytes, two for each weight where activations have two terms; float kernels have none."""

    n_bytes: float
    dots: float


def step_cost(
    graph: Graph, type_k: str, type_v: str, runs: list[tuple[int, int]], n_out: int
) -> Cost:
    """Of a step over runs of (tokens, first position), with the logits of ``n_out`` rows."""
    n_tokens = sum(n for n, _ in runs)
    n_bytes = dots = 0.0
    for op in select_early(graph, ()).ops:
        if op.kind in MATRIX_OPS:
            weight = op.weights["weight"]
            n_rows = n_out if op.output.rows == "out" else n_tokens
            used = min(1, n_rows)
            if op.kind == "moe_linear":
                n_rows *= op.attrs["n_used"]
                used = min(weight.shape[2], n_rows)  # at most: tokens may share experts
            kernel = linear_kernel(weight.type, targets.current(), weight.precise)
            n_bytes += used * weight.type.row_bytes(weight.n_in) * weight.n_out
            dots += kernel.activation.terms * n_rows * weight.n_in * weight.n_out
        elif op.kind == "attention":
            row = kv_row_bytes(op, type_k, type_v)
            for n, first in runs:
                window = op.attrs["window"]
                n_bytes += row * (first + n if window is None else min(first + n, window + n - 1))
    return Cost(n_bytes, dots)
