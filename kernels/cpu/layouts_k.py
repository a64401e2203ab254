"""Packed layouts of formats whose blocks are 256 elements, eight groups of 32."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from edgellm.kernels.cpu.activations import Q8K, SUM_32, SUM_128
from edgellm.kernels.cpu.decode import TracedBlock
from edgellm.kernels.cpu.layout import Codes, Fields, PackedLayout, Step, pack_bits
from edgellm.kernels.cpu.vector import I8, I16, I32, Emitter, Value
from edgellm.quant.q4_k import group_scale


class PackedQ4K(PackedLayout):
    """Q4_K and Q5_K: 8 groups with 6-bit scales and minimums.

    d [lanes] f16 | dmin [lanes] f16 | three words of scales and minimums | Q5_K: 8 words of fifth
    bits | 32 words of nibbles. The three words, s = scales and m = minimums as [group][row]: s0..3
    and the top two bits of s4..7 | m likewise | low nibbles of s4..7 and m4..7.
    """

    form = Q8K

    def __init__(self, type_name: str) -> None:
        self.type_name = type_name
        self.fifth = type_name == "q5_k"
        self.largest = 31 if self.fifth else 15
        super().__init__()

    def pack_lane(self, e: Emitter, b: TracedBlock, row: Value, out: Value, spare: Value) -> None:
        n = e.lanes
        e.store(e.load(I16, b.address), out + row * 2)
        e.store(e.load(I16, b.address + 2), out + row * 2 + 2 * n)
        for s in range(8):
            scale, minimum = group_scale(b, s)
            e.store(scale, spare + row + s * n)
            e.store(minimum, spare + row + (8 + s) * n)

    def pack_words(
        self, e: Emitter, word: Callable[[int], Value], out: Value, spare: Value
    ) -> None:
        n, width = e.lanes, 4 * e.lanes
        s0, s1, m0, m1 = (e.u8(spare + width * i, width) for i in range(4))
        e.store(s0 | ((s1 >> 4) << 6), out + 4 * n)
        e.store(m0 | ((m1 >> 4) << 6), out + 8 * n)
        e.store((s1 & 15) | (m1 << 4), out + 12 * n)
        codes = out + 16 * n
        if self.fifth:
            for s in range(8):
                e.store(pack_bits(e, [word(8 * s + t) for t in range(8)], 4), codes + width * s)
            codes = codes + 8 * width
        for pair in range(4):
            for t in range(8):
                low, high = word(16 * pair + t) & 15, word(16 * pair + 8 + t) & 15
                e.store(low | (high << 4), codes + width * (8 * pair + t))

    def fields(self, e: Emitter, p: Value) -> Fields:
        n, width = e.lanes, 4 * e.lanes
        d, minus_dmin = e.load_f16(p, n), -e.load_f16(p + 2 * n, n)
        v0, v1, v2 = (e.u8(p + 4 * n * (i + 1), width) for i in range(3))
        scales = [v0 & 63, (v2 & 15) | ((v0 >> 2) & 0x30)]
        minimums = [v1 & 63, (v2 >> 4) | ((v1 >> 2) & 0x30)]

        def times(parts: list[Value], group: int, factor: Value) -> Value:
            return parts[group // 4].slice(n * (group % 4), n).f32() * factor

        return Fields(
            [lambda g=g: times(scales, g, d) for g in range(8)],  # type: ignore[misc]
            [lambda g=g: times(minimums, g, minus_dmin) for g in range(8)],  # type: ignore[misc]
        )

    def steps(self, e: Emitter, p: Value) -> Iterator[Step]:
        width = 4 * e.lanes
        fifth = p + 4 * width
        codes = fifth + 8 * width if self.fifth else fifth
        for j in range(4):

            def read(j: int = j) -> Codes:
                high = [e.u8(fifth + width * (2 * j + i), width) for i in (0, 1) if self.fifth]
                for t in range(8):
                    nibbles = e.u8(codes + width * (8 * j + t), width)
                    for i, code in enumerate((nibbles & 15, nibbles >> 4)):
                        if self.fifth:
                            bits = high[i] << (4 - t) if t < 4 else high[i] >> (t - 4)
                            code = code | (bits & 16)
                        yield 2 * j + i, t, code

            yield (2 * j, 2 * j + 1), read


class PackedQ6K(PackedLayout):
    """Q6_K: 16 signed 8-bit scales, two to a group.

    d [lanes] f16 | scales [16][lanes] | for each 16 elements three words: nibbles of words 0 and 1,
    nibbles of words 2 and 3, high two bits of all four.
    """

    type_name, form, largest, n_sums = "q6_k", Q8K, 63, 2

    def pack_lane(self, e: Emitter, b: TracedBlock, row: Value, out: Value, spare: Value) -> None:
        e.store(e.load(I16, b.address + 208), out + row * 2)
        for s in range(16):
            e.store(b.i8(192 + s), out + row + (2 + s) * e.lanes)

    def pack_words(
        self, e: Emitter, word: Callable[[int], Value], out: Value, spare: Value
    ) -> None:
        width = 4 * e.lanes
        for s in range(16):
            w = [word(4 * s + t) for t in range(4)]
            at = out + 18 * e.lanes + 3 * width * s
            e.store((w[0] & 15) | (w[1] << 4), at)
            e.store((w[2] & 15) | (w[3] << 4), at + width)
            high = w[0] >> 4
            for t in range(1, 4):
                high = high | ((w[t] >> 4) << (2 * t))
            e.store(high, at + 2 * width)

    def fields(self, e: Emitter, p: Value) -> Fields:
        d = e.load_f16(p, e.lanes)

        def scale(s: int) -> Value:
            return e.load(I8, p + (2 + s) * e.lanes, e.lanes).f32() * d

        return Fields([lambda s=s: scale(s) for s in range(16)])  # type: ignore[misc]

    def steps(self, e: Emitter, p: Value) -> Iterator[Step]:
        width = 4 * e.lanes
        for g in range(8):

            def read(g: int = g) -> Codes:
                for half in (0, 1):
                    at = p + 18 * e.lanes + 3 * width * (2 * g + half)
                    a, b, high = (e.u8(at + width * i, width) for i in range(3))
                    yield g, 4 * half, (a & 15) | ((high << 4) & 48)
                    yield g, 4 * half + 1, (a >> 4) | ((high << 2) & 48)
                    yield g, 4 * half + 2, (b & 15) | (high & 48)
                    yield g, 4 * half + 3, (b >> 4) | ((high >> 2) & 48)

            yield (g,), read

    def start(self, e: Emitter, x: Value) -> list[Value]:
        return [e.broadcast(I32, x + SUM_32), e.broadcast(I32, x + (SUM_32 + 4))]


def _pack_pairs(words: list[Value]) -> Value:
    """Four words of 2-bit codes in one, the first lowest."""
    packed = words[0] & 3
    for i, w in enumerate(words[1:], 1):
        packed = packed | ((w & 3) << (2 * i))
    return packed


class PackedQ3K(PackedLayout):
    """Q3_K: 16 signed 6-bit scales, two to a group, as [scale][row].

    d [lanes] f16 | low nibbles of scales 0..7 (4..7 high), of 8..15 likewise, their high two bits
    (scale s in slot s % 4 at bit s // 4 * 2) | for each group three words: low two bits of words
    0..3, of words 4..7, third bits of all eight.
    """

    type_name, form, largest, n_sums = "q3_k", Q8K, 7, 2

    def pack_lane(self, e: Emitter, b: TracedBlock, row: Value, out: Value, spare: Value) -> None:
        e.store(e.load(I16, b.address + 108), out + row * 2)
        for s in range(16):
            low = (b.u8(96 + s % 8) >> (s // 8 * 4)) & 15
            high = (b.u8(104 + s % 4) >> (s // 4 * 2)) & 3
            e.store(low | (high << 4), spare + row + s * e.lanes)

    def pack_words(
        self, e: Emitter, word: Callable[[int], Value], out: Value, spare: Value
    ) -> None:
        width = 4 * e.lanes
        scales = [e.u8(spare + width * i, width) for i in range(4)]  # four scales each
        at = out + 2 * e.lanes
        e.store((scales[0] & 15) | (scales[1] << 4), at)
        e.store((scales[2] & 15) | (scales[3] << 4), at + width)
        e.store(_pack_pairs([s >> 4 for s in scales]), at + 2 * width)
        for g in range(8):
            words = [word(8 * g + t) for t in range(8)]
            at = out + (2 * e.lanes + width * (3 + 3 * g))
            e.store(_pack_pairs(words[:4]), at)
            e.store(_pack_pairs(words[4:]), at + width)
            e.store(pack_bits(e, words, 2), at + 2 * width)

    def fields(self, e: Emitter, p: Value) -> Fields:
        n, width = e.lanes, 4 * e.lanes
        d = e.load_f16(p, n)
        v0, v1, high = (e.u8(p + (2 * n + width * i), width) for i in range(3))
        quads = [v0 & 15, v0 >> 4, v1 & 15, v1 >> 4]
        quads = [q | (((high >> (2 * i)) & 3) << 4) for i, q in enumerate(quads)]

        def scale(s: int) -> Value:
            return (quads[s // 4].slice(n * (s % 4), n).f32() - 32.0) * d

        return Fields([lambda s=s: scale(s) for s in range(16)])  # type: ignore[misc]

    def steps(self, e: Emitter, p: Value) -> Iterator[Step]:
        width = 4 * e.lanes
        for g in range(8):

            def read(g: int = g) -> Codes:
                at = p + (2 * e.lanes + width * (3 + 3 * g))
                first, last, third = (e.u8(at + width * i, width) for i in range(3))
                for t in range(8):
                    low = ((first if t < 4 else last) >> (2 * (t % 4))) & 3
                    bit = third << (2 - t) if t < 2 else third >> (t - 2)
                    yield g, t, low | (bit & 4)

            yield (g,), read

    def start(self, e: Emitter, x: Value) -> list[Value]:
        return [e.broadcast(I32, x + (SUM_32 + 4 * k)) >> 3 for k in (0, 1)]


class PackedQ2K(PackedLayout):
    """Q2_K: 16 scales and minimums of 4 bits, two of each to a group.

    d [lanes] f16 | dmin [lanes] f16 | scale and minimum bytes [16][lanes] | for each group two
    words: codes of words 0..3, of words 4..7.
    """

    type_name, form, largest, n_sums = "q2_k", Q8K, 3, 2

    def pack_lane(self, e: Emitter, b: TracedBlock, row: Value, out: Value, spare: Value) -> None:
        e.store(e.load(I16, b.address + 80), out + row * 2)
        e.store(e.load(I16, b.address + 82), out + row * 2 + 2 * e.lanes)
        for s in range(16):
            e.store(b.u8(s), out + row + (4 + s) * e.lanes)

    def pack_words(
        self, e: Emitter, word: Callable[[int], Value], out: Value, spare: Value
    ) -> None:
        for k in range(16):
            packed = _pack_pairs([word(4 * k + t) for t in range(4)])
            e.store(packed, out + (20 * e.lanes + 4 * e.lanes * k))

    def fields(self, e: Emitter, p: Value) -> Fields:
        n = e.lanes
        d, dmin = e.load_f16(p, n), e.load_f16(p + 2 * n, n) * (1 / 32)  # see Fields

        def part(s: int, shift: int, factor: Value) -> Value:
            return ((e.u8(p + (4 + s) * n, n) >> shift) & 15).f32() * factor

        return Fields(
            [lambda s=s: part(s, 0, d) for s in range(16)],  # type: ignore[misc]
            [lambda s=s: part(s, 4, dmin) for s in range(16)],  # type: ignore[misc]
        )

    def steps(self, e: Emitter, p: Value) -> Iterator[Step]:
        width = 4 * e.lanes
        for g in range(8):

            def read(g: int = g) -> Codes:
                at = p + (20 * e.lanes + width * 2 * g)
                for half in (0, 1):
                    packed = e.u8(at + width * half, width)
                    for t in range(4):
                        yield g, 4 * half + t, (packed >> (2 * t)) & 3

            yield (g,), read

    def start(self, e: Emitter, x: Value) -> list[Value]:
        return [e.const(0, I32, e.lanes) for _ in (0, 1)]


class PackedIQ4XS(PackedLayout):
    """IQ4_XS: 8 signed 6-bit scales; nibbles number levels.

    d [lanes] f16 | low nibbles of scales [4][lanes], of 4..7 high | high two bits [2][lanes] (scale
    s in slot s % 2 at bit s // 2 * 2) | for each group 4 words of nibbles (word t low, t + 4 high).
    """

    type_name, form, largest = "iq4_xs", Q8K, 255

    def pack_lane(self, e: Emitter, b: TracedBlock, row: Value, out: Value, spare: Value) -> None:
        e.store(e.load(I16, b.address), out + row * 2)
        for g in range(8):
            low = (b.u8(4 + g // 2) >> (g % 2 * 4)) & 15
            high = (b.u8(2 + g // 4) >> (g % 4 * 2)) & 3
            e.store(low, spare + row + g * e.lanes)
            e.store(high, spare + row + (8 + g) * e.lanes)

    def pack_words(
        self, e: Emitter, word: Callable[[int], Value], out: Value, spare: Value
    ) -> None:
        n, width = e.lanes, 4 * e.lanes
        low = [e.u8(spare + width * i, width) for i in (0, 1)]
        e.store(low[0] | (low[1] << 4), out + 2 * n)
        pairs = [e.u8(spare + (8 * n + 2 * n * i), 2 * n) for i in range(4)]
        e.store(_pack_pairs(pairs), out + 6 * n)
        for g in range(8):
            for t in range(4):
                nibbles = (word(8 * g + t) & 15) | ((word(8 * g + t + 4) & 15) << 4)
                e.store(nibbles, out + (8 * n + width * (4 * g + t)))

    def fields(self, e: Emitter, p: Value) -> Fields:
        n, width = e.lanes, 4 * e.lanes
        d, low, high = e.load_f16(p, n), e.u8(p + 2 * n, width), e.u8(p + 6 * n, 2 * n)
        quads = [low & 15, low >> 4]

        def scale(g: int) -> Value:
            top = ((high >> (g // 2 * 2)) & 3).slice(n * (g % 2), n)
            code = quads[g // 4].slice(n * (g % 4), n) | (top << 4)
            return (code.f32() - 32.0) * d

        return Fields([lambda g=g: scale(g) for g in range(8)])  # type: ignore[misc]

    def steps(self, e: Emitter, p: Value) -> Iterator[Step]:
        width = 4 * e.lanes
        levels = [level + 128 for level in self.type.table or ()]
        for g in range(8):

            def read(g: int = g) -> Codes:
                at = p + (8 * e.lanes + width * 4 * g)
                nibbles = [e.u8(at + width * t, width) for t in range(4)]
                for t in range(8):
                    code = nibbles[t % 4] & 15 if t < 4 else nibbles[t % 4] >> 4
                    yield g, t, e.lookup(levels, code)

            yield (g,), read

    def start(self, e: Emitter, x: Value) -> list[Value]:
        return [e.broadcast(I32, x + SUM_128)]
