"""Q5_K: Q4_K with a fifth bit.

bytes 0-1 d | 2-3 dmin | 4-15 scales and minimums | 16-47 fifth bits | 48-175 nibbles
Fifth bits: byte i holds elements i, i + 32, ... i + 224 from bit 0 up.
"""

from collections.abc import Iterator

from edgellm.quant.block import Block, QuantType, Value
from edgellm.quant.lanes import Lanes
from edgellm.quant.q4_k import group_scale, put_group_scales, put_quads
from edgellm.quant.search import Grid
from edgellm.quant.superblock import affine


class Q5_K(QuantType):
    name, id, block, bytes, chunk = "q5_k", 13, 256, 176, 32

    def codes(self, b: Block) -> Iterator[Value]:
        fifth = b.u8(16, 32)
        for pair in range(4):
            packed = b.u8(48 + 32 * pair, 32)
            yield (packed & 15) | (((fifth >> (2 * pair)) & 1) << 4)
            yield (packed >> 4) | (((fifth >> (2 * pair + 1)) & 1) << 4)

    def scales(self, b: Block) -> Iterator[tuple[Value, Value | None]]:
        d, dmin = b.f16(0), b.f16(2)
        for group in range(8):
            scale, minimum = group_scale(b, group)
            yield d * b.f32(scale), dmin * b.f32(minimum)

    def encode(self, o: Lanes) -> None:
        block = affine(o, 32, 8, 31, Grid(29.5, 0.25, 13), 63)
        put_group_scales(o, block)
        o.loop(8, lambda i: put_quads(o, block, i, 48, 16))
