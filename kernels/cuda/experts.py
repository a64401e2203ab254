"""Launches of mixtures of experts: route.cu, and the experts' matrices of linear.cu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from edgellm.kernels.cuda.device import Buffer, Device
from edgellm.kernels.cuda.operations import GATES, PREFILL_TILE, Matrix, Phase, Rows

MOST_EXPERTS, MOST_GROUPS = 1024, 64


@dataclass(frozen=True)
class Groups:
    """Which rows each expert has, filled by ``group_pairs``: int32 ``order`` [n_rows * n_used] of
    pairs (row * n_used + rank), and ``starts`` [n_experts + 1] where each expert's begin."""

    order: Buffer
    starts: Buffer


def moe_route(
    device: Device, logits: Buffer, out: Buffer, rows: Rows, n_experts: int, n_used: int, *,
    normalize: bool, gating: str = "softmax", bias: Buffer | None = None, scale: float = 1.0,
    n_groups: int = 1, n_groups_used: int = 1, stream: Any = None,
) -> None:  # fmt: skip
    """Ids and weights [n_rows, 2 * n_used] as Graph.moe_route has them."""
    if n_experts > MOST_EXPERTS or n_groups > MOST_GROUPS:
        raise ValueError(f"{n_experts} experts in {n_groups} groups are too many for a GPU block")
    args = (
        logits, bias, out, rows.count, np.int32(n_experts), np.int32(n_used), np.int32(normalize),
        np.int32(gating == "sigmoid"), np.float32(scale), np.int32(n_groups),
        np.int32(n_groups_used),
    )  # fmt: skip
    device.kernel("route/moe_route")((rows.limit,), (128,), args, 0, stream)


def group_pairs(
    device: Device, route: Buffer, groups: Groups, rows: Rows, n_used: int, n_experts: int,
    stream: Any = None,
) -> None:  # fmt: skip
    """What prefill's moe_linear needs: once for each route."""
    args = (
        route, groups.order, groups.starts, rows.count, np.int32(n_used), np.int32(n_experts)
    )  # fmt: skip
    device.kernel("route/group_pairs")((n_experts,), (256,), args, 0, stream)


def moe_linear(
    device: Device, matrix: Matrix, x: Buffer, route: Buffer, out: Buffer, rows: Rows,
    phase: Phase, n_used: int, per_rank: bool, groups: Groups | None = None,
    bias: Buffer | None = None, stream: Any = None,
) -> None:  # fmt: skip
    """Each row times the matrices of its experts: out [n_rows, n_used * n_out], bias [n_experts,
    n_out]. x is a row for all ranks [n_rows, n_in], or with ``per_rank`` [n_rows, n_used * n_in]
    (quantized as rows of that length). Prefill takes ``groups``."""
    if matrix.precise and matrix.is_quantized:
        raise ValueError("experts take inputs of 8 bits")
    if per_rank and matrix.is_quantized:
        row = matrix.row_bytes(n_used)
    else:
        row = matrix.row_bytes(1)
    shape = (
        np.int32(matrix.n_in), np.int32(matrix.n_out), np.int32(n_used), np.int32(per_rank)
    )  # fmt: skip
    common = (matrix.data, matrix.units, x, np.int32(row), bias, out)
    args: tuple[Any, ...]
    if phase == "decode":
        args = (*common, rows.count, route, *shape)
        grid: tuple[int, ...] = (-(-matrix.n_out // 4), rows.limit * n_used)
        device.kernel(f"{matrix.module}/expert_matvec")(grid, (128,), args, 0, stream)
        return
    if groups is None:
        raise ValueError("prefill needs the groups of group_pairs")
    n_outs, n_tokens = PREFILL_TILE[matrix.is_quantized]
    args = (*common, groups.order, groups.starts, *shape)
    # An expert has a row at most once; blocks without rows leave at once.
    grid = (-(-matrix.n_out // n_outs), -(-rows.limit // n_tokens), matrix.n)
    device.kernel(f"{matrix.module}/expert_matmul")(grid, (256,), args, 0, stream)


def moe_gated(
    device: Device, name: str, gate: Matrix, up: Matrix, x: Buffer, route: Buffer, out: Buffer,
    rows: Rows, n_used: int, gate_bias: Buffer | None = None, up_bias: Buffer | None = None,
    stream: Any = None,
) -> None:  # fmt: skip
    """``operations.gated`` of each row's experts, whose x is a row for all ranks."""
    args = (
        gate.data, up.data, gate.units, x, np.int32(gate.row_bytes(1)), gate_bias, up_bias, out,
        rows.count, route, np.int32(gate.n_in), np.int32(gate.n_out), np.int32(n_used),
        np.int32(GATES.index(name)),
    )  # fmt: skip
    grid = (-(-gate.n_out // 4), rows.limit * n_used)
    device.kernel(f"{gate.module}/expert_gated")(grid, (128,), args, 0, stream)


def moe_sum(
    device: Device, x: Buffer, route: Buffer, out: Buffer, rows: Rows, dim: int, n_used: int,
    stream: Any = None,
) -> None:  # fmt: skip
    """x [n_rows, n_used * dim] by the route's weights: [n_rows, dim]."""
    args = (x, route, out, rows.count, np.int32(dim), np.int32(n_used))
    device.kernel("route/moe_sum")((-(-dim // 256), rows.limit), (256,), args, 0, stream)
