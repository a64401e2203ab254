"""Q3_K: 256 elements in 16 groups of 16, each with a signed 6-bit scale.

bytes 0-31 third bits | 32-95 low two bits | 96-107 scales | 108-109 d
Low bits lie as in Q2_K. Third bits: byte i holds elements i, i + 32, ... i + 224 from bit 0 up; a
set bit means "do not subtract 4", so it is an ordinary bit 2 of a code with bias 4.
Scales: byte 96 + j holds the low nibbles of groups j and j + 8; byte 104 + j the high two bits of
groups j, j + 4, j + 8, j + 12.
"""

from collections.abc import Iterator

from edgellm.quant.block import Block, QuantType, Value
from edgellm.quant.lanes import Index, Lanes, bit_of_each, word
from edgellm.quant.q2_k import two_bits
from edgellm.quant.search import Grid, Whole
from edgellm.quant.superblock import scaled


class Q3_K(QuantType):
    name, id, block, bytes, bias, chunk = "q3_k", 11, 256, 110, 4, 16

    def codes(self, b: Block) -> Iterator[Value]:
        for run in range(8):  # 32 elements each
            half, shift = 32 + run // 4 * 32, run % 4 * 2
            for i in (0, 16):
                high = (b.u8(i, 16) >> run) & 1
                yield ((b.u8(half + i, 16) >> shift) & 3) | (high << 2)

    def scales(self, b: Block) -> Iterator[tuple[Value, Value | None]]:
        d = b.f16(108)
        for group in range(16):
            low = (b.u8(96 + group % 8) >> (group // 8 * 4)) & 15
            high = (b.u8(104 + group % 4) >> (group // 4 * 2)) & 3
            yield d * (b.f32(low | (high << 4)) - 32), None

    def encode(self, o: Lanes) -> None:
        block = scaled(o, 16, 16, Whole(-4, 3), Grid(-5.5, 0.2, 13), 32)
        scales = [block.scale(g) + 32 for g in range(16)]
        low = [(scales[g] & 15) | ((scales[g + 8] & 15) << 4) for g in range(8)]
        o.put(96, word(low[:4]), 4)
        o.put(100, word(low[4:]), 4)
        high = [two_bits([scales[g + 4 * t] >> 4 for t in range(4)]) for g in range(4)]
        o.put(104, word(high), 4)
        o.put(108, block.d_bits, 2)

        def quads(i: Index) -> None:
            for s in (0, 1):
                codes = [
                    [block.code(2 * run + s, 4 * i + (32 * run + 16 * s + k)) for run in range(8)]
                    for k in range(4)
                ]
                o.put(4 * i + 16 * s, word([bit_of_each(c, 2) for c in codes]), 4)
                o.put(4 * i + (32 + 16 * s), word([two_bits(c[:4]) for c in codes]), 4)
                o.put(4 * i + (64 + 16 * s), word([two_bits(c[4:]) for c in codes]), 4)

        o.loop(4, quads)
