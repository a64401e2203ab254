"""IQ1_S and IQ1_M: 256 elements, eight at a time by an index into a codebook of -1, 0 and 1; to all
eight 1/8 is added or taken away. Codes count in eighths, so scales are an eighth of (2 s + 1) d.

IQ1_S: bytes 0-1 d | 2-33 low bytes of indices | 34-49 for each 32 elements four times three high
       bits, three bits s, and 1 to take away
IQ1_M: bytes 0-31 low bytes of indices | 32-47 for each 8 elements three high bits and 1 to take
       away | 48-55 for each 64 elements four times three bits s; the nibbles left over are d
"""

from collections.abc import Iterator

from edgellm.quant import grids
from edgellm.quant.block import Block, QuantType, Value


def _eighths(b: Block, low: Value, high: Value, minus: Value) -> Value:
    """16 + 8 (entry - 1) + 1, or - 1 where minus is 1; the codebook's entries are 0, 1 and 2."""
    return b.entries(grids.IQ1, low, high) * 8 + 9 - minus * 2


class IQ1_S(QuantType):
    name, id, block, bytes, chunk, bias = "iq1_s", 19, 256, 50, 32, 16

    def codes(self, b: Block) -> Iterator[Value]:
        for group in range(8):
            low, high = b.u8(34 + 2 * group), b.u8(35 + 2 * group)
            thirds = [low, low >> 3, (low >> 6) | (high << 2), high >> 1]
            indices = b.join([third & 7 for third in thirds])
            yield _eighths(b, b.u8(2 + 4 * group, 4), indices, high >> 7)

    def scales(self, b: Block) -> Iterator[tuple[Value, Value | None]]:
        d = b.f16(0)
        for group in range(8):
            s = (b.u8(35 + 2 * group) >> 4) & 7
            yield d * b.f32(s * 2 + 1) * 0.125, None


class IQ1_M(QuantType):
    name, id, block, bytes, chunk, bias = "iq1_m", 29, 256, 56, 16, 16

    def codes(self, b: Block) -> Iterator[Value]:
        for half in range(16):
            packed = b.u8(32 + half)
            parts = []
            for i, nibble in enumerate((packed & 15, packed >> 4)):
                parts.append(_eighths(b, b.u8(2 * half + i), nibble & 7, nibble >> 3))
            yield b.join(parts)

    def scales(self, b: Block) -> Iterator[tuple[Value, Value | None]]:
        tops = [b.u8(49 + 2 * i) for i in range(4)]
        d = b.half((tops[0] >> 4) | (tops[1] & 240), (tops[2] >> 4) | (tops[3] & 240))
        for quarter in range(4):
            low, high = b.u8(48 + 2 * quarter), b.u8(49 + 2 * quarter)
            for s in (low, low >> 3, (low >> 6) | (high << 2), high >> 1):
                yield d * b.f32((s & 7) * 2 + 1) * 0.125, None
