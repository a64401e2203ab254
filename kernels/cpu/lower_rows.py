"""Lowerings of the ops that handle each row on its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.cpu import elementwise, norms
from edgellm.kernels.cpu.lowering import Lowering, ProgramError, check_vectors, float_bits
from edgellm.kernels.cpu.stages import Argument, Buffer
from edgellm.kernels.graph import Op
from edgellm.kernels.reference import temperatures
from edgellm.kernels.rope import RopeTable

if TYPE_CHECKING:
    from edgellm.kernels.cpu.program import Program


def _embed(p: Program, op: Op) -> None:
    table, raw, out = op.weights["table"], p.inputs.embeddings, p.output(op)
    kernel = p.store.get(f"embed_{table.type.name}", elementwise.make_embed(table.type))
    n_blocks = table.n_in // table.type.block
    p.row_op(op, kernel, [raw.ctypes.data, raw.strides[0], out, out.row_bytes, n_blocks], [], out)


def _position_rows(p: Program, op: Op) -> None:
    table, out = op.weights["table"], p.output(op)
    if p.limits.n_ctx > table.n_out:
        raise ProgramError(f"{table.name}: the model has only {table.n_out} positions (-c)")
    kernel = p.store.get("select", elementwise.make_select())
    args: list[Argument] = [
        p.vector(table), 4 * table.n_in, p.inputs.positions.ctypes.data, out, out.row_bytes,
        table.n_in,
    ]  # fmt: skip
    p.row_op(op, kernel, args, [], out)


def _select(p: Program, op: Op) -> None:
    x, out = p.buffers[op.inputs[0]], p.output(op)
    kernel = p.store.get("select", elementwise.make_select())
    numbers = p.inputs.out_rows.ctypes.data
    p.row_op(op, kernel, [x, x.row_bytes, numbers, out, out.row_bytes, op.output.dim], [x], out)


def _slice(p: Program, op: Op) -> None:
    """Of a whole row a view, of its runs a copy."""
    x, a = p.buffers[op.inputs[0]], op.attrs
    if a["run"] == op.inputs[0].dim:
        p.buffers[op.output] = p.stages.view(x, 4 * a["start"])
        return
    out = p.output(op)
    kernel = p.store.get(
        f"slice_{a['start']}_{a['n']}_{a['run']}",
        elementwise.make_slice(a["start"], a["n"], a["run"]),
    )
    n_runs = op.inputs[0].dim // a["run"]
    p.row_op(op, kernel, [x, x.row_bytes, out, out.row_bytes, n_runs], [x], out)


def _join(p: Program, op: Op) -> None:
    (x, y), out, a = [p.buffers[t] for t in op.inputs], p.output(op), op.attrs
    kernel = p.store.get(
        f"join_{a['n_x']}_{a['n_y']}_{a['shared']}",
        elementwise.make_join(a["n_x"], a["n_y"], a["shared"]),
    )
    args: list[Argument] = [
        x, x.row_bytes, y, y.row_bytes, out, out.row_bytes, a["n_heads"]
    ]  # fmt: skip
    p.row_op(op, kernel, args, [x, y], out)


def _norm(p: Program, op: Op) -> None:
    x, out = p.buffers[op.inputs[0]], p.output(op)
    weight, bias = op.weights.get("weight"), op.weights.get("bias")
    n = weight.n_in if weight is not None else op.attrs["n"]
    check_vectors(op, n)
    make = {"rms_norm": norms.make_rms_norm, "layer_norm": norms.make_layer_norm,
            "l2_norm": norms.make_l2_norm}[op.kind]  # fmt: skip
    args: list[Argument] = [
        x, x.row_bytes, p.vector(weight) if weight is not None else 0,
        4 * n if weight is not None and weight.n_out > 1 else 0,
        p.vector(bias) if bias is not None else 0,
        out, out.row_bytes, op.output.dim // n, n, float_bits(op.attrs["eps"]),
    ]  # fmt: skip
    p.row_op(op, p.store.get(op.kind, make()), args, [x], out)


def _map(p: Program, op: Op) -> None:
    inputs, out = [p.buffers[t] for t in op.inputs], p.output(op)
    name = op.kind.removesuffix("_vector")
    args: list[Argument] = []
    for x in inputs:
        args += [x, x.row_bytes]
    if "vector" in op.weights:
        args += [p.vector(op.weights["vector"]), 0]
    args += [out, out.row_bytes, op.output.dim, *map(float_bits, op.attrs.values())]
    p.row_op(op, p.store.get(name, elementwise.make_map(name)), args, inputs, out)


def _mul_row(p: Program, op: Op) -> None:
    (x, y), out = [p.buffers[t] for t in op.inputs], p.output(op)
    kernel = p.store.get("mul_row", elementwise.make_row_factor(by_position=False))
    args: list[Argument] = [
        x, x.row_bytes, y, y.row_bytes, out, out.row_bytes, op.output.dim
    ]  # fmt: skip
    p.row_op(op, kernel, args, [x, y], out)


def _temper(p: Program, op: Op) -> None:
    x, out = p.buffers[op.inputs[0]], p.output(op)
    table = p.temperatures.setdefault(
        (op.attrs["scale"], op.attrs["length"]),
        temperatures(np.arange(p.limits.n_ctx), op.attrs["scale"], op.attrs["length"]),
    )
    kernel = p.store.get("temper", elementwise.make_row_factor(by_position=True))
    args: list[Argument] = [
        x, x.row_bytes, table.ctypes.data, p.inputs.positions.ctypes.data, out, out.row_bytes,
        op.output.dim,
    ]  # fmt: skip
    p.row_op(op, kernel, args, [x], out)


def _rope(p: Program, op: Op) -> None:
    rotate(p, op, p.output(op), p.inputs.positions)


def rotate(p: Program, op: Op, out: Buffer, positions: NDArray[np.int64]) -> None:
    """The rope op with given positions, into ``out``."""
    rope, head_dim = op.attrs["rope"], op.attrs["head_dim"]
    if rope not in p.tables:
        p.tables[rope] = RopeTable(rope, p.load, p.limits.n_ctx)
    x = p.buffers[op.inputs[0]]
    kernel = p.store.get(
        f"rope_{rope.layout}_{rope.dim}_{head_dim}", elementwise.make_rope(rope, head_dim)
    )
    args: list[Argument] = [
        x, x.row_bytes, positions.ctypes.data,
        p.tables[rope].rows.ctypes.data, out, out.row_bytes, op.output.dim // head_dim,
    ]  # fmt: skip
    p.row_op(op, kernel, args, [x], out)


LOWERINGS: dict[str, Lowering] = {
    "embed": _embed,
    "position_rows": _position_rows,
    "select": _select,
    "slice": _slice,
    "join": _join,
    "rms_norm": _norm,
    "layer_norm": _norm,
    "l2_norm": _norm,
    "rope": _rope,
    "temper": _temper,
    "mul_row": _mul_row,
    "add_vector": _map,
    "mul_vector": _map,
    **dict.fromkeys(elementwise.MAPS, _map),
}
