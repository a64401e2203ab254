"""Q8_0: 32 signed bytes, one scale.

bytes 0-1 scale d (f16) | 2-33 signed codes
"""

from collections.abc import Iterator

from edgellm.quant.block import Block, QuantType, Value


class Q8_0(QuantType):
    name, id, block, bytes, bias, chunk = "q8_0", 8, 32, 34, 128, 32

    def codes(self, b: Block) -> Iterator[Value]:
        yield b.u8(2, 32) ^ 0x80  # signed to biased: every type's codes are unsigned

    def scales(self, b: Block) -> Iterator[tuple[Value, Value | None]]:
        yield b.f16(0), None
