"""IQ3_XXS and IQ3_S: 256 elements, four at a time by an index into a codebook of magnitudes.

IQ3_XXS: bytes 0-1 d | 2-65 indices | 66-97 for each 32 elements 28 bits of signs (grids.SIGNS) and
         four of s: the scale is (s + 1/2) d / 2
IQ3_S:   bytes 0-1 d | 2-65 low bytes of indices | 66-73 their ninth bits | 74-105 signs |
         106-109 four bits s by 32 elements: the scale is (2 s + 1) d
"""

from collections.abc import Iterator

from edgellm.quant import grids
from edgellm.quant.block import Block, QuantType, Value
from edgellm.quant.iq2 import even_signs, half_step, signed


class IQ3_XXS(QuantType):
    name, id, block, bytes, chunk, bias = "iq3_xxs", 18, 256, 98, 32, 64

    def codes(self, b: Block) -> Iterator[Value]:
        for group in range(8):
            magnitudes = b.entries(grids.IQ3_XXS, b.u8(2 + 8 * group, 8))
            yield signed(magnitudes, even_signs(b, 66 + 4 * group), self.bias)

    def scales(self, b: Block) -> Iterator[tuple[Value, Value | None]]:
        d = b.f16(0)
        for group in range(8):
            yield half_step(b, d, b.u8(69 + 4 * group) >> 4, 0.5), None


class IQ3_S(QuantType):
    name, id, block, bytes, chunk, bias = "iq3_s", 21, 256, 110, 32, 16

    def codes(self, b: Block) -> Iterator[Value]:
        for group in range(8):
            low, high = b.u8(2 + 8 * group, 8), b.bits(66 + group, 8)
            magnitudes = b.entries(grids.IQ3_S, low, high)
            yield signed(magnitudes, b.bits(74 + 4 * group, 32), self.bias)

    def scales(self, b: Block) -> Iterator[tuple[Value, Value | None]]:
        d = b.f16(0)
        for group in range(8):
            s = (b.u8(106 + group // 2) >> (group % 2 * 4)) & 15
            yield d * b.f32(s * 2 + 1), None
