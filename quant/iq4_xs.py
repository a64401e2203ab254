"""IQ4_XS: the levels of IQ4_NL, 256 elements in 8 groups of 32 with signed 6-bit scales.

bytes 0-1 d | 2-3 high two bits of the scales | 4-7 low nibbles of the scales | 8-135 nibbles
Group g's nibbles are bytes 8 + 16 g ...: byte i holds element i low and element i + 16 high.
"""

from collections.abc import Iterator

from edgellm.quant.block import Block, QuantType, Value
from edgellm.quant.iq4_nl import LEVELS


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
