"""Q6_K: 256 elements in 16 groups of 16, each with a signed 8-bit scale.

bytes 0-127 low nibbles | 128-191 high two bits | 192-207 scales | 208-209 d
128 elements share 64 bytes of nibbles (byte i: elements i low, i + 64 high) and 32 bytes of high
bits (byte i: elements i, i + 32, i + 64, i + 96 from bit 0 up).
"""

from collections.abc import Iterator

from edgellm.quant.block import Block, QuantType, Value


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
