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

from edgellm.kernels.cpu.activations import GROUP, Activation
from edgellm.kernels.cpu.decode import TracedBlock
from edgellm.kernels.cpu.vector import I32, Emitter, Value
from edgellm.quant import by_name

Thunk = Callable[[], Value]  # read when it is needed: few registers are live at a time


@dataclass(frozen=True)
class Fields:
    """Vectors over rows: ``scales`` [n_groups * n_sums] and ``minimums``: none, or [n_groups] to be
    added times the sum of a group, or with two sums a group [n_groups * 2], 1/32 of what is to be
    taken away times the sum of its half (activations hold -32 times that sum)."""

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


def pack_bits(e: Emitter, words: list[Value], bit: int) -> Value:
    """Bit ``bit`` of 8 words as bits 0..7 of one."""
    packed = (words[0] >> bit) & 1
    for i, w in enumerate(words[1:], 1):
        packed = packed | (((w >> bit) & 1) << i)
    return packed
