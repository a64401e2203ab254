"""Packed layouts of formats whose blocks are 32 elements with one scale."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from edgellm.kernels.cpu.activations import Q8, start_of_biased
from edgellm.kernels.cpu.decode import TracedBlock, exponent_scale
from edgellm.kernels.cpu.layout import Codes, Fields, PackedLayout, Step, pack_bits
from edgellm.kernels.cpu.vector import I16, Emitter, Value


class Packed32(PackedLayout):
    """Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, and IQ4_NL, whose nibbles number levels.

    scales [lanes] f16 | minimums [lanes] f16 if any | fifth bits (one word) if any | codes: 4 words
    of nibbles (word t low, t + 4 high) or 8 words of bytes.
    """

    form = Q8

    def __init__(self, type_name: str, bits: int, has_minimum: bool = False) -> None:
        self.type_name, self.bits, self.has_minimum = type_name, bits, has_minimum
        super().__init__()
        self.largest = 255 if self.type.table else (1 << bits) - 1
        self.bias = 128 if self.type.table else self.type.bias

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
            e.store(pack_bits(e, words, 4), out + fifth)
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
                if self.type.table is not None:
                    code = e.lookup([level + 128 for level in self.type.table], code)
                yield 0, t, code

        yield (0,), read

    def start(self, e: Emitter, struct: Value, group: int) -> list[Value | None]:
        if not self.bias:
            return [None]
        return [start_of_biased(e, struct, self.bias)]


class PackedMXFP4(PackedLayout):
    """MXFP4: exponents [lanes] | 4 words of nibbles (word t low, t + 4 high) that number levels."""

    type_name, form, largest = "mxfp4", Q8, 28

    def pack_lane(self, e: Emitter, b: TracedBlock, row: Value, out: Value, spare: Value) -> None:
        e.store(b.u8(0), out + row)

    def pack_words(
        self, e: Emitter, word: Callable[[int], Value], out: Value, spare: Value
    ) -> None:
        for t in range(4):
            low, high = word(t) & 15, word(t + 4) & 15
            e.store(low | (high << 4), out + (e.lanes + 4 * e.lanes * t))

    def fields(self, e: Emitter, p: Value) -> Fields:
        scale = exponent_scale(e, e.u8(p, e.lanes))
        return Fields([lambda: scale])

    def steps(self, e: Emitter, p: Value) -> Iterator[Step]:
        width = 4 * e.lanes
        levels = [level + 16 for level in self.type.table or ()]

        def read() -> Codes:
            nibbles = [e.u8(p + (e.lanes + width * t), width) for t in range(4)]
            for t in range(8):
                code = nibbles[t % 4] & 15 if t < 4 else nibbles[t % 4] >> 4
                yield 0, t, e.lookup(levels, code)

        yield (0,), read

    def start(self, e: Emitter, struct: Value, group: int) -> list[Value | None]:
        return [start_of_biased(e, struct, 16)]  # levels are read 16 too high
