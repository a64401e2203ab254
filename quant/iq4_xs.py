"""IQ4_XS: the levels of IQ4_NL, 256 elements in 8 groups of 32 with signed 6-bit scales.

bytes 0-1 d | 2-3 high two bits of the scales | 4-7 low nibbles of the scales | 8-135 nibbles
Group g's nibbles are bytes 8 + 16 g ...: byte i holds element i low and element i + 16 high.
"""

from collections.abc import Iterator

from edgellm.quant.block import Block, QuantType, Value
from edgellm.quant.iq4_nl import LEVELS
from edgellm.quant.lanes import Index, Lanes, put_nibbles, word
from edgellm.quant.search import Grid, Listed
from edgellm.quant.superblock import scaled


class IQ4_XS(QuantType):
    name, id, block, bytes, table, chunk = "iq4_xs", 23, 256, 136, LEVELS, 16

    def codes(self, b: Block) -> Iterator[Value]:
        for group in range(8):
            packed = b.u8(8 + 16 * group, 16)
            yield packed & 15
            yield packed >> 4

    def scales(self, b: Block) -> Iterator[tuple[Value, Value | None]]:
        d = b.f16(0)
        for group in range(8):
            low = (b.u8(4 + group // 2) >> (group % 2 * 4)) & 15
            high = (b.u8(2 + group // 4) >> (group % 4 * 2)) & 3
            scale = d * (b.f32(low | (high << 4)) - 32)
            yield scale, None
            yield scale, None

    def encode(self, o: Lanes) -> None:
        block = scaled(o, 32, 8, Listed(LEVELS), Grid(-160.0, 6.0, 13, both_ways=True), 32)
        scales = [block.scale(g) + 32 for g in range(8)]
        o.put(0, block.d_bits, 2)
        high = scales[0] >> 4
        for g in range(1, 8):
            high = high | ((scales[g] >> 4) << (2 * g))
        o.put(2, high, 2)
        o.put(4, word([(scales[g] & 15) | ((scales[g + 1] & 15) << 4) for g in range(0, 8, 2)]), 4)

        def group(g: Index) -> None:
            put_nibbles(o, 16 * g + 8, [block.code(g, 32 * g + k) for k in range(32)])

        o.loop(8, group)
