"""Q4_0: 32 elements, one scale.

bytes 0-1 scale d (f16) | 2-17 nibbles: byte i holds element i low, element i + 16 high
"""

from collections.abc import Iterator

from edgellm.quant.block import Block, QuantType, Value


class Q4_0(QuantType):
    name, id, block, bytes, bias, chunk = "q4_0", 2, 32, 18, 8, 16

    def codes(self, b: Block) -> Iterator[Value]:
        packed = b.u8(2, 16)
        yield packed & 15
        yield packed >> 4

    def scales(self, b: Block) -> Iterator[tuple[Value, Value | None]]:
        d = b.f16(0)
        yield d, None
        yield d, None
