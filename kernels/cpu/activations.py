"""What linear kernels read: rows of activations, quantized to int8 in blocks or left float32.

``q8`` is a run of structs of 52 bytes, one per 32 values, so that a kernel needs one pointer per
token: int8 codes | 32: float32 scale | 36: float32 scale times the sum of codes | 40: int32 sum of
codes times -128 | 44, 48: int32 sums of the first and last 16 codes times -32. A row is quantized
alone (architecture, rule 6): code = round(x * 127 / max|x|), half to even.

``q8x2`` has a second struct right behind each first: what rounding lost, in codes with 1/254 of
the scale. Its 15 bits are for models whose activations have outliers (``Graph.precise``).

The negative multiples of sums are starting values of accumulators for biased codes; other biases
are arithmetic shifts of them. K-quants use blocks of 32 too, not 256: it costs them a few percent
and halves to thirds the divergence from float32 (Gemma 3 270M: KL 0.0057 instead of 0.0135).
"""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.kernels.cpu.store import EmitKernel
from edgellm.kernels.cpu.vector import F32, Emitter, Value


@dataclass(frozen=True)
class Activation:
    """A format of activation rows: ``block`` values in ``bytes`` bytes, in ``terms`` structs."""

    name: str
    block: int
    bytes: int
    terms: int

    def row_bytes(self, n: int) -> int:
        return n // self.block * self.bytes


Q8 = Activation("q8", 32, 52, 1)
Q8X2 = Activation("q8x2", 32, 104, 2)
PLAIN = Activation("f32", 1, 4, 0)
TERM = Q8.bytes
SCALE, SCALED_SUM, SUM_128, SUM_32 = 32, 36, 40, 44  # offsets in a q8 struct


def make_quantize(form: Activation) -> EmitKernel:
    """To q8 or q8x2, over rows. 0 x, 1 x row bytes, 2 out, 3 out row bytes, 4 blocks a row."""

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        x, x_bytes, out, out_bytes, n_blocks = e.arguments(args, 5)
        with e.loop(hi, lo) as row:
            source, target = x + row * x_bytes, out + row * out_bytes
            with e.loop(n_blocks) as i:
                _quantize_block(e, form, source + i * (4 * form.block), target + i * form.bytes)

    return emit


def _quantize_block(e: Emitter, form: Activation, x: Value, out: Value) -> None:
    values = [e.f32(x + 4 * i) for i in range(0, Q8.block, e.lanes)]
    largest = e.abs(values[0])
    for v in values[1:]:
        largest = e.maximum(largest, e.abs(v))
    largest = e.max(largest)
    zero = largest.eq(0.0)
    one = e.const(1.0, F32, e.lanes)
    factor = e.select(zero, e.zeros(), 127.0 / e.select(zero, one, largest))
    scale = largest * (1 / 127)
    for term in range(form.terms):
        rounded = [e.rint(v * factor) for v in values]
        _store_term(e, [r.i32() for r in rounded], scale[0], out + TERM * term)
        values = [e.fma(-r, scale, v) for r, v in zip(rounded, values, strict=True)]
        factor, scale = factor * 254.0, scale * (1 / 254)


def _store_term(e: Emitter, codes: list[Value], scale: Value, out: Value) -> None:
    halves = []
    for half in (codes[: len(codes) // 2], codes[len(codes) // 2 :]):
        total = half[0]
        for c in half[1:]:
            total = total + c
        halves.append(e.sum(total)[0])
    for i, c in enumerate(codes):
        e.store(c.i8(), out + i * e.lanes)
    total = halves[0] + halves[1]
    e.store(scale, out + SCALE)
    e.store(total.f32() * scale, out + SCALED_SUM)
    e.store(total * -128, out + SUM_128)
    e.store(halves[0] * -32, out + SUM_32)
    e.store(halves[1] * -32, out + (SUM_32 + 4))
