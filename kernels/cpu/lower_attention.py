"""Lowering of attention: its cache, and the three kernels that write, read and merge."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.kernels.cpu import attention
from edgellm.kernels.cpu.attention import AttentionShape
from edgellm.kernels.cpu.kv_types import GROUP, kv_type
from edgellm.kernels.cpu.lower_rows import rotate
from edgellm.kernels.cpu.lowering import Lowering, ProgramError, check_vectors
from edgellm.kernels.cpu.stages import Argument, Buffer
from edgellm.kernels.graph import Op

if TYPE_CHECKING:
    from edgellm.kernels.cpu.program import Program


def shape_of(p: Program, op: Op) -> AttentionShape:
    a, window, sinks = op.attrs, op.attrs["window"], 0
    ring = p.limits.window
    if ring is not None and (window is None or window > ring):
        window, sinks = ring, p.limits.sinks
    return AttentionShape(
        a["n_heads"], a["n_kv_heads"], a["head_dim"], a["v_dim"], a["scale"], window,
        kv_type(p.limits.k_type, p.limits.block), kv_type(p.limits.v_type, p.limits.block), sinks,
        a["softcap"], "sinks" in op.weights, a["causal"],
    )  # fmt: skip


def _attention(p: Program, op: Op) -> None:
    shape = shape_of(p, op)
    check_vectors(op, shape.head_dim)
    check_vectors(op, shape.v_dim)
    for kind, dim in ((shape.k_type, shape.head_dim), (shape.v_type, shape.v_dim)):
        if kind.has_scales and dim % GROUP:
            raise ProgramError(f"{op.label}: {kind.name} needs heads that are multiples of {GROUP}")
    group, count = p.group_of(op), p.count(op.output)
    layer = p.cache_layers.setdefault((id(op), shape), -1)
    if layer < 0:
        layer = p.cache_layers[id(op), shape] = group.add_layer()
    keys, values = group.keys[layer].ctypes.data, group.values[layer].ctypes.data
    q, k, v = (p.buffers[t] for t in op.inputs)
    cache = p.stages.buffer(0, 0)  # stands for the layer's pool: written, then read
    out = p.output(op)
    store = p.store.get(f"kv_store_{shape.name}", attention.make_kv_store(shape))
    args: list[Argument] = [
        k, k.row_bytes, v, v.row_bytes, group.slots.ctypes.data, keys, values
    ]  # fmt: skip
    p.stages.rows(op.label, store, args, count, [k, v], [cache])
    sink_q = _query_for_sinks(p, op) if shape.sinks else q
    learned = p.vector(op.weights["sinks"]) if shape.has_scores else 0
    seen = p.inputs.positions if shape.causal else p.inputs.last_positions
    attend = p.store.get(f"attention_{shape.name}", attention.make_attention(shape))
    args = [
        group.items.ctypes.data, q, q.row_bytes, out, out.row_bytes,
        seen.ctypes.data, group.table.ctypes.data, group.table.strides[0],
        keys, values, p.scratch.ctypes.data, p.scratch_bytes,
        group.partials.ctypes.data, sink_q, learned,
    ]  # fmt: skip
    reads = [q, cache] if sink_q is q else [q, sink_q, cache]
    p.stages.parallel(op.label, attend, args, group.count.ctypes.data, 1, reads, [out])
    merge = p.store.get(f"merge_{shape.name}", attention.make_merge(shape))
    args = [out, out.row_bytes, group.splits.ctypes.data, group.partials.ctypes.data, learned]
    p.stages.rows(op.label, merge, args, count, [out], [out])


def _query_for_sinks(p: Program, op: Op) -> Buffer:
    """The attention op's queries rotated as if they stood right behind the sinks."""
    made = next(o for o in p.graph.ops if o.output is op.inputs[0])
    if made.kind in ("join", "temper"):
        raise ProgramError(f"{op.label}: the ring context policy cannot turn these queries again")
    if made.kind != "rope":  # a layer without rotation sees no difference
        return p.buffers[op.inputs[0]]
    plain = p.buffers[op.inputs[0]]
    out = p.stages.buffer(plain.n_rows, plain.row_bytes)
    rotate(p, made, out, p.inputs.sink_positions)
    return out


LOWERINGS: dict[str, Lowering] = {"attention": _attention}
