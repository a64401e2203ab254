"""Lowerings of mixtures of experts, and of heads that have a matrix each: both are matrices over
groups of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.kernels.cpu import experts
from edgellm.kernels.cpu.experts import Routing
from edgellm.kernels.cpu.lowering import Lowering, check_vectors, float_bits
from edgellm.kernels.cpu.stages import Argument, Buffer
from edgellm.kernels.graph import Op

if TYPE_CHECKING:
    from edgellm.kernels.cpu.program import Program


def _route(p: Program, op: Op) -> None:
    a, bias = op.attrs, op.weights.get("bias")
    n_used, n_experts = a["n_used"], op.inputs[0].dim
    logits, route = p.buffers[op.inputs[0]], p.output(op)
    routing = Routing(
        n_experts, n_used, a["normalize"], a["gating"] == "sigmoid", bias is not None,
        a["n_groups"], a["n_groups_used"],
    )  # fmt: skip
    kernel = p.store.get(f"moe_route_{routing.name}", experts.make_route(routing))
    args: list[Argument] = [
        logits, logits.row_bytes, route, route.row_bytes,
        p.vector(bias) if bias is not None else 0, float_bits(a["scale"]),
    ]  # fmt: skip
    p.row_op(op, kernel, args, [logits], route)
    starts, places = _grouping(p, n_experts, n_used, route.n_rows)
    p.places[op.output] = starts, places
    kernel = p.store.get(f"moe_group_{n_experts}_{n_used}", experts.make_group(n_experts, n_used))
    args = [route, route.row_bytes, p.count(op.output), starts, places]
    p.stages.parallel(op.label, kernel, args, p.stages.constant(1), 1, [route], [starts, places])


def _grouping(p: Program, n_groups: int, n_used: int, n_rows: int) -> tuple[Buffer, Buffer]:
    """Where each group starts, and where each pair of (row, rank) lies."""
    return p.stages.buffer(1, 8 * (n_groups + 1)), p.stages.buffer(1, 8 * n_used * n_rows)


def _moe_linear(p: Program, op: Op) -> None:
    _grouped_linear(p, op, *p.places[op.inputs[1]])


def _head_linear(p: Program, op: Op) -> None:
    n_heads = op.attrs["n_used"]
    key = n_heads, op.output.rows
    if key not in p.places:
        starts, places = _grouping(p, n_heads, n_heads, p.rows(op.output))
        kernel = p.store.get(f"head_groups_{n_heads}", experts.make_head_groups(n_heads))
        args: list[Argument] = [p.count(op.output), starts, places]
        p.stages.parallel(
            op.label, kernel, args, p.stages.constant(1), 1, [], [starts, places]
        )  # fmt: skip
        p.places[key] = starts, places
    _grouped_linear(p, op, *p.places[key])


def _grouped_linear(p: Program, op: Op, starts: Buffer, places: Buffer) -> None:
    x, weight, n_used = op.inputs[0], op.weights["weight"], op.attrs["n_used"]
    bias = op.weights.get("bias")
    kernel, n_blocks, n_groups, chunk, n_chunks = p.matrix(weight)
    source = p.activations(x, kernel.activation)
    check_vectors(op, weight.n_out)  # rows of all pairs lie one behind the other
    n_pairs, count = n_used * p.rows(op.output), p.count(op.output)
    lanes = p.target.lanes
    # pairs lie one after the other, as they do in a token's row of [rank][n_in]
    pair_bytes, result_bytes = kernel.activation.row_bytes(weight.n_in), 4 * weight.n_out
    grouped = p.stages.buffer(1, n_pairs * pair_bytes)
    results = p.stages.buffer(1, n_pairs * result_bytes)
    gather = p.store.get(f"moe_gather_{n_used}", experts.make_gather(n_used))
    rank_bytes = pair_bytes if x.dim != weight.n_in else 0
    args: list[Argument] = [
        source, source.row_bytes, rank_bytes, places, grouped, pair_bytes
    ]  # fmt: skip
    p.stages.rows(op.label, gather, args, count, [source, places], [grouped])
    address = p.store.get(f"expert_{kernel.name}", experts.make_expert_linear(kernel.tile))
    args = [
        p.weights.address(weight), grouped, results, n_blocks, pair_bytes, result_bytes,
        p.vector(bias) if bias is not None else 0, n_groups, chunk,
        kernel.group_bytes(weight, lanes), count, starts,
        kernel.matrix_bytes(weight, lanes), n_chunks, result_bytes if bias is not None else 0,
    ]  # fmt: skip
    n_work = p.stages.constant(n_chunks * weight.shape[2])
    p.stages.parallel(op.label, address, args, n_work, 1, [grouped, starts], [results])
    out = p.output(op)
    scatter = p.store.get(f"moe_scatter_{n_used}", experts.make_scatter(n_used))
    args = [out, out.row_bytes, result_bytes, places, results, result_bytes]
    p.stages.rows(op.label, scatter, args, count, [results, places], [out])


def _sum(p: Program, op: Op) -> None:
    x, route = (p.buffers[t] for t in op.inputs)
    out, n_used = p.output(op), op.attrs["n_used"]
    check_vectors(op, op.output.dim)
    kernel = p.store.get(f"moe_sum_{n_used}", experts.make_sum(n_used))
    args: list[Argument] = [
        x, x.row_bytes, route, route.row_bytes, out, out.row_bytes, op.output.dim
    ]  # fmt: skip
    p.row_op(op, kernel, args, [x, route], out)


LOWERINGS: dict[str, Lowering] = {
    "moe_route": _route,
    "moe_linear": _moe_linear,
    "moe_sum": _sum,
    "head_linear": _head_linear,
}
