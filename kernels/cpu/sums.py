"""Integer sums of products of weight codes and activations, one for each row of a packed group.

``Sum32`` keeps them in 32 bits. ``Sum16`` is for AVX2, where vpmaddubsw adds two products in 16
bits: further ones are added there too, two lanes a row, while they fit. Both give the same
integers.
"""

from __future__ import annotations

from edgellm.kernels.cpu.vector import BIT, I16, I32, Emitter, Value

_LARGEST_ACTIVATION = 127


class Sum32:
    """``start``: int32 of every row, or None for 0; ``largest`` bounds the codes."""

    def __init__(self, e: Emitter, largest: int, start: Value | None = None) -> None:
        self.e, self.largest = e, largest
        self._total = e.const(0, I32, e.lanes) if start is None else start

    def add(self, codes: Value, x: Value) -> None:
        """Unsigned codes [4 * lanes], four of each row, times signed bytes x [4 * lanes]."""
        self._total = self.e.dot4(self._total, codes, x, self.largest)

    def total(self) -> Value:
        """int32 [lanes]"""
        return self._total


class Sum16(Sum32):
    """``fits``: the caller knows that the two lanes of a row never leave 16 bits in the end; they
    may in between, where they wrap around. ``start`` is then two int16 for every row."""

    def __init__(
        self, e: Emitter, largest: int, start: Value | None = None, fits: bool = False
    ) -> None:
        super().__init__(e, largest, None if fits else start)
        self.fits, self._used = fits, 0
        self._lanes: Value | None = start if fits else None

    def add(self, codes: Value, x: Value) -> None:
        most = 2 * self.largest * _LARGEST_ACTIVATION
        if not self.fits and self._used + most > 32767:
            self._flush()
        products = self.e.call("llvm.x86.avx2.pmadd.ub.sw", self.e.i16(16), codes, x)
        self._lanes = products if self._lanes is None else self._lanes + products
        self._lanes = self.e.opaque(self._lanes)
        self._used += most

    def lanes(self) -> Value:
        """int16 [2 * lanes]; their pairs add up to the sum."""
        return self._lanes if self._lanes is not None else self.e.const(0, I16, 2 * self.e.lanes)

    def _flush(self) -> None:
        if self._lanes is not None:
            self._total = self._total + self.e.madd_i16(self._lanes, None)
        self._lanes, self._used = None, 0

    def total(self) -> Value:
        self._flush()
        return self._total


class SumOfNibbles(Sum32):
    """The same for codes above 127, whose products vpmaddubsw would saturate."""

    def __init__(self, e: Emitter, largest: int, start: Value | None = None) -> None:
        super().__init__(e, largest)
        self._low, self._high = Sum16(e, 15, start), Sum16(e, largest >> 4)

    def add(self, codes: Value, x: Value) -> None:
        self._low.add(codes & 15, x)
        self._high.add(codes >> 4, x)

    def total(self) -> Value:
        return self._low.total() + (self._high.total() << 4)


def sum_of_products(
    e: Emitter, largest: int, start: Value | None = None, fits: bool = False
) -> Sum32:
    """A new sum; ``fits``: at its end it fits in 16 bits (see ``Sum16``)."""
    if e.target.narrow_sums:
        return Sum16(e, largest, start, fits) if largest <= 127 else SumOfNibbles(e, largest, start)
    return Sum32(e, largest, start)


def add_scaled(e: Emitter, total: Value, a: Sum32, b: Sum32, scales: Value) -> Value:
    """total [lanes] + a * scales[0] + b * scales[1] for sums that fit in 16 bits and scales
    [2 * lanes], two int16 for each row."""
    pairs = scales.bitcast(I32, e.lanes).unsigned()
    if isinstance(a, Sum16) and isinstance(b, Sum16):  # each sum is a pair already
        first, second = pairs & 0xFFFF, pairs >> 16
        total = e.dot2(total, a.lanes(), (first | (first << 16)).bitcast(I16, 2 * e.lanes))
        return e.dot2(total, b.lanes(), (second | (second << 16)).bitcast(I16, 2 * e.lanes))
    n = 2 * e.lanes
    is_second = e.constants(BIT, [0, 1] * e.lanes)
    # opaque, or LLVM makes it a shuffle of two vectors, which takes the multipliers' pipes
    second = e.opaque(b.total() << 16).bitcast(I16, n)
    return e.dot2(total, e.select(is_second, second, a.total().bitcast(I16, n)), scales)
