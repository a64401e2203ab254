"""From ops to stages: kernel calls with their buffers, barriers where data asks for them, and one
arena in which buffers share memory once they are no longer needed.

A row stage grows: a row op that follows another is appended to it, so that a chunk of rows goes
through the whole chain while it is in cache and one-row steps need no barrier in between.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.cpu.memory import allocate, round_up
from edgellm.kernels.cpu.team import BARRIER, LINE, SERIAL, STAGE_WORDS

ROWS_PER_CHUNK = 4


@dataclass(eq=False)
class Buffer:
    """A block of the arena: rows of ``row_bytes``. Its address is known after planning."""

    n_rows: int
    row_bytes: int
    first: int = -1  # barrier epochs of its first and last use
    last: int = -1
    address: int = 0
    offset: int = 0  # in bytes, of a view
    base: Buffer | None = None  # the buffer that is viewed

    @property
    def whole(self) -> Buffer:
        return self if self.base is None else self.base

    @property
    def n_bytes(self) -> int:
        return self.n_rows * self.row_bytes


Argument = int | Buffer  # a number, or an address known after planning


@dataclass(eq=False)
class Call:
    kernel: int
    args: list[Argument]


@dataclass(eq=False)
class Stage:
    """Calls over the same chunks. ``count`` is the address of the number of chunks."""

    label: str
    calls: list[Call]
    count: int
    chunk: int
    is_rows: bool
    reads: set[Buffer] = field(default_factory=set)
    writes: set[Buffer] = field(default_factory=set)
    barrier: bool = False
    run: Callable[[], None] | None = None  # instead of calls: what the team waits for, see cut


class Stages:
    """Collects stages in order, then plans barriers and memory and writes the walk's records."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self.buffers: list[Buffer] = []
        self._fixed: list[NDArray[np.int64]] = []  # counts and argument blocks the walk reads

    def buffer(self, n_rows: int, row_bytes: int) -> Buffer:
        made = Buffer(n_rows, round_up(row_bytes, 64))
        self.buffers.append(made)
        return made

    def view(self, buffer: Buffer, offset: int) -> Buffer:
        """The rows of a buffer from a byte on."""
        offset += buffer.offset
        return Buffer(buffer.n_rows, buffer.row_bytes, offset=offset, base=buffer.whole)

    def constant(self, value: int) -> int:
        """The address of a number that never changes."""
        held = np.array([value], np.int64)
        self._fixed.append(held)
        return held.ctypes.data

    def rows(
        self, label: str, kernel: int, args: list[Argument], count: int,
        reads: list[Buffer], writes: list[Buffer],
    ) -> None:  # fmt: skip
        """A row op over ``count`` rows (an address); chained to a row stage right before it."""
        last = self.stages[-1] if self.stages else None
        if last is None or not last.is_rows or last.count != count:
            last = Stage(label, [], count, ROWS_PER_CHUNK, True)
            self.stages.append(last)
        last.calls.append(Call(kernel, args))
        last.reads |= {b.whole for b in reads} - last.writes
        last.writes |= {b.whole for b in writes}

    def parallel(
        self, label: str, kernel: int, args: list[Argument], count: int, chunk: int,
        reads: list[Buffer], writes: list[Buffer],
    ) -> None:  # fmt: skip
        """A stage of its own over ``count`` work items (an address), ``chunk`` at a time."""
        self.chain(label, [Call(kernel, args)], count, chunk, reads, writes)

    def chain(
        self, label: str, calls: list[Call], count: int, chunk: int,
        reads: list[Buffer], writes: list[Buffer],
    ) -> None:  # fmt: skip
        """Calls one after the other on each chunk of work items: none needs anything of other
        chunks."""
        read, written = {b.whole for b in reads}, {b.whole for b in writes}
        self.stages.append(Stage(label, calls, count, chunk, False, read - written, written))

    def cut(
        self, label: str, run: Callable[[], None], reads: list[Buffer], writes: list[Buffer]
    ) -> None:
        """Between two walks of the team: ``run`` is called when all before is done."""
        read, written = {b.whole for b in reads}, {b.whole for b in writes}
        self.stages.append(Stage(label, [], 0, 1, False, read, written, run=run))

    def walks(self) -> list[tuple[int, int, Callable[[], None] | None]]:
        """Runs of stages [first, end) that the team walks, and what is called behind each."""
        found, first = [], 0
        for i, stage in enumerate(self.stages):
            if stage.run is not None:
                found.append((first, i, stage.run))
                first = i + 1
        return [*found, (first, len(self.stages), None)]

    # ---- planning -----------------------------------------------------------------------------

    def plan(self, share_memory: bool = True) -> NDArray[np.uint8]:
        """Set barriers and lay out the arena, which is returned. A buffer takes the place of one
        of its size whose last reader is behind a barrier."""
        for stage, epoch in zip(self.stages, self._set_barriers(), strict=True):
            for buffer in stage.reads | stage.writes:
                buffer.first = epoch if buffer.first < 0 else buffer.first
                buffer.last = epoch
        free: dict[int, list[tuple[int, int]]] = {}  # size -> heap of (free after, offset)
        offsets, size = {}, 0
        for buffer in sorted(self.buffers, key=lambda b: b.first):
            places = free.setdefault(buffer.n_bytes, [])
            if share_memory and places and places[0][0] < buffer.first:
                offset = heapq.heappop(places)[1]
            else:
                offset, size = size, size + round_up(buffer.n_bytes, 64)
            heapq.heappush(places, (buffer.last, offset))
            offsets[buffer] = offset
        arena = allocate(size + 64)
        for buffer, offset in offsets.items():
            buffer.address = arena.ctypes.data + offset
        return arena

    def _set_barriers(self) -> list[int]:
        """A barrier before a stage that touches what was written, or writes what was read, since
        the last one; returns the number of barriers before each stage."""
        epochs, epoch = [], 0
        read: set[Buffer] = set()
        written: set[Buffer] = set()
        for i, stage in enumerate(self.stages):
            is_cut = stage.run is not None or (i > 0 and self.stages[i - 1].run is not None)
            stage.barrier = (
                i == 0 or is_cut or bool(stage.reads & written or stage.writes & (written | read))
            )
            if stage.barrier:
                epoch, read, written = epoch + 1, set(), set()
            read |= stage.reads
            written |= stage.writes
            epochs.append(epoch)
        return epochs

    def records(self, n_threads: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """What the walk reads: stages [n, STAGE_WORDS] and their counters, to be zeroed before
        every step."""
        counters = allocate(8 * len(self.stages) * n_threads * LINE).view(np.int64)
        records = allocate(8 * len(self.stages) * STAGE_WORDS).view(np.int64)
        records = records.reshape(len(self.stages), STAGE_WORDS)
        for i, stage in enumerate(self.stages):
            calls = np.empty((len(stage.calls), 2), np.int64)
            for row, call in zip(calls, stage.calls, strict=True):
                args = np.array([self._resolve(a) for a in call.args], np.int64)
                self._fixed.append(args)
                row[:] = call.kernel, args.ctypes.data
            self._fixed.append(calls)
            flags = (BARRIER | (SERIAL if stage.is_rows else 0)) if stage.barrier else 0
            at = counters.ctypes.data + 8 * i * n_threads * LINE
            records[i, :6] = (
                calls.ctypes.data, len(calls), stage.count, flags, at, stage.chunk
            )  # fmt: skip
        return records, counters

    @staticmethod
    def _resolve(argument: Argument) -> int:
        if isinstance(argument, int):
            return argument
        return argument.whole.address + argument.offset
