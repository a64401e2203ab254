"""Q2_K: 256 elements in 16 groups of 16, each with a 4-bit scale and a 4-bit minimum.

bytes 0-15 scale (low nibble) and minimum (high) of a group | 16-79 codes | 80-81 d | 82-83 dmin
Codes: 128 elements share 32 bytes; byte i holds elements i, i + 32, i + 64, i + 96 from bit 0 up.
"""

from collections.abc import Iterator

from edgellm.quant.block import Block, QuantType, Value


class Q2_K(QuantType):
    name, id, block, bytes, chunk = "q2_k", 10, 256, 84, 16

    def codes(self, b: Block) -> Iterator[Value]:
        for half in (16, 48):
            for shift in (0, 2, 4, 6):
                for offset in (half, half + 16):
                    yield (b.u8(offset, 16) >> shift) & 3

    def scales(self, b: Block) -> Iterator[tuple[Value, Value | None]]:
        d, dmin = b.f16(80), b.f16(82)
        for group in range(16):
            packed = b.u8(group)
            yield d * b.f32(packed & 15), dmin * b.f32(packed >> 4)
