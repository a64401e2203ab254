"""Q5_0: 32 elements, one scale.

bytes 0-1 scale d (f16) | 2-5 fifth bits, one an element | 6-21 nibbles as in Q4_0
"""

from collections.abc import Iterator

from edgellm.quant.block import Block, QuantType, Value
from edgellm.quant.lanes import Lanes, bit_of_each, put_nibbles
from edgellm.quant.q4_0 import biased_codes
from edgellm.quant.search import Grid


class Q5_0(QuantType):
    name, id, block, bytes, bias, chunk = "q5_0", 6, 32, 22, 16, 16

    def codes(self, b: Block) -> Iterator[Value]:
        packed = b.u8(6, 16)
        yield (packed & 15) | (b.bits(2, 16) << 4)
        yield (packed >> 4) | (b.bits(4, 16) << 4)

    def scales(self, b: Block) -> Iterator[tuple[Value, Value | None]]:
        d = b.f16(0)
        yield d, None
        yield d, None

    def encode(self, o: Lanes) -> None:
        d, codes = biased_codes(o, 16, Grid(-19.0, 0.25, 17))
        o.put(0, d, 2)
        o.put(2, bit_of_each(codes, 4), 4)
        put_nibbles(o, 6, [code & 15 for code in codes])
