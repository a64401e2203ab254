"""MXFP4 of the OCP microscaling formats 1.0: 32 four-bit floats (e2m1) and a power-of-two scale.

byte 0 exponent (e8m0) | 1-16 nibbles as in Q4_0
The table holds twice the e2m1 values so that they are integers; the scale is halved for it.
"""

from collections.abc import Iterator

from edgellm.quant.block import Block, QuantType, Value

LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


class MXFP4(QuantType):
    name, id, block, bytes, table, chunk = "mxfp4", 39, 32, 17, LEVELS, 16

    def codes(self, b: Block) -> Iterator[Value]:
        packed = b.u8(1, 16)
        yield packed & 15
        yield packed >> 4

    def scales(self, b: Block) -> Iterator[tuple[Value, Value | None]]:
        scale = b.e8m0_half(0)
        yield scale, None
        yield scale, None
