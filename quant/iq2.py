"""IQ2_XXS, IQ2_XS and IQ2_S: 256 elements, eight at a time by an index into a codebook of
magnitudes and a byte of signs; scales are (s + 1/2) d / 4 with four bits s.

IQ2_XXS: bytes 0-1 d | then for each 32 elements 4 indices | 28 bits of signs (grids.SIGNS), 4 of s
IQ2_XS:  bytes 0-1 d | 2-65 for each 8 elements 9 bits of index, 7 of signs | 66-73 s by 16 elements
IQ2_S:   bytes 0-1 d | 2-33 low bytes of indices | 34-65 signs | 66-73 two high bits of four indices
         each | 74-81 s by 16 elements
"""

from collections.abc import Iterator

from edgellm.quant import grids
from edgellm.quant.block import Block, QuantType, Value

BIAS = 64


def signed(magnitudes: Value, signs: Value, bias: int) -> Value:
    """bias + magnitude, or bias - magnitude where the sign is 1."""
    return (magnitudes ^ (signs * 255)) + signs + bias


def even_signs(b: Block, offset: int) -> Value:
    """The signs of 32 elements from 28 bits, seven for eight."""
    first, second, third, fourth = (b.u8(offset + i) for i in range(4))
    indices = [
        first, (first >> 7) | (second << 1), (second >> 6) | (third << 2),
        (third >> 5) | (fourth << 3),
    ]  # fmt: skip
    return b.entries(grids.SIGNS, b.join([i & 127 for i in indices]))


def half_step(b: Block, d: Value, s: Value, factor: float) -> Value:
    """d (s + 1/2) factor"""
    return d * (b.f32(s) + 0.5) * factor


class IQ2_XXS(QuantType):
    name, id, block, bytes, chunk, bias = "iq2_xxs", 16, 256, 66, 32, BIAS

    def codes(self, b: Block) -> Iterator[Value]:
        for group in range(8):
            at = 2 + 8 * group
            magnitudes = b.entries(grids.IQ2_XXS, b.u8(at, 4))
            yield signed(magnitudes, even_signs(b, at + 4), BIAS)

    def scales(self, b: Block) -> Iterator[tuple[Value, Value | None]]:
        d = b.f16(0)
        for group in range(8):
            yield half_step(b, d, b.u8(9 + 8 * group) >> 4, 0.25), None


class IQ2_XS(QuantType):
    name, id, block, bytes, chunk, bias = "iq2_xs", 17, 256, 74, 16, BIAS

    def codes(self, b: Block) -> Iterator[Value]:
        for half in range(16):
            low = [b.u8(2 + 4 * half + 2 * i) for i in range(2)]
            high = [b.u8(3 + 4 * half + 2 * i) for i in range(2)]
            magnitudes = b.entries(grids.IQ2_XS, b.join(low), b.join([h & 1 for h in high]))
            signs = b.entries(grids.SIGNS, b.join([h >> 1 for h in high]))
            yield signed(magnitudes, signs, BIAS)

    def scales(self, b: Block) -> Iterator[tuple[Value, Value | None]]:
        yield from _nibble_scales(b, 66)


class IQ2_S(QuantType):
    name, id, block, bytes, chunk, bias = "iq2_s", 22, 256, 82, 16, BIAS

    def codes(self, b: Block) -> Iterator[Value]:
        for half in range(16):
            high = b.u8(66 + half // 2) >> (half % 2 * 4)
            high = b.join([high & 3, (high >> 2) & 3])
            magnitudes = b.entries(grids.IQ2_S, b.u8(2 + 2 * half, 2), high)
            yield signed(magnitudes, b.bits(34 + 2 * half, 16), BIAS)

    def scales(self, b: Block) -> Iterator[tuple[Value, Value | None]]:
        yield from _nibble_scales(b, 74)


def _nibble_scales(b: Block, offset: int) -> Iterator[tuple[Value, None]]:
    d = b.f16(0)
    for half in range(16):
        yield half_step(b, d, (b.u8(offset + half // 2) >> (half % 2 * 4)) & 15, 0.25), None
