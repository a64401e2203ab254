"""Fast encoders: the texts of ``quant``, traced into vector code with a block in each lane.

The same operations in the same order as numpy executes, thus the same bits. Blocks are transposed
on the way in, so that no sum runs across lanes, and every target has the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from edgellm.kernels.cpu.store import EmitKernel
from edgellm.kernels.cpu.vector import F32, I32, Emitter, Value
from edgellm.quant.block import QuantType


class _Table:
    """A table of ``Lanes`` on the thread's stack."""

    def __init__(self, e: Emitter, n: int) -> None:
        self.e, self.at = e, e.stack(4 * e.lanes * n)

    def __getitem__(self, i: Value | int) -> Value:
        return self.e.f32(self.at + i * (4 * self.e.lanes))

    def __setitem__(self, i: Value | int, value: Value) -> None:
        self.e.store(value, self.at + i * (4 * self.e.lanes))


class TracedLanes:
    """``edgellm.quant.lanes.Lanes`` over tables of transposed elements and weights; ``out`` is the
    address of the first lane's block, the others' follow."""

    def __init__(self, e: Emitter, x: _Table, w: _Table | None, out: Value, n_bytes: int) -> None:
        self.e, self._x, self._w, self._out, self._n_bytes = e, x, w, out, n_bytes
        self.is_weighted = w is not None

    def _number(self, x: Value | float) -> Value:
        return x if isinstance(x, Value) else self.e.const(float(x), F32, self.e.lanes)

    def x(self, i: Value | int) -> Value:
        return self._x[i]

    def w(self, i: Value | int) -> Value:
        return self._number(1.0) if self._w is None else self._w[i]

    def number(self, x: Value | float) -> Value:
        return x.f32().splat(self.e.lanes) if isinstance(x, Value) else self._number(x)

    def select(self, condition: Value, yes: Value | float, no: Value | float) -> Value:
        return self.e.select(condition, self._number(yes), self._number(no))

    def minimum(self, a: Value, b: Value | float) -> Value:
        return self.select(a < b, a, b)

    def maximum(self, a: Value, b: Value | float) -> Value:
        return self.select(a > b, a, b)

    def largest(self, values: Sequence[Value]) -> Value:
        return self.e.largest(values)

    def abs(self, x: Value) -> Value:
        return self.e.abs(x)

    def sqrt(self, x: Value) -> Value:
        return self.e.sqrt(x)

    def inverse(self, x: Value) -> Value:
        return self.select(x.eq(0.0), 0.0, 1.0 / x)

    def round(self, x: Value) -> Value:
        return self.e.rint(x)

    def truncate(self, x: Value) -> Value:
        return x.i32().f32()

    def times_plus(self, a: Value, b: Value, c: float) -> Value:
        return self.e.fma_wide(a, b, c)

    def stepped(self, x: Value, edges: Sequence[float], values: Sequence[int]) -> Value:
        found = self._number(values[0])
        for edge, (before, value) in zip(edges, pairwise(values), strict=True):
            found = found + self.select(x > edge, value - before, 0.0)
        return found

    def i32(self, x: Value) -> Value:
        return x.i32().signed()

    def f32(self, x: Value) -> Value:
        return x.f32()

    def bits(self, x: Value) -> Value:
        return x.bitcast(I32, self.e.lanes)

    def from_bits(self, x: Value) -> Value:
        return x.bitcast(F32, self.e.lanes)

    def half(self, x: Value) -> Value:
        return self.e.to_f16(x).unsigned().i32().signed()

    def from_half(self, bits: Value) -> Value:
        spare = self.e.stack(2 * self.e.lanes)
        self.e.store(bits.i16(), spare)
        return self.e.load_f16(spare, self.e.lanes)

    def table(self, n: int) -> _Table:
        return _Table(self.e, n)

    def loop(
        self, n: int, body: Callable[..., Sequence[Value] | None], *state: Value
    ) -> list[Value]:
        variables = [self.e.var(value) for value in state]
        with self.e.loop(n) as i:
            after = body(i, *(v.get() for v in variables)) or ()
            for variable, value in zip(variables, after, strict=True):
                variable.set(value)
        return [v.get() for v in variables]

    def put(self, offset: Value | int, value: Value, n: int) -> None:
        narrow = {1: value.i8, 2: value.i16, 4: value.i32}[n]()
        if n == self._n_bytes:  # one after the other
            self.e.store(narrow, self._out)
            return
        for lane in range(self.e.lanes):
            self.e.store(narrow[lane], self._out + (lane * self._n_bytes) + offset)


def _transpose(e: Emitter, addresses: Sequence[Value], n: int, into: _Table) -> None:
    """n float32 from each address, a multiple of ``lanes``, become n vectors over lanes."""
    with e.loop(n, step=e.lanes) as first:
        rows = [e.f32(address + first * 4) for address in addresses]
        distance = e.lanes // 2
        while distance:  # swap what lies beside the diagonal of ever smaller squares
            for i in range(e.lanes):
                if i & distance:
                    continue
                a, b = rows[i], rows[i + distance]
                low = [k if not k & distance else k - distance + e.lanes for k in range(e.lanes)]
                high = [k + distance if not k & distance else k + e.lanes for k in range(e.lanes)]
                rows[i], rows[i + distance] = a.shuffle(low, b), a.shuffle(high, b)
            distance //= 2
        for i, row in enumerate(rows):
            into[first + i] = row


def make_encode(quant_type: QuantType, is_weighted: bool) -> EmitKernel:
    """args: float32 blocks, bytes, number of blocks, importance, blocks of a row. The range counts
    groups of ``lanes`` blocks; there is at least one whole group, and the last one may begin within
    the one before, whose blocks it then encodes again."""

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        source, out, n_blocks, importance, per_row = e.arguments(args, 5)
        n = quant_type.block
        x = _Table(e, n)
        w = _Table(e, n) if is_weighted else None
        with e.loop(hi, lo) as group:
            first = e.minimum(group * e.lanes, n_blocks - e.lanes)
            blocks = [first + lane for lane in range(e.lanes)]
            if n == 1:
                x[0] = e.f32(source + first * 4)
            else:
                _transpose(e, [source + block * (4 * n) for block in blocks], n, x)
            if w is not None:
                weights = [importance + (block % per_row) * (4 * n) for block in blocks]
                _transpose(e, weights, n, w)
            begin = out + first * quant_type.bytes
            quant_type.encode(TracedLanes(e, x, w, begin, quant_type.bytes))

    return emit
