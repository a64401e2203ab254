"""What linear kernels read: rows of activations, quantized to int8 or left float32.

``q8`` is a run of structs of 52 bytes, one per 32 values, so that a kernel needs one pointer per
token: int8 codes | 32: float32 scale | 36: float32 scale times the sum of codes | 40: int32 sum of
codes times -128 | 44, 48: int32 sums of the first and last 16 codes times -32. The negative
multiples of sums are starting values of accumulators for biased codes; other biases are arithmetic
shifts of them. A row is quantized alone (architecture, rule 6): code = round(x * 127 / max|x|),
half to even, with the maximum over a *span* of one struct or of four.

Spans: formats of 32 elements read spans of 32; K-quants read ``q8k``, spans of 128, where 256 would
let an outlier take the resolution of 255 neighbours and 32 costs their tiles 6 % more.

``q8x2`` and ``q8kx2`` have a second struct right behind each first: what rounding lost, in codes
with 1/254 of the scale. Their 15 bits are for models whose activations have outliers
(``Graph.precise``): with spans of 32 and one term Gemma 3 270M still diverges by KL 0.006.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.cpu.store import EmitKernel
from edgellm.kernels.cpu.vector import F32, Emitter, Value

SCALE, SCALED_SUM, SUM_128, SUM_32 = 32, 36, 40, 44  # offsets in a struct
TERM = 52  # bytes of a struct
GROUP = 32  # values of a struct


@dataclass(frozen=True)
class Activation:
    """A format of activation rows: ``terms`` structs (0: plain floats) for each group of values,
    with one scale for each ``span`` of values."""

    name: str
    span: int
    terms: int = 1

    @property
    def group_bytes(self) -> int:
        return TERM * self.terms

    def row_bytes(self, n: int) -> int:
        return n // GROUP * self.group_bytes if self.terms else 4 * n

    def precise(self) -> Activation:
        """The same with two terms."""
        return replace(self, name=f"{self.name}x2", terms=2)


Q8 = Activation("q8", 32)
Q8K = Activation("q8k", 128)
PLAIN = Activation("f32", 1, 0)


def quantized(x: NDArray[np.float32], form: Activation) -> NDArray[np.float32]:
    """The values of rows [n, dim] as kernels that read ``form`` see them; numpy, the specification
    of make_quantize."""
    if not form.terms:
        return x
    spans = x.reshape(len(x), -1, form.span)
    largest = np.abs(spans).max(-1, keepdims=True)
    factor = np.where(largest > 0, 127 / np.where(largest > 0, largest, 1), 0).astype(np.float32)
    scale, total = largest * np.float32(1 / 127), np.zeros_like(spans)
    for _ in range(form.terms):
        total = total + np.rint((spans - total) * factor) * scale
        factor, scale = factor * np.float32(254), scale * np.float32(1 / 254)
    return total.reshape(x.shape).astype(np.float32)


def make_quantize(form: Activation) -> EmitKernel:
    """Over rows. 0 x, 1 x row bytes, 2 out, 3 out row bytes, 4 spans in a row."""
    out_bytes_of_span = form.span // GROUP * form.group_bytes

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        x, x_bytes, out, out_bytes, n_spans = e.arguments(args, 5)
        with e.loop(hi, lo) as row:
            source, target = x + row * x_bytes, out + row * out_bytes
            with e.loop(n_spans) as i:
                at = source + i * (4 * form.span)
                _quantize_span(e, form, at, target + i * out_bytes_of_span)

    return emit


def _quantize_span(e: Emitter, form: Activation, x: Value, out: Value) -> None:
    largest = e.zeros()
    for i in range(0, form.span, e.lanes):
        largest = e.maximum(e.abs(e.f32(x + 4 * i)), largest)
    largest = e.max(largest)
    zero = largest.eq(0.0)
    one = e.const(1.0, F32, e.lanes)
    first_factor = e.select(zero, e.zeros(), 127.0 / e.select(zero, one, largest))
    for group in range(form.span // GROUP):
        values = [e.f32(x + 4 * (GROUP * group + i)) for i in range(0, GROUP, e.lanes)]
        factor, scale = first_factor, largest * (1 / 127)
        for term in range(form.terms):
            rounded = [e.rint(v * factor) for v in values]
            at = out + (form.group_bytes * group + TERM * term)
            _store_term(e, [r.i32() for r in rounded], scale[0], at)
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
