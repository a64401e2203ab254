"""What linear kernels read: rows of activations, quantized to int8 or left float32.

A row is a run of structs, one for each *span* of values that share a scale; a kernel needs one
pointer per token. The sums of codes in a struct serve biased codes (as starting values of sums) and
the minimums of blocks. A row is quantized alone (architecture, rule 6), half to even.

``q8``, for formats of 32 elements (52 bytes for 32 values): int8 codes | 32: float32 scale |
36: float32 scale times the sum of codes | 40: int32 sum of codes times -128, -16 and -8.

``q8k``, for K-quants (188 bytes for 128 values): int8 codes | 128: float32 scale | 132: for each 16
codes the start of a sum with codes biased by 32, which is -32 times theirs, as int32, or on targets
whose sums have 16 bits as two int16 for elements 0, 1 and 2, 3 of each four | 164: int16 sums of
each 32 | 172: int16 sums of each 16. The scale is that of the largest value, or where 16 values are
large together of their sum: the sum of 16 absolute codes stays below 1024, so that products with
5-bit codes, or 6-bit codes around 0, fit in 16 bits and scales apply by products of 16-bit pairs.
A span of 256 would let an outlier take the resolution of 255 neighbours.

``q8x2`` and ``q8kx2`` have a second struct right behind each first: what rounding lost, in codes
up to 63 with 1/126 of the scale. Their 14 bits are for tensors with outliers (``Graph.precise``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.cpu.store import EmitKernel
from edgellm.kernels.cpu.vector import F32, I16, I32, Emitter, Value

GROUP = 32  # values a layout reads together
# offsets behind the codes of a struct
SCALE, SCALED_SUM, BIASED_SUMS = 0, 4, 8
BIASES = (128, 16, 8)  # of the codes whose sums start from BIASED_SUMS
STARTS, SUMS, HALF_SUMS = 4, 36, 44
_MOST_OF_16 = 1014  # leaves room for what rounding adds to 16 codes below 1024
_RESIDUAL = 126  # one step of a first term in steps of its second
_AT_ONCE = 4  # spans of 32 that are quantized together
_LEAST = 1e-30  # spans below count as 0: the steps of still smaller ones have no finite inverse


@dataclass(frozen=True)
class Activation:
    """A format of activation rows: ``terms`` structs (0: plain floats) for each span of values."""

    name: str
    span: int
    terms: int = 1

    @property
    def struct_bytes(self) -> int:
        """Of one term."""
        return self.span + (20 if self.span == GROUP else 60)

    @property
    def groups(self) -> int:
        """Groups in a span."""
        return self.span // GROUP

    def row_bytes(self, n: int) -> int:
        return n // self.span * self.struct_bytes * self.terms if self.terms else 4 * n

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
    if form.span > GROUP:
        sums = np.abs(spans).reshape(*spans.shape[:-1], -1, 16)
        while half := sums.shape[-1] // 2:  # in the kernel's order
            sums = sums[..., :half] + sums[..., half:]
        most = sums[..., 0].max(-1, keepdims=True)
        largest = np.maximum(largest, most * np.float32(127 / _MOST_OF_16))
    is_zero = largest < _LEAST
    factor = np.where(is_zero, 0, 127 / np.where(is_zero, 1, largest)).astype(np.float32)
    scale, total = largest * np.float32(1 / 127), np.zeros_like(spans)
    for _ in range(form.terms):
        total = total + np.rint((spans - total) * factor) * scale
        factor, scale = factor * np.float32(_RESIDUAL), scale * np.float32(1 / _RESIDUAL)
    return total.reshape(x.shape).astype(np.float32)


def make_quantize(form: Activation) -> EmitKernel:
    """Over rows. 0 x, 1 x row bytes, 2 out, 3 out row bytes, 4 spans in a row."""

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        x, x_bytes, out, out_bytes, n_spans = e.arguments(args, 5)
        at_once = _AT_ONCE if form.span == GROUP else 1
        with e.loop(hi, lo) as row:
            source, target = x + row * x_bytes, out + row * out_bytes

            def spans(first: Value, n: int, source: Value = source, target: Value = target) -> None:
                at = source + first * (4 * form.span)
                _quantize_spans(e, form, n, at, target + first * (form.struct_bytes * form.terms))

            whole = n_spans // at_once * at_once
            with e.loop(whole, step=at_once) as i:
                spans(i, at_once)
            if at_once > 1:
                with e.loop(n_spans, whole) as i:
                    spans(i, 1)

    return emit


Runs = list[list[Value]]  # of 16 values, each in 16 / lanes vectors


def _quantize_spans(e: Emitter, form: Activation, n: int, x: Value, out: Value) -> None:
    """``n`` spans at once: one division serves them all, and reductions halve their vectors."""
    spans: list[Runs] = [
        [[e.f32(x + 4 * (s + i + j)) for j in range(0, 16, e.lanes)]
         for i in range(0, form.span, 16)]
        for s in range(0, n * form.span, form.span)
    ]  # fmt: skip
    tops = [e.largest([v for run in runs for v in run]) for runs in spans]
    if n > 1:
        (largest,) = _folded(e, tops, (8, 4, 2, 1), e.larger)
    else:
        largest = e.reduce(tops[0], e.larger)
    if form.span > GROUP:
        (most,) = _folded(e, [_added([e.abs(v) for v in run]) for run in spans[0]], (8, 4, 2, 1))
        most = e.reduce(most, e.larger) * (127 / _MOST_OF_16)
        largest = e.larger(most[0].splat(e.lanes), largest)
    one = e.const(1.0, F32, largest.n)
    is_zero = largest < _LEAST
    factor = 127.0 / e.select(is_zero, one, largest)
    factor, scale = e.select(is_zero, e.zeros(largest.n), factor), largest * (1 / 127)
    for term in range(form.terms):
        if term:
            factor, scale = factor * float(_RESIDUAL), scale * (1 / _RESIDUAL)
        coded: list[Runs] = []
        for s, runs in enumerate(spans):
            times, step = (v.shuffle([s] * e.lanes) if n > 1 else v for v in (factor, scale))
            codes = [[e.round_i32(v * times) for v in run] for run in runs]
            coded.append(codes)
            spans[s] = [[e.fma(-c.f32(), step, v) for c, v in zip(*both, strict=True)]
                        for both in zip(codes, runs, strict=True)]  # fmt: skip
        _store_term(e, form, coded, scale, out + term * form.struct_bytes)


def _added(values: list[Value]) -> Value:
    """By halves, as a reduction goes on in one vector: the same order on every target."""
    while len(values) > 1:
        half = len(values) // 2
        values = [a + b for a, b in zip(values[:half], values[half:], strict=True)]
    return values[0]


def _folded(
    e: Emitter, runs: list[Value], bits: tuple[int, ...],
    combine: Callable[[Value, Value], Value] = lambda a, b: a + b,
) -> list[Value]:  # fmt: skip
    """Lanes of every run whose numbers differ in ``bits``, combined in that order; one vector
    [runs] for each value of the other bit, if there is one. Two vectors fold into one, so that
    the work halves at every step."""
    n = e.lanes
    vectors, labels = runs, [[(r, lane) for lane in range(n)] for r in range(len(runs))]
    for bit in bits:
        if bit >= n:  # such lanes were added as whole vectors
            continue
        folded, folded_labels = [], []
        for i in range(0, len(vectors), 2):
            a, b = vectors[i], vectors[min(i + 1, len(vectors) - 1)]
            flat = labels[i] + (labels[i + 1] if i + 1 < len(vectors) else [])
            left = [k for k, (_, lane) in enumerate(flat) if not lane & bit]
            right = [flat.index((run, lane | bit)) for run, lane in (flat[k] for k in left)]
            folded.append(combine(a.shuffle(left, b), a.shuffle(right, b)))
            folded_labels.append([flat[k] for k in left])
        vectors, labels = folded, folded_labels
    while len(vectors) > 1:  # one behind the other
        vectors = [a.shuffle(range(2 * a.n), b)
                   for a, b in zip(vectors[::2], vectors[1::2], strict=True)]  # fmt: skip
    flat = [label for each in labels for label in each]
    rest = sorted({lane for _, lane in flat})
    order = [[flat.index((run, lane)) for run in range(len(runs))] for lane in rest]
    return [vectors[0].shuffle(places) for places in order]


def _store_term(e: Emitter, form: Activation, spans: list[Runs], scales: Value, out: Value) -> None:
    """The structs of spans, whose codes and scales are given."""
    for s, codes in enumerate(spans):
        at = out + s * (form.struct_bytes * form.terms)
        for i, run in enumerate(codes):
            for j, c in enumerate(run):
                e.store(c.i8(), at + (16 * i + j * e.lanes))
    if form.span == GROUP:
        _store_sums(e, form, spans, scales, out)
        return
    # sums of the codes at places 0, 1 and at 2, 3 of each four, for every run
    first, last = _folded(e, [_added(run) for run in spans[0]], (8, 4, 1))
    halves = first + last
    out = out + form.span
    e.store(scales[0], out + SCALE)
    sums = halves.shuffle(range(0, halves.n, 2)) + halves.shuffle(range(1, halves.n, 2))
    if e.target.narrow_sums:
        starts = ((first * -32) & 0xFFFF) | ((last * -32) << 16)
    else:
        starts = halves * -32
    e.store(starts, out + STARTS)
    e.store(halves.i16(), out + HALF_SUMS)
    e.store(sums.i16(), out + SUMS)


def _store_sums(e: Emitter, form: Activation, spans: list[Runs], scales: Value, out: Value) -> None:
    """What stands behind the codes of ``q8``."""
    runs = [_added([v for run in codes for v in run]) for codes in spans]
    totals = _folded(e, runs, (8, 4, 2, 1))[0] if len(runs) > 1 else e.sum(runs[0])
    scaled = totals.f32() * scales
    biased = [totals * -bias for bias in BIASES]
    for s in range(len(spans)):
        at = out + (s * form.struct_bytes * form.terms + form.span)
        e.store(scales[s], at + SCALE)
        e.store(scaled[s], at + SCALED_SUM)
        for k, sums in enumerate(biased):
            e.store(sums[s], at + (BIASED_SUMS + 4 * k))


def start_of_biased(e: Emitter, struct: Value, bias: int) -> Value:
    """What the sum over a group of ``q8`` with codes biased by one of BIASES starts from."""
    return e.broadcast(I32, struct + (GROUP + BIASED_SUMS + 4 * BIASES.index(bias)))


def start_of_sum(e: Emitter, struct: Value, form: Activation, half: int, shift: int) -> Value:
    """What a sum over 16 codes biased by 32 >> shift starts from (see ``STARTS``)."""
    at = struct + (form.span + STARTS + 4 * half)
    if e.target.narrow_sums:
        return e.broadcast(I32, at).bitcast(I16, 2 * e.lanes) >> shift
    return e.broadcast(I32, at) >> shift
