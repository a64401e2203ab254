"""What a step is, as a device sees it: rows by phase, and the numbers that kernels read.

Rows on a device are in an order of their own: those of generated tokens first, then those of
prompts. A *pass* is a run of rows of one phase that goes through a part at once. All numbers of a
step go to the device in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.cpu.inputs import AttentionGroup, Limits
from edgellm.kernels.cuda.attention import Seen
from edgellm.kernels.cuda.device import Buffer, Device
from edgellm.kernels.cuda.operations import Phase, Rows
from edgellm.kernels.graph import Tensor

Span = tuple[int, int, int, int]  # first row, tokens, first position, row of the block tables
_LINE = 64  # int32 of 256 bytes: where every field begins


@dataclass(frozen=True)
class Stretch:
    """Consecutive rows of one sequence in a pass: ``row`` counts from the step's first."""

    row: int
    rows: Rows


@dataclass(frozen=True)
class Pass:
    """Rows ``first`` and ``out`` on of a step's tokens and wanted rows; ``stretches`` of a prompt
    pass: its sequences."""

    phase: Phase
    first: int
    out: int
    tokens: Rows
    wanted: Rows
    stretches: tuple[Stretch, ...] = ()

    def rows(self, tensor: Tensor) -> Rows:
        return self.wanted if tensor.rows == "out" else self.tokens

    def start(self, tensor: Tensor) -> int:
        return self.out if tensor.rows == "out" else self.first


class StepNumbers:
    """The int32 numbers of a step, in pinned memory and on the device."""

    def __init__(
        self, device: Device, limits: Limits, groups: Sequence[AttentionGroup], n_decode: int
    ) -> None:
        self._device, self._limits, self._groups = device, limits, list(groups)
        self._n_decode = n_decode
        tokens, out = limits.max_tokens, limits.max_out
        # of each pass two counts, of each sequence one
        most = limits.max_seqs + 2 * (-(-tokens // n_decode) + 1)
        self._fields, at = dict[str, int](), 0
        names = [("counts", most * _LINE), ("positions", tokens), ("last", tokens)]
        names += [("sequences", tokens), ("wanted", out)]
        names += [(f"slots{i}", tokens) for i in range(len(self._groups))]
        for name, n in names:
            self._fields[name] = at
            at += -(-n // _LINE) * _LINE
        self._tables, at_table = [], 0
        for group in self._groups:
            self._tables.append(at_table)
            at_table += group.table.shape[1]
        self._head, self._row = at, at_table
        n_bytes = 4 * (at + limits.max_seqs * at_table)
        self.memory = device.alloc(n_bytes)
        self._host = device.pinned(n_bytes).view(np.int32)
        self._host[:] = 0
        self.order: NDArray[np.int64] | None = None  # host rows by device row; None: the same
        self.out_order: NDArray[np.int64] | None = None
        self.passes: list[Pass] = []

    def close(self) -> None:
        """Give the host's memory back; the device's is its program's."""
        self._host = self._host[:0].copy()

    @staticmethod
    def n_bytes(limits: Limits, table_rows: Sequence[int], n_decode: int) -> int:
        """What the numbers take, without making them. ``table_rows``: blocks of a sequence in the
        tables of each group."""

        def lines(n: int) -> int:
            return -(-n // _LINE) * _LINE

        most = limits.max_seqs + 2 * (-(-limits.max_tokens // n_decode) + 1)
        n = most * _LINE + (3 + len(table_rows)) * lines(limits.max_tokens)
        return 4 * (n + lines(limits.max_out) + limits.max_seqs * sum(table_rows))

    def buffer(self, name: str, row: int = 0) -> Buffer:
        return self.memory.at(4 * (self._fields[name] + row))

    def slots(self, group: AttentionGroup, row: int) -> Buffer:
        return self.buffer(f"slots{self._groups.index(group)}", row)

    def seen(self, group: AttentionGroup, row: int) -> Seen:
        """Where the rows from ``row`` on stand, for attention."""
        table = self.memory.at(4 * (self._head + self._tables[self._groups.index(group)]))
        return Seen(
            self.buffer("positions", row), self.buffer("last", row), table,
            self.buffer("sequences", row), self._row, group.shape.block,
        )  # fmt: skip

    # ---- a step ---------------------------------------------------------------------------------

    def describe(
        self, spans: Sequence[Span], is_decode: Sequence[bool], out_rows: NDArray[np.int64],
        stream: object,
    ) -> None:  # fmt: skip
        """Write a step's numbers and send them. Slots and block tables are those of the groups."""
        by_phase = sorted(range(len(spans)), key=lambda i: not is_decode[i])
        mine = [spans[i] for i in by_phase]
        n_decode = sum(spans[i][1] for i in by_phase if is_decode[i])
        order = np.concatenate([np.arange(row, row + n) for row, n, _, _ in mine])
        device_row = np.empty_like(order)
        device_row[order] = np.arange(len(order))
        wanted = device_row[out_rows]
        out_order = np.argsort(wanted, kind="stable")
        wanted = wanted[out_order]
        is_same = bool(np.array_equal(order, np.arange(len(order))))
        self.order = None if is_same else order
        self.out_order = None if is_same else out_order
        lengths = np.array([n for _, n, _, _ in mine])
        firsts = np.array([first for _, _, first, _ in mine])
        begins = np.cumsum(lengths) - lengths
        n = len(order)
        positions = np.arange(n) + np.repeat(firsts - begins, lengths)
        self._set("positions", positions)
        last = positions
        if self._groups and not self._groups[0].shape.causal:
            last = np.repeat(firsts + lengths - 1, lengths)
        self._set("last", last)
        self._set("sequences", np.repeat(np.arange(len(mine)), lengths))
        for i, group in enumerate(self._groups):
            self._set(f"slots{i}", group.slots[order])
        tables = self._host[self._head :].reshape(self._limits.max_seqs, self._row)
        for row, (_, _, _, seat) in enumerate(mine):
            for group, at in zip(self._groups, self._tables, strict=True):
                tables[row, at : at + group.table.shape[1]] = group.table[seat]
        self._n_counts = 0
        self.passes = []
        for first in range(0, n_decode, self._n_decode):
            self._pass("decode", first, min(self._n_decode, n_decode - first), wanted, ())
        if n > n_decode:
            prompts = range(n_decode_runs(is_decode), len(mine))
            runs = [(int(begins[r]), int(lengths[r])) for r in prompts]
            self._pass("prefill", n_decode, n - n_decode, wanted, runs)
        end = self._head + len(mine) * self._row
        self._device.copy_to(self.memory.at(0, 4 * end), self._host[:end], stream)

    def _pass(
        self, phase: Phase, first: int, n: int, wanted: NDArray[np.int64],
        runs: Sequence[tuple[int, int]],
    ) -> None:  # fmt: skip
        out, end = (int(i) for i in np.searchsorted(wanted, [first, first + n]))
        self._host[self._fields["wanted"] + out : self._fields["wanted"] + end] = (
            wanted[out:end] - first
        )
        limit, out_limit = n, end - out
        if phase == "decode":  # so that few graphs are captured
            limit = min(1 << (n - 1).bit_length(), self._n_decode)
            out_limit = min(limit, self._limits.max_out)
        tokens, outs = self._count(n, limit), self._count(end - out, out_limit)
        stretches = tuple(Stretch(row, self._count(k, k)) for row, k in runs)
        self.passes.append(Pass(phase, first, out, tokens, outs, stretches))

    def _count(self, n: int, limit: int) -> Rows:
        at = self._n_counts * _LINE
        self._n_counts += 1
        self._host[at] = n
        return Rows(limit, self.memory.at(4 * at, 4))

    def _set(self, name: str, values: NDArray[np.int64]) -> None:
        at = self._fields[name]
        self._host[at : at + len(values)] = values


def n_decode_runs(is_decode: Sequence[bool]) -> int:
    return sum(map(bool, is_decode))
