"""Packed weights: how each number format lies in memory for the dot-product kernels.

Rows are interleaved ``lanes`` at a time. One vector of 4 * lanes bytes, a *word*, holds 4
consecutive elements of every row of the group, so that ``dot4`` against 4 broadcast activations
accumulates all rows at once without a horizontal sum; scales and minimums are vectors over rows.
Packed weights are exactly as large as the file's: sub-block scales keep their 6 bits.

A layout says how a block is packed and how it is read again, side by side. Reading goes in groups
of 32 elements, the structs of the activations: ``steps`` are the codes of one group or two,
``fields`` the scales and minimums as vectors over rows: an element is scale * (code - bias) +
minimum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from edgellm.kernels.cpu.activations import GROUP, Q8, Q8K, SUM_32, SUM_128, Activation
from edgellm.kernels.cpu.decode import TracedBlock
from edgellm.kernels.cpu.vector import I8, I16, I32, Emitter, Value
from edgellm.quant import by_name
from edgellm.quant.q4_k import group_scale

Thunk = Callable[[], Value]  # read when it is needed: few registers are live at a time


@dataclass(frozen=True)
class Fields:
    """Vectors over rows: ``scales`` [n_groups * n_sums], ``minimums`` [n_groups] or none."""

    scales: list[Thunk]
    minimums: list[Thunk] = field(default_factory=list)


Codes = Iterator[tuple[int, int, Value]]  # (group, word in it, 4 * lanes unsigned codes)
Step = tuple[tuple[int, ...], Callable[[], Codes]]  # groups that are read together
WORDS = GROUP // 4


class PackedLayout:
    """Base of the layouts."""

    type_name: str
    form: Activation
    largest: int  # largest code, for dot4
    n_sums = 1  # integer sums of a group: scales may change in its middle

    def __init__(self) -> None:
        self.type = by_name(self.type_name)

    @property
    def block(self) -> int:
        return self.type.block

    @property
    def n_groups(self) -> int:
        return self.block // GROUP

    def block_bytes(self, lanes: int) -> int:
        """Bytes of one packed block of ``lanes`` rows: what the file needs for them."""
        return self.type.bytes * lanes

    # ---- packing ------------------------------------------------------------------------------

    def pack_lane(self, e: Emitter, b: TracedBlock, row: Value, out: Value, spare: Value) -> None:
        """Put one row's scales where the group's vectors of them will be built."""
        raise NotImplementedError

    def pack_words(
        self, e: Emitter, word: Callable[[int], Value], out: Value, spare: Value
    ) -> None:
        """Write the codes of the group; word(t) holds elements 4t..4t+3 of every row."""
        raise NotImplementedError

    # ---- reading ------------------------------------------------------------------------------

    def fields(self, e: Emitter, p: Value) -> Fields:
        raise NotImplementedError

    def steps(self, e: Emitter, p: Value) -> Iterator[Step]:
        raise NotImplementedError

    def start(self, e: Emitter, x: Value) -> list[Value]:
        """Starting values of a group's integer sums, [n_sums]: minus bias times the sum of
        activations. ``x`` is the group's activation block."""
        return [e.const(0, I32, e.lanes)]


def _pack_bits(e: Emitter, words: list[Value], bit: int) -> Value:
    """Bit ``bit`` of 8 words as bits 0..7 of one."""
    packed = (words[0] >> bit) & 1
    for i, w in enumerate(words[1:], 1):
        packed = packed | (((w >> bit) & 1) << i)
    return packed


class Packed32(PackedLayout):
    """Formats of 32 elements with one scale: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.

    scales [lanes] f16 | minimums [lanes] f16 if any | fifth bits (one word) if any | codes: 4 words
    of nibbles (word t low, t + 4 high) or 8 words of bytes.
    """

    form = Q8

    def __init__(self, type_name: str, bits: int, has_minimum: bool = False) -> None:
        self.type_name, self.bits, self.has_minimum = type_name, bits, has_minimum
        self.largest = (1 << bits) - 1
        super().__init__()
        assert self.type.bias in (0, 8, 16, 128)

    def _offsets(self, lanes: int) -> tuple[int, int]:
        """Where the fifth bits and the codes begin."""
        fifth = 2 * lanes * (2 if self.has_minimum else 1)
        return fifth, fifth + (4 * lanes if self.bits == 5 else 0)

    def pack_lane(self, e: Emitter, b: TracedBlock, row: Value, out: Value, spare: Value) -> None:
        e.store(e.load(I16, b.address), out + row * 2)
        if self.has_minimum:
            e.store(e.load(I16, b.address + 2), out + row * 2 + 2 * e.lanes)

    def pack_words(
        self, e: Emitter, word: Callable[[int], Value], out: Value, spare: Value
    ) -> None:
        fifth, codes = self._offsets(e.lanes)
        words = [word(t) for t in range(8)]
        if self.bits == 8:
            for t, w in enumerate(words):
                e.store(w, out + codes + 4 * e.lanes * t)
            return
        if self.bits == 5:
            e.store(_pack_bits(e, words, 4), out + fifth)
        for t in range(4):
            low, high = words[t] & 15, words[t + 4] & 15
            e.store(low | (high << 4), out + codes + 4 * e.lanes * t)

    def fields(self, e: Emitter, p: Value) -> Fields:
        d = e.load_f16(p, e.lanes)
        if not self.has_minimum:
            return Fields([lambda: d])
        m = e.load_f16(p + 2 * e.lanes, e.lanes)
        return Fields([lambda: d], [lambda: m])

    def steps(self, e: Emitter, p: Value) -> Iterator[Step]:
        fifth, codes = self._offsets(e.lanes)
        width = 4 * e.lanes

        def read() -> Codes:
            if self.bits == 8:
                for t in range(8):
                    yield 0, t, e.u8(p + codes + width * t, width)
                return
            nibbles = [e.u8(p + codes + width * t, width) for t in range(4)]
            high = e.u8(p + fifth, width) if self.bits == 5 else None
            for t in range(8):
                code = nibbles[t % 4] & 15 if t < 4 else nibbles[t % 4] >> 4
                if high is not None:
                    moved = high << (4 - t) if t < 4 else high >> (t - 4)
                    code = code | (moved & 16)
                yield 0, t, code

        yield (0,), read

    def start(self, e: Emitter, x: Value) -> list[Value]:
        if not self.type.bias:
            return super().start(e, x)
        return [e.broadcast(I32, x + SUM_128) >> {128: 0, 16: 3, 8: 4}[self.type.bias]]


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
                e.store(_pack_bits(e, [word(8 * s + t) for t in range(8)], 4), codes + width * s)
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


LAYOUTS: dict[str, PackedLayout] = {
    layout.type_name: layout
    for layout in (
        Packed32("q4_0", 4),
        Packed32("q4_1", 4, has_minimum=True),
        Packed32("q5_0", 5),
        Packed32("q5_1", 5, has_minimum=True),
        Packed32("q8_0", 8),
        PackedQ4K("q4_k"),
        PackedQ4K("q5_k"),
        PackedQ6K(),
    )
}
