"""Packed layouts of formats with a codebook: the file's bytes, each beside the same byte of the
other rows of the group.

The block of ``lanes`` rows is [byte][lanes], but that d is [lanes] f16 and that bytes which are
read together as a number lie as such numbers. Magnitudes are gathered from the codebook, four
elements (a word) of a row at a time; signs are bits, spread to bytes by a multiplication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from edgellm.kernels.cpu.activations import HALF_SUMS, Q8K, SUMS
from edgellm.kernels.cpu.decode import TracedBlock
from edgellm.kernels.cpu.layout import Codes, Fields, PackedLayout, Step
from edgellm.kernels.cpu.vector import I8, I16, I32, Emitter, Value
from edgellm.quant import grids
from edgellm.quant.grids import Grid


class PackedGrid(PackedLayout):
    """``grid`` and ``octet`` say where magnitudes and signs of eight elements come from (of a
    codebook of four elements: two entries' numbers)."""

    form, needs_codes = Q8K, False
    grid: Grid
    wide: tuple[range, int] = (range(0), 1)  # offsets of numbers of several bytes, and how many

    def __init__(self) -> None:
        super().__init__()
        self.n_sums = 2 if self.type.chunk == 16 else 1
        self.largest = self.type.bias + int(self.grid.rows.max())

    # ---- packing ------------------------------------------------------------------------------

    def pack_lane(self, e: Emitter, b: TracedBlock, row: Value, out: Value, spare: Value) -> None:
        numbers, n_bytes = self.wide
        e.store(e.load(I16, b.address), out + row * 2)
        for at in numbers:
            value = e.load(I16 if n_bytes == 2 else I32, b.address + at)
            e.store(value, out + at * e.lanes + row * n_bytes)
        inside = {at + i for at in numbers for i in range(n_bytes)}
        for at in range(2, self.type.bytes):
            if at not in inside:
                e.store(b.u8(at), out + at * e.lanes + row)

    def pack_words(
        self, e: Emitter, word: Callable[[int], Value], out: Value, spare: Value
    ) -> None:
        pass

    # ---- reading ------------------------------------------------------------------------------

    def octet(self, e: Emitter, p: Value, o: int) -> tuple[list[Value], Value]:
        """Of elements 8 o .. 8 o + 7: numbers of entries, and signs in the low eight bits."""
        raise NotImplementedError

    def scale(self, e: Emitter, p: Value, d: Value, i: int) -> Value:
        """Of the i-th chunk of the type."""
        raise NotImplementedError

    def fields(self, e: Emitter, p: Value) -> Fields:
        d = e.load_f16(p, e.lanes)
        n = self.block // self.type.chunk
        return Fields([partial(self.scale, e, p, d, i) for i in range(n)])

    def steps(self, e: Emitter, p: Value) -> Iterator[Step]:
        for g in range(self.n_groups):

            def read(g: int = g) -> Codes:
                for o in range(4):
                    entries, signs = self.octet(e, p, 4 * g + o)
                    for half in range(2):
                        bits = (signs >> (4 * half)) & 15
                        yield g, 2 * o + half, self._codes(e, self._four(e, entries, half), bits)

            yield (g,), read

    def _four(self, e: Emitter, entries: list[Value], half: int) -> Value:
        """Four magnitudes of each row, as one number."""
        n = self.grid.rows.shape[1]
        table = e.constant_table(f"grid_{self.grid.name}", self.grid.rows.tobytes())
        if n == 8:
            return e.gather_i32(table + 4 * half, entries[0], 8)
        return e.gather_i32(table, entries[half], 4)

    def _codes(self, e: Emitter, magnitudes: Value, signs: Value) -> Value:
        """bias + magnitude, or bias - magnitude where the bit is set. No byte overflows."""
        ones = (signs * 0x00204081) & 0x01010101  # bit i to byte i
        minus = magnitudes & ((ones << 8) - ones)
        codes = magnitudes + 0x01010101 * self.type.bias - (minus << 1)
        return codes.bitcast(I8, 4 * e.lanes).unsigned()

    def start(self, e: Emitter, struct: Value, group: int) -> list[Value | None]:
        at = struct + self.form.span
        if self.n_sums == 1:
            sums = [e.load(I16, at + (SUMS + 2 * group))]
        else:
            sums = [e.load(I16, at + (HALF_SUMS + 2 * (2 * group + k))) for k in range(2)]
        return [(total.i32() * -self.type.bias).splat(e.lanes) for total in sums]


def _byte(e: Emitter, p: Value, at: int) -> Value:
    """A byte of every row as a number."""
    return e.u8(p + at * e.lanes, e.lanes).i32()


def _number(e: Emitter, p: Value, at: int) -> Value:
    return e.load(I32, p + at * e.lanes, e.lanes, signed=False)


def _even(signs: Value) -> Value:
    """Eight signs from seven: the last makes the number of minuses even."""
    parity = signs ^ (signs >> 4)
    parity = parity ^ (parity >> 2)
    return signs | (((parity ^ (parity >> 1)) & 1) << 7)


def _nibble(e: Emitter, p: Value, at: int, i: int) -> Value:
    """The i-th nibble from a byte on."""
    return (_byte(e, p, at + i // 2) >> (4 * (i % 2))) & 15


class PackedIQ3S(PackedGrid):
    type_name, grid = "iq3_s", grids.IQ3_S

    def octet(self, e: Emitter, p: Value, o: int) -> tuple[list[Value], Value]:
        ninth = _byte(e, p, 66 + o // 4) >> (2 * (o % 4))
        low = [_byte(e, p, 2 + 2 * o + i) for i in range(2)]
        entries = [low[0] | ((ninth & 1) << 8), low[1] | ((ninth & 2) << 7)]
        return entries, _byte(e, p, 74 + o)

    def scale(self, e: Emitter, p: Value, d: Value, i: int) -> Value:
        return d * (_nibble(e, p, 106, i) * 2 + 1).f32()


class PackedIQ3XXS(PackedGrid):
    type_name, grid, wide = "iq3_xxs", grids.IQ3_XXS, (range(66, 98, 4), 4)

    def octet(self, e: Emitter, p: Value, o: int) -> tuple[list[Value], Value]:
        signs = (_number(e, p, 66 + 4 * (o // 4)) >> (7 * (o % 4))) & 127
        return [_byte(e, p, 2 + 2 * o + i) for i in range(2)], _even(signs)

    def scale(self, e: Emitter, p: Value, d: Value, i: int) -> Value:
        return d * ((_number(e, p, 66 + 4 * i) >> 28).f32() + 0.5) * 0.5


class PackedIQ2S(PackedGrid):
    type_name, grid = "iq2_s", grids.IQ2_S

    def octet(self, e: Emitter, p: Value, o: int) -> tuple[list[Value], Value]:
        high = (_byte(e, p, 66 + o // 4) >> (2 * (o % 4))) & 3
        return [_byte(e, p, 2 + o) | (high << 8)], _byte(e, p, 34 + o)

    def scale(self, e: Emitter, p: Value, d: Value, i: int) -> Value:
        return d * (_nibble(e, p, 74, i).f32() + 0.5) * 0.25


class PackedIQ2XS(PackedGrid):
    type_name, grid, wide = "iq2_xs", grids.IQ2_XS, (range(2, 66, 2), 2)

    def octet(self, e: Emitter, p: Value, o: int) -> tuple[list[Value], Value]:
        number = e.load(I16, p + (2 + 2 * o) * e.lanes, e.lanes, signed=False).i32()
        return [number & 511], _even(number >> 9)

    def scale(self, e: Emitter, p: Value, d: Value, i: int) -> Value:
        return d * (_nibble(e, p, 66, i).f32() + 0.5) * 0.25


class PackedIQ2XXS(PackedGrid):
    type_name, grid, wide = "iq2_xxs", grids.IQ2_XXS, (range(6, 66, 8), 4)

    def octet(self, e: Emitter, p: Value, o: int) -> tuple[list[Value], Value]:
        signs = (_number(e, p, 6 + 8 * (o // 4)) >> (7 * (o % 4))) & 127
        return [_byte(e, p, 2 + 8 * (o // 4) + o % 4)], _even(signs)

    def scale(self, e: Emitter, p: Value, d: Value, i: int) -> Value:
        return d * ((_number(e, p, 6 + 8 * i) >> 28).f32() + 0.5) * 0.25
