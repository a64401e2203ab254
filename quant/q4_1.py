"""Q4_1: 32 elements, a scale and an offset that is added.

bytes 0-1 scale d (f16) | 2-3 offset m (f16) | 4-19 nibbles as in Q4_0
"""

from collections.abc import Iterator

from edgellm.quant.block import Block, QuantType, Value


class Q4_1(QuantType):
    name, id, block, bytes, chunk = "q4_1", 3, 32, 20, 16

    def codes(self, b: Block) -> Iterator[Value]:
        packed = b.u8(4, 16)
        yield packed & 15
        yield packed >> 4

    def scales(self, b: Block) -> Iterator[tuple[Value, Value | None]]:
        # x - (-m) is x + m in every bit; * -1 keeps the sign of a zero, 0 - m would not.
        d, minimum = b.f16(0), b.f16(2) * -1
        yield d, minimum
        yield d, minimum
