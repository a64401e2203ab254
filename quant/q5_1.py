"""Q5_1: 32 elements, a scale and an offset that is added.

bytes 0-1 scale d (f16) | 2-3 offset m (f16) | 4-7 fifth bits, one an element | 8-23 nibbles
"""

from collections.abc import Iterator

from edgellm.quant.block import Block, QuantType, Value
from edgellm.quant.lanes import Lanes, bit_of_each, put_nibbles
from edgellm.quant.q4_1 import offset_codes
from edgellm.quant.search import Grid


class Q5_1(QuantType):
    name, id, block, bytes, chunk = "q5_1", 7, 32, 24, 16

    def codes(self, b: Block) -> Iterator[Value]:
        packed = b.u8(8, 16)
        yield (packed & 15) | (b.bits(4, 16) << 4)
        yield (packed >> 4) | (b.bits(6, 16) << 4)

    def scales(self, b: Block) -> Iterator[tuple[Value, Value | None]]:
        d, minimum = b.f16(0), b.f16(2) * -1  # as in Q4_1
        yield d, minimum
        yield d, minimum

    def encode(self, o: Lanes) -> None:
        d, offset, codes = offset_codes(o, 31, Grid(29.5, 0.25, 13))
        o.put(0, d, 2)
        o.put(2, offset, 2)
        o.put(4, bit_of_each(codes, 4), 4)
        put_nibbles(o, 8, [code & 15 for code in codes])
