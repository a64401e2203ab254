"""Q2_K: 256 elements in 16 groups of 16, each with a 4-bit scale and a 4-bit minimum.

bytes 0-15 scale (low nibble) and minimum (high) of a group | 16-79 codes | 80-81 d | 82-83 dmin
Codes: 128 elements share 32 bytes; byte i holds elements i, i + 32, i + 64, i + 96 from bit 0 up.
"""

from collections.abc import Iterator, Sequence

from edgellm.quant.block import Block, QuantType, Value
from edgellm.quant.lanes import Index, Lane, Lanes, word
from edgellm.quant.search import Grid
from edgellm.quant.superblock import Affine, Scaled, affine


def two_bits(codes: Sequence[Lane]) -> Lane:
    """The low two bits of four codes as a byte, the first lowest."""
    a, b, c, d = (code & 3 for code in codes)
    return a | (b << 2) | (c << 4) | (d << 6)


def quad(block: Affine | Scaled, half: int, s: int, i: Index) -> list[list[Lane]]:
    """Codes 4 i .. 4 i + 3 of groups s, s + 2, s + 4 and s + 6 of a half, four by four; Q6_K stores
    such next to each other too."""
    first = 128 * half + 16 * s
    return [
        [block.code(8 * half + 2 * run + s, 4 * i + (first + 32 * run + k)) for run in range(4)]
        for k in range(4)
    ]


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

    def encode(self, o: Lanes) -> None:
        block = affine(o, 16, 16, 3, Grid(2.5, 0.1, 16), 15)
        packed = [block.scale(g) | (block.minimum(g) << 4) for g in range(16)]
        for g in range(0, 16, 4):
            o.put(g, word(packed[g : g + 4]), 4)
        o.put(80, block.d_bits, 2)
        o.put(82, block.dmin_bits, 2)

        def quads(i: Index) -> None:
            for half, s in ((0, 0), (0, 1), (1, 0), (1, 1)):
                codes = quad(block, half, s, i)
                o.put(4 * i + (16 + 32 * half + 16 * s), word([two_bits(c) for c in codes]), 4)

        o.loop(4, quads)
