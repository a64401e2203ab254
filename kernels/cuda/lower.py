"""From ops to launches: a function for each kind of op, in the terms of ``operations``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from edgellm.kernels.cuda import attention, experts, operations
from edgellm.kernels.cuda.device import Buffer
from edgellm.kernels.cuda.operations import Rows
from edgellm.kernels.cuda.step import Pass
from edgellm.kernels.graph import Op

if TYPE_CHECKING:
    from edgellm.kernels.cuda.program import DeviceProgram

Lowering = Callable[["DeviceProgram", Op, Pass], None]


def _linear(p: DeviceProgram, op: Op, s: Pass) -> None:
    weight = op.weights["weight"]
    matrix = p.weights.matrix(weight)
    operations.linear(
        p.device, matrix, p.as_read(op, s), p.at(op.output, s), s.rows(op.output), s.phase,
        p.weights.vector(op.weights.get("bias")), p.stream,
    )  # fmt: skip


def _rms_norm(p: DeviceProgram, op: Op, s: Pass) -> None:
    if op in p.fused.norms:
        _norm_quantized(p, op, s)
        return
    weight, x = op.weights["weight"], op.inputs[0]
    operations.rms_norm(
        p.device, p.at(x, s), p.vector(op, "weight"), p.at(op.output, s), s.rows(x), x.dim,
        weight.n_in, op.attrs["eps"], weight.n_out, p.stream,
    )  # fmt: skip


def _norm_quantized(p: DeviceProgram, op: Op, s: Pass) -> None:
    """A norm with the sum before it, if there is one, and its quantization."""
    x, added = op.inputs[0], p.fused.sums.get(op)
    precise, has_floats = p.fused.norms[op]
    terms = (x,) if added is None else added.inputs
    operations.norm_quantize(
        p.device, p.at(terms[0], s), p.vector(op, "weight"),
        p.quantized(op.output, precise, s), s.rows(x), x.dim, op.attrs["eps"],
        y=None if added is None else p.at(terms[1], s),
        total=None if added is None else p.at(x, s),
        normed=p.at(op.output, s) if has_floats else None, precise=precise, stream=p.stream,
    )  # fmt: skip


def _layer_norm(p: DeviceProgram, op: Op, s: Pass) -> None:
    weight, x = op.weights["weight"], op.inputs[0]
    operations.layer_norm(
        p.device, p.at(x, s), p.vector(op, "weight"), p.weights.vector(op.weights.get("bias")),
        p.at(op.output, s), s.rows(x), x.dim, weight.n_in, op.attrs["eps"], weight.n_out, p.stream,
    )  # fmt: skip


def _l2_norm(p: DeviceProgram, op: Op, s: Pass) -> None:
    x, n = op.inputs[0], op.attrs["n"]
    operations.l2_norm(
        p.device, p.at(x, s), p.at(op.output, s), s.rows(x), x.dim, n, op.attrs["eps"], p.stream
    )


def _rope(p: DeviceProgram, op: Op, s: Pass) -> None:
    x, rope = op.inputs[0], op.attrs["rope"]
    operations.rope(
        p.device, p.at(x, s), p.angles(rope, s), p.at(op.output, s), s.rows(x), x.dim,
        op.attrs["head_dim"], rope.dim // 2, rope.layout, p.stream,
    )  # fmt: skip


def _temper(p: DeviceProgram, op: Op, s: Pass) -> None:
    x = op.inputs[0]
    operations.temper(
        p.device, p.at(x, s), p.numbers.buffer("positions", s.first), p.at(op.output, s), s.rows(x),
        x.dim, op.attrs["scale"], op.attrs["length"], p.stream,
    )  # fmt: skip


def _select(p: DeviceProgram, op: Op, s: Pass) -> None:
    x = op.inputs[0]
    operations.copy_rows(
        p.device, p.at(x, s), p.numbers.buffer("wanted", s.out), p.at(op.output, s), s.wanted,
        x.dim, p.stream,
    )  # fmt: skip


def _slice(p: DeviceProgram, op: Op, s: Pass) -> None:
    x, a = op.inputs[0], op.attrs
    operations.slice_rows(
        p.device, p.at(x, s), p.at(op.output, s), s.rows(x), x.dim, a["start"], a["n"], a["run"],
        p.stream,
    )  # fmt: skip


def _join(p: DeviceProgram, op: Op, s: Pass) -> None:
    (x, y), a = op.inputs, op.attrs
    operations.join(
        p.device, p.at(x, s), p.at(y, s), p.at(op.output, s), s.rows(x), a["n_heads"], a["n_x"],
        a["n_y"], a["shared"], p.stream,
    )  # fmt: skip


def _unary(p: DeviceProgram, op: Op, s: Pass) -> None:
    x = op.inputs[0]
    (a,) = op.attrs.values() or (0.0,)
    operations.unary(
        p.device, op.kind, p.at(x, s), p.at(op.output, s), s.rows(x), x.dim, a, p.stream
    )


def _binary(p: DeviceProgram, op: Op, s: Pass) -> None:
    x, y = op.inputs
    operations.binary(
        p.device, op.kind.removesuffix("_row"), p.at(x, s), p.at(y, s), p.at(op.output, s),
        s.rows(x), x.dim, "column" if op.kind == "mul_row" else "rows", p.stream,
    )  # fmt: skip


def lower_gated(p: DeviceProgram, op: Op, gate: Op, up: Op, s: Pass) -> None:
    """An activation of generated tokens together with its two matrices."""
    operations.gated(
        p.device, op.kind, p.weights.matrix(gate.weights["weight"]),
        p.weights.matrix(up.weights["weight"]), p.as_read(gate, s), p.at(op.output, s),
        s.rows(op.output), p.weights.vector(gate.weights.get("bias")),
        p.weights.vector(up.weights.get("bias")), p.stream,
    )  # fmt: skip


def _with_vector(p: DeviceProgram, op: Op, s: Pass) -> None:
    x = op.inputs[0]
    operations.binary(
        p.device, op.kind.removesuffix("_vector"), p.at(x, s), p.vector(op, "vector"),
        p.at(op.output, s), s.rows(x), x.dim, "vector", p.stream,
    )  # fmt: skip


def _attention(p: DeviceProgram, op: Op, s: Pass) -> None:
    shape, (keys, values) = p.shapes[op], p.pools_of(op)
    group, sinks = p.groups[op], p.weights.vector(op.weights.get("sinks"))

    turned = p.fused.turned.get(op)

    def attend(row: int, rows: Rows, partials: Buffer | None) -> None:
        q, k, v = (p.row(t, row) for t in op.inputs)
        slots = p.numbers.slots(group, row)
        if turned is None:
            attention.kv_store(p.device, shape, k, v, keys, values, slots, rows, p.stream)
        else:
            plain_q, plain_k = (p.row(made.inputs[0], row) for made in turned)
            rope = turned[0].attrs["rope"]
            p.angles(rope, s)
            attention.rope_store(
                p.device, shape, plain_q, plain_k, v, p.angles_of(rope, row), q, keys, values,
                slots, rows, rope.dim // 2, rope.layout, p.stream,
            )  # fmt: skip
        attention.attention(
            p.device, shape, q, keys, values, p.row(op.output, row), p.numbers.seen(group, row),
            rows, s.phase, partials, p.limits.n_ctx, sinks, p.stream,
        )  # fmt: skip

    if s.phase == "decode":
        attend(s.first, s.tokens, p.buffers["partials"])
    for stretch in s.stretches:
        attend(stretch.row, stretch.rows, None)


def _moe_route(p: DeviceProgram, op: Op, s: Pass) -> None:
    logits, a = op.inputs[0], op.attrs
    experts.moe_route(
        p.device, p.at(logits, s), p.at(op.output, s), s.rows(logits), logits.dim, a["n_used"],
        normalize=a["normalize"], gating=a["gating"],
        bias=p.weights.vector(op.weights.get("bias")), scale=a["scale"], n_groups=a["n_groups"],
        n_groups_used=a["n_groups_used"], stream=p.stream,
    )  # fmt: skip


def _moe_linear(p: DeviceProgram, op: Op, s: Pass) -> None:
    (x, route), weight = op.inputs, op.weights["weight"]
    experts.moe_linear(
        p.device, p.weights.matrix(weight), p.as_read(op, s), p.at(route, s), p.at(op.output, s),
        s.rows(op.output), s.phase, op.attrs["n_used"], x.dim != weight.n_in,
        p.groups_of(op, s) if s.phase == "prefill" else None,
        p.weights.vector(op.weights.get("bias")), p.stream,
    )  # fmt: skip


def _moe_sum(p: DeviceProgram, op: Op, s: Pass) -> None:
    x, route = op.inputs
    experts.moe_sum(
        p.device, p.at(x, s), p.at(route, s), p.at(op.output, s), s.rows(x), op.output.dim,
        op.attrs["n_used"], p.stream,
    )  # fmt: skip


LOWERINGS: dict[str, Lowering] = {
    "linear": _linear,
    "head_linear": _linear,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "l2_norm": _l2_norm,
    "rope": _rope,
    "temper": _temper,
    "select": _select,
    "slice": _slice,
    "join": _join,
    "attention": _attention,
    "moe_route": _moe_route,
    "moe_linear": _moe_linear,
    "moe_sum": _moe_sum,
    **dict.fromkeys(operations.UNARY, _unary),
    **dict.fromkeys((*operations.BINARY, "mul_row"), _binary),
    "add_vector": _with_vector,
    "mul_vector": _with_vector,
}
