"""Q4_K: 256 elements in 8 groups of 32, each with a 6-bit scale and a 6-bit minimum.

bytes 0-1 d | 2-3 dmin | 4-15 scales and minimums | 16-143 nibbles
Nibbles: byte 32 g + i holds element 64 g + i low and element 64 g + 32 + i high.
"""

from collections.abc import Iterator

from edgellm.quant.block import Block, QuantType, Value


def group_scale(b: Block, group: int) -> tuple[Value, Value]:
    """The 6-bit scale and minimum of a group, u8 [1] each; Q5_K packs them alike.

    Bytes 4-7 hold the scales of groups 0-3 and bytes 8-11 their minimums, six bits each. The two
    bits left over in each are the top of group + 4, whose low nibbles share bytes 12-15.
    """
    if group < 4:
        return b.u8(4 + group) & 63, b.u8(8 + group) & 63
    low = b.u8(8 + group)
    scale = (low & 15) | ((b.u8(group) >> 6) << 4)
    minimum = (low >> 4) | ((b.u8(4 + group) >> 6) << 4)
    return scale, minimum


class Q4_K(QuantType):
    name, id, block, bytes, chunk = "q4_k", 12, 256, 144, 32

    def codes(self, b: Block) -> Iterator[Value]:
        for pair in range(4):
            packed = b.u8(16 + 32 * pair, 32)
            yield packed & 15
            yield packed >> 4

    def scales(self, b: Block) -> Iterator[tuple[Value, Value | None]]:
        d, dmin = b.f16(0), b.f16(2)
        for group in range(8):
            scale, minimum = group_scale(b, group)
            yield d * b.f32(scale), dmin * b.f32(minimum)
