"""IQ4_NL: Q4_0 with a table of levels that lie denser around zero.

bytes 0-1 scale d (f16) | 2-17 nibbles as in Q4_0
"""

from collections.abc import Iterator

from edgellm.quant.block import Block, QuantType, Value
from edgellm.quant.lanes import Lanes, put_nibbles
from edgellm.quant.search import Grid, Group, Listed, search, stored, weights

LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class IQ4_NL(QuantType):
    name, id, block, bytes, table, chunk = "iq4_nl", 20, 32, 18, LEVELS, 16

    def codes(self, b: Block) -> Iterator[Value]:
        packed = b.u8(2, 16)
        yield packed & 15
        yield packed >> 4

    def scales(self, b: Block) -> Iterator[tuple[Value, Value | None]]:
        d = b.f16(0)
        yield d, None
        yield d, None

    def encode(self, o: Lanes) -> None:
        levels, grid = Listed(LEVELS), Grid(-160.0, 6.0, 13, both_ways=True)
        d = stored(o, search(Group(o, weights(o, 32), 0, 32), levels, grid))
        factor = o.inverse(d)
        o.put(0, o.half(d), 2)
        put_nibbles(o, 2, [levels.code(o, o.x(k) * factor) for k in range(32)])
