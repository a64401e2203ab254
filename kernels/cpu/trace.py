"""``EDGELLM_TRACE=ops``: after a step, every op against the reference on the op's own inputs.

The first op whose output is further from the reference than quantized activations explain is
named with its layer. Needs a program built with ``share_memory=False``, so that all tensors of the
step are still whole.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels import reference
from edgellm.kernels.cpu.inputs import AttentionGroup
from edgellm.kernels.cpu.program import Program
from edgellm.kernels.cpu.weights import ReadInto
from edgellm.kernels.graph import MATRIX_OPS, STATE_OPS, Op, Weight

Span = tuple[int, int, int, int]  # first row, tokens, first position, table row
TOLERANCE = 1e-6  # NMSE; linear ops are compared on activations quantized as their kernels do


class OpDiffers(ValueError):
    """An op's output is not what the reference computes from the same inputs."""


def check_ops(program: Program, spans: Sequence[Span], n_out: int, read: ReadInto) -> None:
    """Compare all ops of the step just run; raises OpDiffers at the first that differs and
    otherwise prints the largest deviation of each kind to stderr."""
    n_tokens = sum(n for _, n, _, _ in spans)
    inputs = program.inputs
    weights: dict[str, NDArray[np.float32]] = {}

    def load(weight: Weight) -> NDArray[np.float32]:
        if weight.name not in weights:
            n_rows = int(np.prod(weight.shape[1:]))
            raw = np.empty(weight.type.row_bytes(weight.n_in) * n_rows, np.uint8)
            read(weight, 0, raw)
            values = weight.type.dequantize(raw.reshape(n_rows, -1))
            weights[weight.name] = values.reshape(weight.shape[::-1])
        return weights[weight.name]

    step = reference.Step(
        np.zeros(n_tokens, np.int64),
        inputs.positions[:n_tokens],
        load,
        inputs.out_rows[:n_out],
        program.limits.n_ctx,
    )
    worst: dict[str, float] = {}
    layers: dict[AttentionGroup, int] = {}
    for op in program.graph.ops:
        if op.kind == "part":  # what another device made is taken as it is
            continue
        n_rows = n_out if op.output.rows == "out" else n_tokens
        found = program.values(op.output, n_rows)
        values = [program.values(x, n_out if x.rows == "out" else n_tokens) for x in op.inputs]
        weights.clear()
        if op.kind == "embed":
            table = op.weights["table"]
            expected = table.type.dequantize(inputs.embeddings[:n_tokens])
        elif op.kind == "attention":
            group = program.group_of(op)
            if group.shape.sinks:  # the reference knows no context policy
                continue
            layer = layers[group] = layers.get(group, -1) + 1
            expected = _attention(op, group, layer, values[0], spans, step)
        elif op.kind in STATE_OPS:
            expected = np.concatenate(
                [_from_state(program, op, values, i, step) for i in range(len(spans))]
            )
        else:
            if op.kind in MATRIX_OPS:
                values[0] = program.as_read(op, values[0])
            with np.errstate(all="ignore"):  # a damaged file is what is being looked for
                expected = reference.evaluate(op, values, step)
        scale = float(np.sum(expected.astype(np.float64) ** 2)) or 1.0
        error = float(np.sum((found.astype(np.float64) - expected) ** 2)) / scale
        worst[op.kind] = max(worst.get(op.kind, 0.0), error)
        if not np.isfinite(found).all():
            raise OpDiffers(f"layer {op.layer}, op {op.kind} ({op.label}): not finite numbers")
        if not error <= TOLERANCE:
            raise OpDiffers(
                f"layer {op.layer}, op {op.kind} ({op.label}): NMSE {error:.2e} "
                f"against the reference on the same inputs"
            )
    shown = ", ".join(f"{kind} {error:.1e}" for kind, error in worst.items())
    print(f"trace: {n_tokens} tokens agree with the reference; NMSE at most: {shown}",
          file=sys.stderr)  # fmt: skip


def _attention(
    op: Op, group: AttentionGroup, layer: int, q: NDArray[np.float32], spans: Sequence[Span],
    step: reference.Step,
) -> NDArray[np.float32]:  # fmt: skip
    """The op for every sequence of the step, with keys and values as the cache holds them."""
    out = np.empty((len(q), op.output.dim), np.float32)
    for row, n, first, table_row in spans:
        shape = group.shape
        places = -(-(first + n) // shape.block)
        blocks = group.table[table_row, :places]
        pools = (
            (shape.k_type, group.keys[layer], shape.head_dim, True),
            (shape.v_type, group.values[layer], shape.v_dim, False),
        )
        k, v = (
            kind.values(pool.reshape(group.n_blocks, -1)[blocks], shape.n_kv_heads, dim, is_keys)
            for kind, pool, dim, is_keys in pools
        )
        k, v = k[: first + n], v[: first + n]
        mine = reference.Step(step.tokens, np.arange(first, first + n), step.load)
        out[row : row + n] = reference.evaluate(op, [q[row : row + n], k, v], mine)
    return out


def _from_state(
    program: Program, op: Op, values: list[NDArray[np.float32]], run: int, step: reference.Step
) -> NDArray[np.float32]:
    """A recurrent op over one run, from the state that the run began with."""
    first, n, slot, _ = (int(word) for word in program.inputs.runs[run])
    state = None
    if slot >= 0:
        slots = program.states[id(op)].view(np.float32)
        state = slots.reshape(program.limits.n_states, -1)[slot]
        if op.kind == "conv1d":
            state = state.reshape(-1, op.output.dim)
        else:  # [head][vector][d_k][lanes]
            heads, lanes = op.attrs["n_v_heads"], program.target.lanes
            n_vectors = op.output.dim // heads // lanes
            state = state.reshape(heads, n_vectors, -1, lanes).transpose(0, 2, 1, 3)
    mine = reference.Step(step.tokens, step.positions, step.load, state=state)
    return reference.evaluate(op, [x[first : first + n] for x in values], mine)
