"""What linear kernels read: rows of activations, quantized to int8 in blocks or left float32.

A row is a run of fixed structs, one per block, so that a kernel needs one pointer per token:

* ``q8_256`` for K-quants, 352 bytes per 256 values: int8 codes | 256: float32 scale | 272: eight
  int16 sums of 32 codes | 288: sixteen int32 sums of 16 codes times -32.
* ``q8_32`` for 32-value blocks, 48 bytes: int8 codes | 32: float32 scale | 36: float32 scale times
  the sum of codes | 40: int32 sum of codes times -128.
* ``f32``: the float32 row itself.

A row is quantized alone (architecture, rule 6): code = round(x * 127 / max|x|), half to even. The
negative multiples of sums are starting values of accumulators for biased codes; other biases are
arithmetic shifts of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.kernels.cpu.store import EmitKernel
from edgellm.kernels.cpu.vector import F32, Emitter, Value


@dataclass(frozen=True)
class Activation:
    """A format of activation rows: ``block`` values in ``bytes`` bytes."""

    name: str
    block: int
    bytes: int

    def row_bytes(self, n: int) -> int:
        return n // self.block * self.bytes


Q8_256 = Activation("q8_256", 256, 352)
Q8_32 = Activation("q8_32", 32, 48)
PLAIN = Activation("f32", 1, 4)


def make_quantize(form: Activation) -> EmitKernel:
    """Kernel over rows. Arguments: 0 x, 1 x row bytes, 2 out, 3 out row bytes, 4 blocks a row."""

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        x, x_bytes, out, out_bytes, n_blocks = e.arguments(args, 5)
        with e.loop(hi, lo) as row:
            source, target = x + row * x_bytes, out + row * out_bytes
            with e.loop(n_blocks) as i:
                _quantize_block(e, form, source + i * (4 * form.block), target + i * form.bytes)

    return emit


def _quantize_block(e: Emitter, form: Activation, x: Value, out: Value) -> None:
    values = [e.f32(x + 4 * i) for i in range(0, form.block, e.lanes)]
    largest = e.abs(values[0])
    for v in values[1:]:
        largest = e.maximum(largest, e.abs(v))
    largest = e.max(largest)
    zero = largest.eq(0.0)
    one = e.const(1.0, F32, e.lanes)
    factor = e.select(zero, e.zeros(), 127.0 / e.select(zero, one, largest))
    scale = (largest * (1 / 127))[0]
    codes = [e.rint(v * factor).i32() for v in values]
    for i, c in enumerate(codes):
        e.store(c.i8(), out + i * e.lanes)
    if form is Q8_32:
        total = codes[0]
        for c in codes[1:]:
            total = total + c
        total = e.sum(total)[0]
        e.store(scale, out + 32)
        e.store(total.f32() * scale, out + 36)
        e.store(total * -128, out + 40)
        return
    per_sum = 16 // e.lanes if e.lanes < 16 else 1
    sums = []
    for i in range(0, len(codes), per_sum):
        part = codes[i]
        for c in codes[i + 1 : i + per_sum]:
            part = part + c
        sums.append(e.sum(part)[0])
    e.store(scale, out + 256)
    for i, s in enumerate(sums):
        e.store(s * -32, out + 288 + 4 * i)
    for i in range(8):
        e.store((sums[2 * i] + sums[2 * i + 1]).i16(), out + 272 + 2 * i)
