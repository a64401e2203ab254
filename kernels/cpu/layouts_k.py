"""Packed layouts of formats whose blocks are 256 elements, eight groups of 32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from edgellm.kernels.cpu.activations import Q8K, SUMS, start_of_sum
from edgellm.kernels.cpu.decode import TracedBlock
from edgellm.kernels.cpu.layout import (
    Codes,
    Fields,
    PackedLayout,
    PairedFields,
    Step,
    pack_bits,
    pairs,
    place_of_scale,
    twice,
)
from edgellm.kernels.cpu.vector import I8, I16, Emitter, Value
from edgellm.quant.q4_k import group_scale


class PackedQ4K(PackedLayout):
    """Q4_K and Q5_K: 8 groups with 6-bit scales and minimums.

    d [lanes] f16 | dmin [lanes] f16 | three words of scales and minimums | Q5_K: 8 words of fifth
    bits | 32 words of nibbles, groups 2j low and 2j + 1 high. The three words, four scales s or
    minimums m of each row: s0..3 and the top two bits of s4..7 | m likewise | low nibbles of s4..7
    and m4..7. Codes of 5 bits need a sum for each half of a group to stay in 16 bits.
    """

    form, is_paired = Q8K, True

    def __init__(self, type_name: str) -> None:
        self.type_name = type_name
        self.fifth = type_name == "q5_k"
        self.largest, self.n_sums = (31, 2) if self.fifth else (15, 1)
        super().__init__()

    def pack_lane(self, e: Emitter, b: TracedBlock, row: Value, out: Value, spare: Value) -> None:
        n = e.lanes
        e.store(e.load(I16, b.address), out + row * 2)
        e.store(e.load(I16, b.address + 2), out + row * 2 + 2 * n)
        for s in range(8):
            scale, minimum = group_scale(b, s)
            at = spare + place_of_scale(e, row, s)
            e.store(scale, at)
            e.store(minimum, at + 8 * n)

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

    def fields(self, e: Emitter, p: Value) -> PairedFields:
        n, width = e.lanes, 4 * e.lanes
        v0, v1, v2 = (e.u8(p + 4 * n * (i + 1), width) for i in range(3))
        scales = [v0 & 63, (v2 & 15) | ((v0 >> 2) & 0x30)]
        minimums = [v1 & 63, (v2 >> 4) | ((v1 >> 2) & 0x30)]

        def scale(step: int) -> Value:
            if not self.fifth:
                return pairs(e, scales[step // 2], step % 2)
            return twice(e, pairs(e, scales[step // 4], step // 2 % 2), step % 2)

        def minimum(j: int) -> Value:
            return pairs(e, minimums[j // 2], j % 2)

        return PairedFields(
            e.load_f16(p, n), [partial(scale, i) for i in range(8 if self.fifth else 4)],
            -e.load_f16(p + 2 * n, n),
            [partial(minimum, j) for j in range(4)],
        )  # fmt: skip

    def steps(self, e: Emitter, p: Value) -> Iterator[Step]:
        width = 4 * e.lanes
        codes = p + 4 * width
        if not self.fifth:
            for j in range(4):

                def both(j: int = j) -> Codes:
                    words = [codes + width * (8 * j + t) for t in range(8)]
                    if e.target.narrow_sums:  # few registers: one group after the other
                        for t, at in enumerate(words):
                            yield 2 * j, t, e.u8(at, width) & 15
                        for t, at in enumerate(words):
                            yield 2 * j + 1, t, e.u8(at, width) >> 4
                        return
                    for t, at in enumerate(words):
                        nibbles = e.u8(at, width)
                        yield 2 * j, t, nibbles & 15
                        yield 2 * j + 1, t, nibbles >> 4

                yield (2 * j, 2 * j + 1), both
            return
        nibbles = codes + 8 * width
        for g in range(8):

            def read(g: int = g) -> Codes:
                high = e.u8(codes + width * g, width)
                for t in range(8):
                    byte = e.u8(nibbles + width * (8 * (g // 2) + t), width)
                    bit = high << (4 - t) if t < 4 else high >> (t - 4)
                    yield g, t, (byte >> 4 if g % 2 else byte & 15) | (bit & 16)

            yield (g,), read


class PackedQ6K(PackedLayout):
    """Q6_K: 16 signed 8-bit scales, two to a group.

    d [lanes] f16 | four words of scales | for each 16 elements three words: nibbles of words 0 and
    1, nibbles of words 2 and 3, high two bits of all four.
    """

    type_name, form, largest, n_sums, is_paired = "q6_k", Q8K, 63, 2, True

    def pack_lane(self, e: Emitter, b: TracedBlock, row: Value, out: Value, spare: Value) -> None:
        e.store(e.load(I16, b.address + 208), out + row * 2)
        for s in range(16):
            e.store(b.i8(192 + s), out + place_of_scale(e, row, s) + 2 * e.lanes)

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

    def fields(self, e: Emitter, p: Value) -> PairedFields:
        width = 4 * e.lanes
        words = [e.load(I8, p + (2 * e.lanes + width * i), width) for i in range(4)]

        def scale(g: int) -> Value:
            return pairs(e, words[g // 2], g % 2)

        return PairedFields(e.load_f16(p, e.lanes), [partial(scale, g) for g in range(8)])

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

    def start(self, e: Emitter, struct: Value, group: int) -> list[Value | None]:
        return [start_of_sum(e, struct, self.form, 2 * group + k, 0) for k in (0, 1)]


def _pack_pairs(words: list[Value]) -> Value:
    """Four words of 2-bit codes in one, the first lowest."""
    packed = words[0] & 3
    for i, w in enumerate(words[1:], 1):
        packed = packed | ((w & 3) << (2 * i))
    return packed


class PackedQ3K(PackedLayout):
    """Q3_K: 16 signed 6-bit scales, two to a group, four words of them.

    d [lanes] f16 | low nibbles of scales 0..7 (4..7 high), of 8..15 likewise, their high two bits
    (word s // 4 at bit s // 4 * 2) | for each group three words: low two bits of words
    0..3, of words 4..7, third bits of all eight.
    """

    type_name, form, largest, n_sums, is_paired = "q3_k", Q8K, 7, 2, True

    def pack_lane(self, e: Emitter, b: TracedBlock, row: Value, out: Value, spare: Value) -> None:
        e.store(e.load(I16, b.address + 108), out + row * 2)
        for s in range(16):
            low = (b.u8(96 + s % 8) >> (s // 8 * 4)) & 15
            high = (b.u8(104 + s % 4) >> (s // 4 * 2)) & 3
            e.store(low | (high << 4), spare + place_of_scale(e, row, s))

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

    def fields(self, e: Emitter, p: Value) -> PairedFields:
        n, width = e.lanes, 4 * e.lanes
        v0, v1, high = (e.u8(p + (2 * n + width * i), width) for i in range(3))
        words = [v0 & 15, v0 >> 4, v1 & 15, v1 >> 4]
        words = [w | (((high >> (2 * i)) & 3) << 4) for i, w in enumerate(words)]

        def scale(g: int) -> Value:
            return pairs(e, words[g // 2], g % 2) - 32

        return PairedFields(e.load_f16(p, n), [partial(scale, g) for g in range(8)])

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

    def start(self, e: Emitter, struct: Value, group: int) -> list[Value | None]:
        return [start_of_sum(e, struct, self.form, 2 * group + k, 3) for k in (0, 1)]


class PackedQ2K(PackedLayout):
    """Q2_K: 16 scales and minimums of 4 bits, two of each to a group.

    d [lanes] f16 | dmin [lanes] f16 | four words of scales (low) and minimums | for each group two
    words: codes of words 0..3, of words 4..7.
    """

    type_name, form, largest, n_sums, is_paired = "q2_k", Q8K, 3, 2, True

    def pack_lane(self, e: Emitter, b: TracedBlock, row: Value, out: Value, spare: Value) -> None:
        e.store(e.load(I16, b.address + 80), out + row * 2)
        e.store(e.load(I16, b.address + 82), out + row * 2 + 2 * e.lanes)
        for s in range(16):
            e.store(b.u8(s), out + place_of_scale(e, row, s) + 4 * e.lanes)

    def pack_words(
        self, e: Emitter, word: Callable[[int], Value], out: Value, spare: Value
    ) -> None:
        for k in range(16):
            packed = _pack_pairs([word(4 * k + t) for t in range(4)])
            e.store(packed, out + (20 * e.lanes + 4 * e.lanes * k))

    def fields(self, e: Emitter, p: Value) -> PairedFields:
        n, width = e.lanes, 4 * e.lanes
        words = [e.u8(p + (4 * n + width * i), width) for i in range(4)]

        def part(g: int, shift: int) -> Value:
            return pairs(e, (words[g // 2] >> shift) & 15, g % 2)

        return PairedFields(
            e.load_f16(p, n), [partial(part, g, 0) for g in range(8)],
            -e.load_f16(p + 2 * n, n), [partial(part, g, 4) for g in range(8)],
            of_halves=True,
        )  # fmt: skip

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

        return Fields([partial(scale, g) for g in range(8)])

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

    def start(self, e: Emitter, struct: Value, group: int) -> list[Value | None]:
        total = e.load(I16, struct + (self.form.span + SUMS + 2 * group)).i32()
        return [(total * -128).splat(e.lanes)]
