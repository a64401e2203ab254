"""Q6_K: 256 elements in 16 groups of 16, each with a signed 8-bit scale.

bytes 0-127 low nibbles | 128-191 high two bits | 192-207 scales | 208-209 d
128 elements share 64 bytes of nibbles (byte i: elements i low, i + 64 high) and 32 bytes of high
bits (byte i: elements i, i + 32, i + 64, i + 96 from bit 0 up).
"""

from collections.abc import Iterator

from edgellm.quant.block import Block, QuantType, Value
from edgellm.quant.lanes import Index, Lanes, word
from edgellm.quant.q2_k import quad, two_bits
from edgellm.quant.search import Grid, Whole
from edgellm.quant.superblock import scaled


class Q6_K(QuantType):
    name, id, block, bytes, bias, chunk = "q6_k", 14, 256, 210, 32, 16

    def codes(self, b: Block) -> Iterator[Value]:
        for half in (0, 1):
            for run in range(4):  # 32 elements each
                for i in (0, 16):
                    packed = b.u8(64 * half + 32 * (run % 2) + i, 16)
                    low = packed >> 4 if run >= 2 else packed & 15
                    high = (b.u8(128 + 32 * half + i, 16) >> (2 * run)) & 3
                    yield low | (high << 4)

    def scales(self, b: Block) -> Iterator[tuple[Value, Value | None]]:
        d = b.f16(208)
        for group in range(16):
            yield d * b.f32(b.i8(192 + group)), None

    def encode(self, o: Lanes) -> None:
        block = scaled(o, 16, 16, Whole(-32, 31), Grid(-36.0, 0.5, 13), 128)
        scales = [block.scale(g) & 255 for g in range(16)]
        for g in range(0, 16, 4):
            o.put(192 + g, word(scales[g : g + 4]), 4)
        o.put(208, block.d_bits, 2)

        def quads(i: Index) -> None:
            for half, s in ((0, 0), (0, 1), (1, 0), (1, 1)):
                codes = quad(block, half, s, i)
                for run in (0, 1):
                    packed = [(c[run] & 15) | ((c[run + 2] & 15) << 4) for c in codes]
                    o.put(4 * i + (64 * half + 32 * run + 16 * s), word(packed), 4)
                high = [two_bits([code >> 4 for code in c]) for c in codes]
                o.put(4 * i + (128 + 32 * half + 16 * s), word(high), 4)

        o.loop(4, quads)
