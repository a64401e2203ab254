"""Q4_1: 32 elements, a scale and an offset that is added.

bytes 0-1 scale d (f16) | 2-3 offset m (f16) | 4-19 nibbles as in Q4_0
"""

from collections.abc import Iterator

from edgellm.quant.block import Block, QuantType, Value
from edgellm.quant.lanes import Lane, Lanes, put_nibbles
from edgellm.quant.search import Grid, Group, Whole, affine_search, stored, weights


def offset_codes(o: Lanes, top: int, grid: Grid) -> tuple[Lane, Lane, list[Lane]]:
    """The bits of d and m, and 32 codes up to ``top`` with d * code + m; Q5_1 chooses them alike.

    Without importance as ggml does: codes reach from the smallest element to the largest.
    """
    x = [o.x(k) for k in range(32)]
    if o.is_weighted:
        levels = Whole(0, top)
        scale, lowest = affine_search(Group(o, weights(o, 32), 0, 32), levels, grid)
        d, m = stored(o, scale), stored(o, lowest)
        factor = o.inverse(d)
        return o.half(d), o.half(m), [levels.code(o, (element - m) * factor) for element in x]
    low, high = x[0], x[0]
    for element in x[1:]:
        low, high = o.minimum(element, low), o.maximum(element, high)
    d = (high - low) / float(top)
    factor = o.inverse(d)

    def code(element: Lane) -> Lane:
        shifted = o.minimum((element - low) * factor + 0.5, float(top))
        return o.i32(o.truncate(shifted))

    return o.half(d), o.half(low), [code(element) for element in x]


class Q4_1(QuantType):
    name, id, block, bytes, chunk = "q4_1", 3, 32, 20, 16

    def codes(self, b: Block) -> Iterator[Value]:
        packed = b.u8(4, 16)
        yield packed & 15
        yield packed >> 4

    def scales(self, b: Block) -> Iterator[tuple[Value, Value | None]]:
        # x - (-m) is x + m in every bit; * -1 keeps the sign of a zero, 0 - m would not.
        d, minimum = b.f16(0), b.f16(2) * -1
        yield d, minimum
        yield d, minimum

    def encode(self, o: Lanes) -> None:
        d, offset, codes = offset_codes(o, 15, Grid(14.0, 0.2, 11))
        o.put(0, d, 2)
        o.put(2, offset, 2)
        put_nibbles(o, 4, codes)
