"""Q4_0: 32 elements, one scale.

bytes 0-1 scale d (f16) | 2-17 nibbles: byte i holds element i low, element i + 16 high
"""

from collections.abc import Iterator

from edgellm.quant.block import Block, QuantType, Value
from edgellm.quant.lanes import Lane, Lanes, put_nibbles
from edgellm.quant.search import Grid, Group, Whole, extreme, search, stored, weights


def biased_codes(o: Lanes, bias: int, grid: Grid) -> tuple[Lane, list[Lane]]:
    """The bits of d and 32 codes with d * (code - bias); Q5_0 chooses them alike.

    Without importance as ggml does: the extreme element has code 0, and the sum with bias is
    rounded once.
    """
    x = [o.x(k) for k in range(32)]
    if o.is_weighted:
        levels = Whole(-bias, bias - 1)
        d = stored(o, search(Group(o, weights(o, 32), 0, 32), levels, grid))
        factor = o.inverse(d)
        return o.half(d), [levels.code(o, element * factor) for element in x]
    d = extreme(o, x) * (-1.0 / bias)
    factor, most = o.inverse(d), 2.0 * bias - 1.0

    def code(element: Lane) -> Lane:
        shifted = o.times_plus(element, factor, bias + 0.5)
        return o.i32(o.truncate(o.minimum(o.maximum(shifted, 0.0), most)))

    return o.half(d), [code(element) for element in x]


class Q4_0(QuantType):
    name, id, block, bytes, bias, chunk = "q4_0", 2, 32, 18, 8, 16

    def codes(self, b: Block) -> Iterator[Value]:
        packed = b.u8(2, 16)
        yield packed & 15
        yield packed >> 4

    def scales(self, b: Block) -> Iterator[tuple[Value, Value | None]]:
        d = b.f16(0)
        yield d, None
        yield d, None

    def encode(self, o: Lanes) -> None:
        d, codes = biased_codes(o, 8, Grid(-10.0, 0.25, 13))
        o.put(0, d, 2)
        put_nibbles(o, 2, codes)
