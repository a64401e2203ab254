"""Row ops: everything that handles each token's row on its own, over chunks of rows.

Rows are padded to 16 floats. Arguments are 64-bit integers: addresses, bytes of a row, counts;
each maker's docstring lists them.
"""

from __future__ import annotations

from collections.abc import Callable

from edgellm.kernels.cpu.decode import decode_block
from edgellm.kernels.cpu.store import EmitKernel
from edgellm.kernels.cpu.vector import F32, I64, Emitter, Value
from edgellm.kernels.graph import Rope
from edgellm.quant.block import QuantType


def make_embed(quant_type: QuantType) -> EmitKernel:
    """Decode the step's embedding rows. 0 rows as in the file, 1 their bytes, 2 out, 3 out row
    bytes, 4 blocks a row."""

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        raw, raw_bytes, out, out_bytes, n_blocks = e.arguments(args, 5)
        with e.loop(hi, lo) as row, e.loop(n_blocks) as i:
            target = out + row * out_bytes + i * (4 * quant_type.block)
            at = 0
            for chunk in decode_block(e, quant_type, raw + row * raw_bytes + i * quant_type.bytes):
                e.store(chunk, target + 4 * at)
                at += chunk.n

    return emit


def make_rms_norm() -> EmitKernel:
    """0 x, 1 x row bytes, 2 weight, 3 out, 4 out row bytes, 5 runs in a row, 6 elements in a run,
    7 eps (float32 bits)."""

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        x, x_bytes, weight, out, out_bytes, n_runs, n = e.arguments(args, 7)
        eps = e.load(F32, args + 56)
        with e.loop(hi, lo) as row, e.loop(n_runs) as run:
            source, target = x + row * x_bytes + run * n * 4, out + row * out_bytes + run * n * 4
            squares = e.var(e.zeros())
            with e.loop(n, step=e.lanes) as i:
                v = e.f32(source + i * 4)
                squares.set(e.fma(v, v, squares.get()))
            mean = e.sum(squares.get())[0] / n.f32()
            factor = (1.0 / e.sqrt(mean + eps)).splat(e.lanes)
            with e.loop(n, step=e.lanes) as i:
                v = e.f32(source + i * 4) * factor * e.f32(weight + i * 4)
                e.store(v, target + i * 4)

    return emit


def _make_map(function: Callable[[Emitter, list[Value]], Value], n_inputs: int) -> EmitKernel:
    """Elementwise. For each input: address, row bytes; then out, out row bytes, elements."""

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        a = e.arguments(args, 2 * n_inputs + 3)
        out, out_bytes, n = a[-3:]
        with e.loop(hi, lo) as row:
            rows = [a[2 * k] + row * a[2 * k + 1] for k in range(n_inputs)]
            target = out + row * out_bytes
            with e.loop(n, step=e.lanes) as i:
                e.store(function(e, [e.f32(r + i * 4) for r in rows]), target + i * 4)

    return emit


def make_add() -> EmitKernel:
    return _make_map(lambda e, v: v[0] + v[1], 2)


def make_scale(factor: float) -> EmitKernel:
    return _make_map(lambda e, v: v[0] * factor, 1)


def make_swiglu() -> EmitKernel:
    def swiglu(e: Emitter, v: list[Value]) -> Value:
        gate, up = v
        return gate / (e.exp(-gate) + 1.0) * up

    return _make_map(swiglu, 2)


def make_geglu() -> EmitKernel:
    def geglu(e: Emitter, v: list[Value]) -> Value:
        gate, up = v
        inner = gate * 0.7978845608028654 * (gate * gate * 0.044715 + 1.0)
        return gate * 0.5 * (e.tanh(inner) + 1.0) * up

    return _make_map(geglu, 2)


def make_select() -> EmitKernel:
    """Copy wanted rows. 0 x, 1 x row bytes, 2 row numbers, 3 out, 4 out row bytes, 5 elements."""

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        x, x_bytes, numbers, out, out_bytes, n = e.arguments(args, 6)
        with e.loop(hi, lo) as row:
            source = x + e.load(I64, numbers + row * 8) * x_bytes
            target = out + row * out_bytes
            with e.loop(n, step=e.lanes) as i:
                e.store(e.f32(source + i * 4), target + i * 4)

    return emit


def make_rope(rope: Rope, head_dim: int) -> EmitKernel:
    """0 x, 1 x row bytes, 2 positions, 3 table (see RopeTable), 4 out, 5 out row bytes, 6 heads."""
    dim = rope.dim

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        x, x_bytes, positions, table, out, out_bytes, n_heads = e.arguments(args, 7)
        # the widest vector that a half (neox) or the rotated part (norm) is a multiple of
        span = dim // 2 if rope.layout == "neox" else dim
        width = e.lanes
        while span % width:
            width //= 2
        with e.loop(hi, lo) as row, e.loop(n_heads) as head:
            factors = table + e.load(I64, positions + row * 8) * (8 * dim)
            source = x + row * x_bytes + head * (4 * head_dim)
            target = out + row * out_bytes + head * (4 * head_dim)
            for i in range(0, dim, width):
                v = e.f32(source + 4 * i, width)
                if rope.layout == "neox":
                    partner = e.f32(source + 4 * ((i + dim // 2) % dim), width)
                else:
                    partner = v.shuffle([k ^ 1 for k in range(width)]) if width > 1 else v
                turned = v * e.f32(factors + 4 * i, width)
                turned = e.fma(partner, e.f32(factors + 4 * (dim + i), width), turned)
                e.store(turned, target + 4 * i)
            for i in range(dim, head_dim, 2):
                e.store(e.f32(source + 4 * i, 2), target + 4 * i)

    return emit
