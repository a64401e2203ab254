"""Lowerings of the ops that keep a state for each sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.kernels.cpu import recurrent
from edgellm.kernels.cpu.lowering import Lowering, check_vectors
from edgellm.kernels.cpu.memory import allocate
from edgellm.kernels.cpu.stages import Argument
from edgellm.kernels.graph import Op

if TYPE_CHECKING:
    from edgellm.kernels.cpu.program import Program


def _states(p: Program, op: Op) -> int:
    """The address of an op's states, one in each slot. They outlive lowering."""
    if id(op) not in p.states:
        p.states[id(op)] = allocate(p.limits.n_states * 4 * op.n_state)
    return p.states[id(op)].ctypes.data


def _conv1d(p: Program, op: Op) -> None:
    x, out, taps = p.buffers[op.inputs[0]], p.output(op), op.weights["weight"]
    n_taps, channels = taps.shape
    check_vectors(op, channels)
    kernel = p.store.get(f"conv1d_{n_taps}", recurrent.make_conv1d(n_taps))
    args: list[Argument] = [
        x, x.row_bytes, p.vector(taps, transposed=True), channels, out, out.row_bytes,
        _states(p, op),
        p.inputs.runs.ctypes.data, p.inputs.n_runs.ctypes.data,
    ]  # fmt: skip
    n_work = p.stages.constant(channels // p.target.lanes)
    p.stages.parallel(op.label, kernel, args, n_work, 4, [x], [out])


def _delta_rule(p: Program, op: Op) -> None:
    inputs, out = [p.buffers[t] for t in op.inputs], p.output(op)
    n_k_heads, n_v_heads = op.attrs["n_k_heads"], op.attrs["n_v_heads"]
    d_k, d_v = op.inputs[0].dim // n_k_heads, op.output.dim // n_v_heads
    check_vectors(op, d_k)
    check_vectors(op, d_v)
    kernel = p.store.get(
        f"delta_rule_{n_k_heads}_{n_v_heads}_{d_k}_{d_v}",
        recurrent.make_delta_rule(n_k_heads, n_v_heads, d_k, d_v),
    )
    args: list[Argument] = []
    for buffer in [*inputs, out]:
        args += [buffer, buffer.row_bytes]
    args += [
        _states(p, op),
        p.inputs.runs.ctypes.data, p.inputs.n_runs.ctypes.data,
    ]  # fmt: skip
    n_work = p.stages.constant(op.output.dim // p.target.lanes)
    p.stages.parallel(op.label, kernel, args, n_work, 1, inputs, [out])


LOWERINGS: dict[str, Lowering] = {"conv1d": _conv1d, "delta_rule": _delta_rule}
