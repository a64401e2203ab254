"""Q8_0: 32 signed bytes, one scale.

bytes 0-1 scale d (f16) | 2-33 signed codes
"""

from collections.abc import Iterator

from edgellm.quant.block import Block, QuantType, Value
from edgellm.quant.lanes import Lane, Lanes, word


class Q8_0(QuantType):
    name, id, block, bytes, bias, chunk = "q8_0", 8, 32, 34, 128, 32

    def codes(self, b: Block) -> Iterator[Value]:
        yield b.u8(2, 32) ^ 0x80  # signed to biased: every type's codes are unsigned

    def scales(self, b: Block) -> Iterator[tuple[Value, Value | None]]:
        yield b.f16(0), None

    def encode(self, o: Lanes) -> None:
        """Rounded as ggml rounds: codes this fine gain nothing from a search."""
        d = o.largest([o.x(k) for k in range(32)]) / 127.0
        factor = o.inverse(d)
        o.put(0, o.half(d), 2)

        def octet(k: int) -> Lane:
            scaled = o.x(k) * factor
            size = o.minimum(o.abs(scaled), 127.0)  # also where the inverse of a tiny d is infinite
            whole = o.truncate(size)
            size = o.select(size - whole >= 0.5, whole + 1.0, whole)  # halves away from zero
            return o.i32(o.select(scaled < 0.0, 0.0 - size, size)) & 255

        for k in range(0, 32, 4):
            o.put(2 + k, word([octet(i) for i in range(k, k + 4)]), 4)
