"""Packed weights: how each number format lies in memory for the dot-product kernels.

Rows are interleaved ``lanes`` at a time. One vector of 4 * lanes bytes, a *word*, holds 4
consecutive elements of every row of the group, so that ``dot4`` against 4 broadcast activations
accumulates all rows at once without a horizontal sum; scales and minimums are vectors over rows.
Packed weights are exactly as large as the file's: sub-block scales keep their 6 bits.

A layout says how a block is packed and how it is read again, side by side. Reading goes in *steps*
of one or two groups of 32 elements, each with one or two integer sums. ``fields`` are the scales
and minimums as vectors over rows; an element is scale * (code - bias) + minimum. K-quants have
integer scales below a float one: a step has two sums then, and scales are pairs of int16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from edgellm.kernels.cpu.activations import GROUP, Activation
from edgellm.kernels.cpu.decode import TracedBlock
from edgellm.kernels.cpu.vector import I16, I32, Emitter, Value
from edgellm.quant import by_name

Thunk = Callable[[], Value]  # read when it is needed: few registers are live at a time


@dataclass(frozen=True)
class Fields:
    """Float vectors over rows: ``scales`` of each sum; ``minimums``: none, or of each group, to be
    added times the sum of its activations."""

    scales: list[Thunk]
    minimums: list[Thunk] = field(default_factory=list)


@dataclass(frozen=True)
class PairedFields:
    """An element is d * scale * (code - bias) - dmin * minimum. ``scales`` of each step are int16
    [2 * lanes], those of its two sums side by side in each row; ``minimums`` likewise, of each two
    groups, or where ``of_halves`` of the two halves of each group."""

    d: Value
    scales: list[Thunk]
    minus_dmin: Value | None = None
    minimums: list[Thunk] = field(default_factory=list)
    of_halves: bool = False


Codes = Iterator[tuple[int, int, Value]]  # (group, word in it, 4 * lanes unsigned codes)
Step = tuple[tuple[int, ...], Callable[[], Codes]]  # groups that are read together, from the first
WORDS = GROUP // 4


class PackedLayout:
    """Base of the layouts."""

    type_name: str
    form: Activation
    largest: int  # largest code
    n_sums = 1  # integer sums of a group: scales may change in its middle
    needs_codes = True  # for packing; else pack_lane copies all there is
    is_paired = False  # fields are PairedFields, and sums fit in 16 bits

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

    def fields(self, e: Emitter, p: Value) -> Fields | PairedFields:
        raise NotImplementedError

    def steps(self, e: Emitter, p: Value) -> Iterator[Step]:
        raise NotImplementedError

    def start(self, e: Emitter, struct: Value, group: int) -> list[Value | None]:
        """Starting values of the sums of a span's ``group``, [n_sums]: minus bias times the sum of
        activations. ``struct`` is the span's."""
        return [None] * self.n_sums


_PLACES = (0, 2, 1, 3)


def place_of_scale(e: Emitter, row: Value, s: int) -> Value:
    """Where the byte of sub-block ``s`` of a row goes, so that ``pairs`` finds neighbours."""
    return row * 4 + (4 * e.lanes * (s // 4) + _PLACES[s % 4])


def pairs(e: Emitter, word: Value, odd: int) -> Value:
    """The first (``odd`` 0) or last two of four bytes in each row of a word, as int16."""
    wide = word.bitcast(I16, 2 * e.lanes)
    if odd:
        return wide >> 8
    return (wide << 8) >> 8 if word.is_signed else wide & 0xFF


def twice(e: Emitter, pair: Value, which: int) -> Value:
    """One of two int16 in both places."""
    wide = pair.bitcast(I32, e.lanes).unsigned()
    one = wide >> 16 if which else wide & 0xFFFF
    return (one | (one << 16)).bitcast(I16, 2 * e.lanes)


def pack_bits(e: Emitter, words: list[Value], bit: int) -> Value:
    """Bit ``bit`` of 8 words as bits 0..7 of one."""
    packed = (words[0] >> bit) & 1
    for i, w in enumerate(words[1:], 1):
        packed = packed | (((w >> bit) & 1) << i)
    return packed
