"""MXFP4 of the OCP microscaling formats 1.0: 32 four-bit floats (e2m1) and a power-of-two scale.

byte 0 exponent (e8m0) | 1-16 nibbles as in Q4_0
The table holds twice the e2m1 values so that they are integers; the scale is halved for it.
"""

from collections.abc import Iterator, Sequence

from edgellm.quant.block import Block, QuantType, Value
from edgellm.quant.lanes import Lane, Lanes, put_nibbles
from edgellm.quant.search import middles

LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

SIZES = LEVELS[:8]


def magnitude(o: Lanes, x: Lane, factor: Lane, values: Sequence[int]) -> Lane:
    """Of ``values`` that of the size nearest to |x * factor|; the smaller one of two."""
    return o.stepped(o.minimum(o.abs(x * factor), 12.0), middles(SIZES), values)


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

    def encode(self, o: Lanes) -> None:
        """The exponent that leaves the largest element below 8 units of 1/2 (ggml's), or the next,
        whichever has the smaller error: above 6 elements are clipped. Blocks that were MXFP4 before
        come back exactly."""
        x = [o.x(k) for k in range(32)]
        top = o.largest(x)
        first = o.maximum(o.f32(o.bits(top) >> 23) - 2.0, 2.0)

        def factor(exponent: Lane) -> Lane:  # 2 ** (128 - exponent)
            return o.from_bits((255 - o.i32(exponent)) << 23)

        def error(exponent: Lane) -> Lane:
            scale = o.inverse(factor(exponent))
            total = o.number(0.0)
            for k in range(32):
                off = o.abs(x[k]) - scale * magnitude(o, x[k], factor(exponent), SIZES)
                total = total + o.w(k) * off * off
            return total

        exponent = o.select(error(first + 1.0) < error(first), first + 1.0, first)
        o.put(0, o.i32(o.select(top > 0.0, exponent, 0.0)), 1)
        chosen = factor(exponent)

        def code(element: Lane) -> Lane:
            size = magnitude(o, element, chosen, range(8))
            return o.i32(o.select((element < 0.0) & (size > 0.0), size + 8.0, size))

        put_nibbles(o, 1, [code(element) for element in x])
