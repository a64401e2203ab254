"""The operations that an encoder is written over: one block in each lane.

A type's encoder is written once, as for a single block, over `Lanes`. numpy executes it here over
all blocks at a time (that is the specification) and kernels/cpu traces the same text into vector
code, so both give the same bits. Therefore an encoder uses only the methods of `Lanes` and
+ - * / < > <= >= & | << >> on its values, with Python numbers as constants, and no branch that
depends on data. Float operations are rounded one by one to float32: nothing is fused.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Lane: TypeAlias = Any  # float32, int32 or a condition in each lane
Index: TypeAlias = Any  # a number that all lanes share: an int, or the counter of a loop
Table: TypeAlias = Any  # float32 values by Index


class Lanes(Protocol):
    """The blocks to encode. Every method is total: no errors."""

    is_weighted: bool  # elements have an importance

    def x(self, i: Index) -> Lane:
        """Element i of each block, float32."""

    def w(self, i: Index) -> Lane:
        """Its importance, the weight of its squared error; 1 where there is none."""

    def number(self, x: Index | float) -> Lane:
        """A number as float32 in all lanes."""

    def select(self, condition: Lane, yes: Lane | float, no: Lane | float) -> Lane:
        """Of float32: yes where the condition holds, else no."""

    def minimum(self, a: Lane, b: Lane | float) -> Lane:
        """a where a < b, else b: b where either is NaN."""

    def maximum(self, a: Lane, b: Lane | float) -> Lane:
        """a where a > b, else b: b where either is NaN."""

    def largest(self, values: Sequence[Lane]) -> Lane:
        """The largest magnitude of all values; NaN where one of them is NaN."""

    def abs(self, x: Lane) -> Lane:
        """Magnitude."""

    def sqrt(self, x: Lane) -> Lane:
        """Square root."""

    def inverse(self, x: Lane) -> Lane:
        """1 / x, and 0 of 0."""

    def round(self, x: Lane) -> Lane:
        """To the nearest integer, halves to even; |x| < 2**22."""

    def truncate(self, x: Lane) -> Lane:
        """To an integer, towards zero; |x| < 2**31."""

    def times_plus(self, a: Lane, b: Lane, c: float) -> Lane:
        """a * b + c, rounded by way of float64."""

    def stepped(self, x: Lane, edges: Sequence[float], values: Sequence[int]) -> Lane:
        """values[the number of edges below x] as float32; edges rise, x is a number."""

    def i32(self, x: Lane) -> Lane:
        """float32 that are integers, as int32."""

    def f32(self, x: Lane) -> Lane:
        """int32 as float32; |x| <= 2**24."""

    def bits(self, x: Lane) -> Lane:
        """The 32 bits of float32 as int32."""

    def from_bits(self, x: Lane) -> Lane:
        """The float32 of these 32 bits."""

    def half(self, x: Lane) -> Lane:
        """The 16 bits of the nearest half, ties to even, as int32; infinity beyond 65504."""

    def from_half(self, bits: Lane) -> Lane:
        """The half of these bits as float32."""

    def table(self, n: int) -> Table:
        """Room for n float32 in each lane, written before they are read."""

    def loop(self, n: int, body: Callable[..., Sequence[Lane] | None], *state: Lane) -> list[Lane]:
        """state = body(i, *state) for each i below n, all float32; returns the last state."""

    def put(self, offset: Index, value: Lane, n: int) -> None:
        """The low n bytes of int32, 1, 2 or 4, become the block's bytes from ``offset``."""


class NumpyLanes:
    """`Lanes` over float32 blocks [n_blocks, elements]: values are arrays [n_blocks].

    ``weights`` [n_blocks, elements] or None; ``out`` uint8 [n_blocks, bytes] is written.
    """

    def __init__(self, blocks: NDArray[np.float32], weights: NDArray[np.float32] | None,
                 out: NDArray[np.uint8]) -> None:  # fmt: skip
        self._x = np.ascontiguousarray(blocks.T)
        self._w = None if weights is None else np.ascontiguousarray(weights.T)
        self._out, self.is_weighted = out, weights is not None

    def x(self, i: int) -> Lane:
        return self._x[i]

    def w(self, i: int) -> Lane:
        return np.float32(1) if self._w is None else self._w[i]

    def number(self, x: float) -> Lane:
        return np.full(len(self._out), x, np.float32)

    def select(self, condition: Lane, yes: Lane, no: Lane) -> Lane:
        # of two Python numbers it would be float64
        return np.asarray(np.where(condition, yes, no), np.float32)

    def minimum(self, a: Lane, b: Lane) -> Lane:
        return np.where(a < b, a, b)

    def maximum(self, a: Lane, b: Lane) -> Lane:
        return np.where(a > b, a, b)

    def largest(self, values: Sequence[Lane]) -> Lane:
        return np.abs(values).max(axis=0)

    def abs(self, x: Lane) -> Lane:
        return np.abs(x)

    def sqrt(self, x: Lane) -> Lane:
        return np.sqrt(x)

    def inverse(self, x: Lane) -> Lane:
        return np.where(x == 0, np.float32(0), np.float32(1) / x)

    def round(self, x: Lane) -> Lane:
        return np.rint(x)

    def truncate(self, x: Lane) -> Lane:
        return np.trunc(x)

    def times_plus(self, a: Lane, b: Lane, c: float) -> Lane:
        return (a.astype(np.float64) * b + c).astype(np.float32)

    def stepped(self, x: Lane, edges: Sequence[float], values: Sequence[int]) -> Lane:
        return np.array(values, np.float32)[np.searchsorted(np.array(edges, np.float32), x)]

    def i32(self, x: Lane) -> Lane:
        return x.astype(np.int32)

    def f32(self, x: Lane) -> Lane:
        return x.astype(np.float32)

    def bits(self, x: Lane) -> Lane:
        return x.view(np.int32)

    def from_bits(self, x: Lane) -> Lane:
        return x.view(np.float32)

    def half(self, x: Lane) -> Lane:
        return x.astype("<f2").view("<u2").astype(np.int32)

    def from_half(self, bits: Lane) -> Lane:
        return bits.astype("<u2").view("<f2").astype(np.float32)

    def table(self, n: int) -> list[Lane]:
        return [None] * n

    def loop(self, n: int, body: Callable[..., Sequence[Lane] | None], *state: Lane) -> list[Lane]:
        now: Sequence[Lane] = state
        for i in range(n):
            now = body(i, *now) or ()
        return list(now)

    def put(self, offset: int, value: Lane, n: int) -> None:
        self._out[:, offset : offset + n] = value.astype("<i4")[:, None].view(np.uint8)[:, :n]


def word(octets: Sequence[Lane]) -> Lane:
    """Four int32 in 0..255 as one, the first lowest."""
    a, b, c, d = octets
    return a | (b << 8) | (c << 16) | (d << 24)


def put_nibbles(o: Lanes, offset: Index, codes: Sequence[Lane]) -> None:
    """32 codes below 16: byte i holds code i low and code i + 16 high."""
    for i in range(0, 16, 4):
        o.put(offset + i, word([codes[k] | (codes[k + 16] << 4) for k in range(i, i + 4)]), 4)


def bit_of_each(codes: Sequence[Lane], bit: int) -> Lane:
    """That bit of up to 32 int32 codes, the first lowest."""
    found = (codes[0] >> bit) & 1
    for i, code in enumerate(codes[1:], 1):
        found = found | (((code >> bit) & 1) << i)
    return found
