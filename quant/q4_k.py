"""Q4_K: 256 elements in 8 groups of 32, each with a 6-bit scale and a 6-bit minimum.

bytes 0-1 d | 2-3 dmin | 4-15 scales and minimums | 16-143 nibbles
Nibbles: byte 32 g + i holds element 64 g + i low and element 64 g + 32 + i high.
"""

from collections.abc import Iterator

from edgellm.quant.block import Block, QuantType, Value
from edgellm.quant.lanes import Index, Lanes, bit_of_each, word
from edgellm.quant.search import Grid
from edgellm.quant.superblock import Affine, affine


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


def put_group_scales(o: Lanes, block: Affine) -> None:
    """Bytes 0-15, of Q5_K too."""
    o.put(0, block.d_bits, 2)
    o.put(2, block.dmin_bits, 2)
    scales = [block.scale(g) for g in range(8)]
    minimums = [block.minimum(g) for g in range(8)]
    for offset, six in ((4, scales), (8, minimums)):
        o.put(offset, word([six[g] | ((six[g + 4] >> 4) << 6) for g in range(4)]), 4)
    o.put(12, word([(scales[g] & 15) | ((minimums[g] & 15) << 4) for g in range(4, 8)]), 4)


def put_quads(o: Lanes, block: Affine, i: Index, nibbles: int, fifth_bits: int = 0) -> None:
    """Codes 4 i .. 4 i + 3 of all groups, to ``nibbles`` on and, if that is not 0, their fifth bits
    to ``fifth_bits`` on."""
    codes = [[block.code(g, 4 * i + (32 * g + k)) for k in range(4)] for g in range(8)]
    for pair in range(4):
        low, high = codes[2 * pair : 2 * pair + 2]
        packed = [(a & 15) | ((b & 15) << 4) for a, b in zip(low, high, strict=True)]
        o.put(4 * i + (nibbles + 32 * pair), word(packed), 4)
    if fifth_bits:
        o.put(
            4 * i + fifth_bits, word([bit_of_each([g[k] for g in codes], 4) for k in range(4)]), 4
        )


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

    def encode(self, o: Lanes) -> None:
        block = affine(o, 32, 8, 15, Grid(14.0, 0.2, 11), 63)
        put_group_scales(o, block)
        o.loop(8, lambda i: put_quads(o, block, i, 16))
