"""TQ1_0 and TQ2_0: 256 elements of -1, 0 and 1 with one scale (for models trained so, BitNet).

TQ1_0: bytes 0-47 five elements each, as a fraction of 256 written in base three | 48-51 four
       elements each | 52-53 d. Byte i of the first 32 holds elements 32 n + i, of the next 16
       elements 160 + 16 n + i, of the last four 240 + 4 n + i.
TQ2_0: bytes 0-63 two bits each, byte 32 j + i for elements 128 j + 32 n + i | 64-65 d
"""

from collections.abc import Iterator

from edgellm.quant.block import Block, QuantType, Value


def _first_digit(fraction: Value) -> Value:
    """floor(3 x / 256) in bytes: the average of x and x / 2, over 64."""
    half = fraction >> 1
    return ((fraction & half) + ((fraction ^ half) >> 1)) >> 6


class TQ1_0(QuantType):
    name, id, block, bytes, chunk, bias = "tq1_0", 34, 256, 54, 16, 1

    def codes(self, b: Block) -> Iterator[Value]:
        for n in range(5):
            for offset in (0, 16):
                yield _first_digit(b.u8(offset, 16) * 3**n)
        for n in range(5):
            yield _first_digit(b.u8(32, 16) * 3**n)
        last = b.u8(48, 4)
        yield _first_digit(b.join([last * 3**n for n in range(4)]))

    def scales(self, b: Block) -> Iterator[tuple[Value, Value | None]]:
        d = b.f16(52)
        for _ in range(16):
            yield d, None


class TQ2_0(QuantType):
    name, id, block, bytes, chunk, bias = "tq2_0", 35, 256, 66, 32, 1

    def codes(self, b: Block) -> Iterator[Value]:
        for offset in (0, 32):
            packed = b.u8(offset, 32)
            for n in range(4):
                yield (packed >> (2 * n)) & 3

    def scales(self, b: Block) -> Iterator[tuple[Value, Value | None]]:
        d = b.f16(64)
        for _ in range(8):
            yield d, None
