"""Row ops: everything that handles each token's row on its own, over chunks of rows.

Rows are padded to 16 floats. Arguments are 64-bit integers: addresses, bytes of a row, counts;
each maker's docstring lists them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Map:
    """An elementwise function of ``n_inputs`` vectors and ``n_constants`` numbers."""

    function: Callable[..., Value]
    n_inputs: int = 1
    n_constants: int = 0


def _sigmoid(e: Emitter, x: Value) -> Value:
    return 1.0 / (e.exp(-x) + 1.0)


def _silu(e: Emitter, x: Value) -> Value:
    return x / (e.exp(-x) + 1.0)


def _gelu(e: Emitter, x: Value) -> Value:
    inner = x * 0.7978845608028654 * (x * x * 0.044715 + 1.0)
    return x * 0.5 * (e.tanh(inner) + 1.0)


def _softplus(e: Emitter, x: Value) -> Value:
    """max(x, 0) + log1p(exp(-|x|)), which neither overflows nor cancels."""
    return e.maximum(x, e.const(0.0, F32, x.n)) + e.log1p(e.exp(-e.abs(x)))


def _swiglu_clamped(e: Emitter, gate: Value, up: Value) -> Value:
    gate = e.select(gate > 7.0, e.const(7.0, F32, gate.n), gate)
    up = e.select(up > 7.0, e.const(7.0, F32, up.n), up)
    up = e.select(up < -7.0, e.const(-7.0, F32, up.n), up)
    return gate / (e.exp(gate * -1.702) + 1.0) * (up + 1.0)


MAPS = {
    "add": Map(lambda e, x, y: x + y, 2),
    "mul": Map(lambda e, x, y: x * y, 2),
    "scale": Map(lambda e, x, factor: x * factor, 1, 1),
    "softcap": Map(lambda e, x, cap: e.tanh(x / cap) * cap, 1, 1),
    "sigmoid": Map(_sigmoid),
    "softplus": Map(_softplus),
    "silu": Map(_silu),
    "gelu": Map(_gelu),
    "swiglu": Map(lambda e, gate, up: _silu(e, gate) * up, 2),
    "geglu": Map(lambda e, gate, up: _gelu(e, gate) * up, 2),
    "swiglu_clamped": Map(_swiglu_clamped, 2),
}


def make_map(name: str) -> EmitKernel:
    """For each input: address, row bytes (0: one row for all); then out, out row bytes, elements;
    then constants (float32 bits)."""
    of = MAPS[name]

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        a = e.arguments(args, 2 * of.n_inputs + 3)
        out, out_bytes, n = a[-3:]
        constants = [e.load(F32, args + 8 * (len(a) + k)) for k in range(of.n_constants)]
        with e.loop(hi, lo) as row:
            rows = [a[2 * k] + row * a[2 * k + 1] for k in range(of.n_inputs)]
            target = out + row * out_bytes
            with e.loop(n, step=e.lanes) as i:
                e.store(of.function(e, *(e.f32(r + i * 4) for r in rows), *constants),
                        target + i * 4)  # fmt: skip

    return emit


def make_row_factor(by_position: bool) -> EmitKernel:
    """Each row times a factor: the first element of a row of y, or one of a table by position.
    0 x, 1 x row bytes, 2 y or table, 3 y row bytes or positions, 4 out, 5 out row bytes,
    6 elements."""

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        x, x_bytes, y, y_bytes, out, out_bytes, n = e.arguments(args, 7)
        with e.loop(hi, lo) as row:
            at = e.load(I64, y_bytes + row * 8) * 4 if by_position else row * y_bytes
            factor = e.broadcast(F32, y + at)
            source, target = x + row * x_bytes, out + row * out_bytes
            with e.loop(n, step=e.lanes) as i:
                e.store(e.f32(source + i * 4) * factor, target + i * 4)

    return emit


def make_slice(start: int, n: int, run: int) -> EmitKernel:
    """Part of each run. 0 x, 1 x row bytes, 2 out, 3 out row bytes, 4 runs."""

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        x, x_bytes, out, out_bytes, n_runs = e.arguments(args, 5)
        width = math.gcd(e.lanes, n)
        with e.loop(hi, lo) as row, e.loop(n_runs) as r:
            source = x + row * x_bytes + r * (4 * run) + 4 * start
            target = out + row * out_bytes + r * (4 * n)
            with e.loop(n, step=width) as i:
                e.store(e.f32(source + i * 4, width), target + i * 4)

    return emit


def make_join(n_x: int, n_y: int, is_shared: bool) -> EmitKernel:
    """Heads of x and y one behind the other. 0 x, 1 x row bytes, 2 y, 3 y row bytes, 4 out,
    5 out row bytes, 6 heads."""

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        x, x_bytes, y, y_bytes, out, out_bytes, n_heads = e.arguments(args, 7)
        with e.loop(hi, lo) as row, e.loop(n_heads) as head:
            target = out + row * out_bytes + head * (4 * (n_x + n_y))
            first = x + row * x_bytes + head * (4 * n_x)
            second = y + row * y_bytes + (head * 0 if is_shared else head * (4 * n_y))
            for source, at, n in ((first, 0, n_x), (second, 4 * n_x, n_y)):
                width = math.gcd(e.lanes, n)
                with e.loop(n, step=width) as i:
                    e.store(e.f32(source + i * 4, width), target + at + i * 4)

    return emit


def make_select() -> EmitKernel:
    """Copy rows by number. 0 x, 1 x row bytes, 2 numbers, 3 out, 4 out row bytes, 5 elements."""

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
