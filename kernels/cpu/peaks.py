"""The two limits of a machine, measured by kernels of our own: how fast a team of threads reads
memory, and how fast it multiplies bytes in registers.

``read`` is a plain loop of vector loads over a buffer far larger than the last cache, in huge pages
as the weights are, split over the threads as a matrix is. ``dot`` adds up products of 4-bit codes
as the target's kernels do, with nothing else in the loop. What a step reaches of each is its
distance from the limit; both are measured in the same run, because a shared host changes from
minute to minute.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.cpu import targets
from edgellm.kernels.cpu.cores import last_level_cache
from edgellm.kernels.cpu.memory import allocate, round_up
from edgellm.kernels.cpu.stages import Stages
from edgellm.kernels.cpu.store import EmitKernel, KernelStore
from edgellm.kernels.cpu.sums import sum_of_products
from edgellm.kernels.cpu.targets import Target
from edgellm.kernels.cpu.team import Team
from edgellm.kernels.cpu.vector import I8, I32, Emitter, Value

_UNIT = 1 << 16  # bytes read by one chunk of work
_LEAST_BYTES = 256 << 20  # of the buffer: a pass takes long enough for the clock
_UNROLLED = 8  # loads of a turn of the read loop, each with a sum of its own
_LARGEST = 15  # of the codes: what 4-bit weights, the most common, allow a target
_A_TURN = 8  # products of each sum: as many as 16 bits hold
_TURNS, _UNITS_A_THREAD = 2_500, 32  # of the dot-product loop: some milliseconds in all


def make_read() -> EmitKernel:
    """Arguments: 0 buffer, 1 a line for each thread. Chunks are units of 64 KiB."""

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        buffer, out = e.arguments(args, 2)
        n = 4 * e.lanes
        sums = [e.var(e.const(0, I8, n)) for _ in range(_UNROLLED)]
        with e.loop(buffer + hi * _UNIT, buffer + lo * _UNIT, step=n * _UNROLLED) as at:
            for i, total in enumerate(sums):
                total.set(total.get() ^ e.load(I8, at + n * i, n))
        result = sums[0].get()
        for total in sums[1:]:
            result = result ^ total.get()
        e.store(result, out + tid * 64)  # what nobody needs would not be read

    return emit


def make_dot() -> EmitKernel:
    """Arguments: 0 turns of the loop, 1 a line for each thread. A chunk is the whole loop."""

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        turns, out = e.arguments(args, 2)
        x, codes = e.const(3, I8, 4 * e.lanes), e.var(e.const(5, I8, 4 * e.lanes).unsigned())
        totals = [e.var(e.const(0, I32, e.lanes)) for _ in range(_n_sums(e.target))]
        with e.loop(turns * (hi - lo)):
            code = codes.get()
            sums = [sum_of_products(e, _LARGEST, total.get()) for total in totals]
            for _ in range(_A_TURN):
                for a_sum in sums:
                    code = e.opaque(code)  # or LLVM would compute the loop while compiling
                    a_sum.add(code, x)
            codes.set(code)
            for total, a_sum in zip(totals, sums, strict=True):
                total.set(a_sum.total())
        result = totals[0].get()
        for total in totals[1:]:
            result = result + total.get()
        e.store(result, out + tid * 64)

    return emit


def _n_sums(target: Target) -> int:
    """Independent sums: enough to hide the instruction's latency, and all in registers."""
    return target.registers // (4 if target.narrow_sums else 2)


class Peaks:
    """Measures what a team reaches; a sample costs some milliseconds."""

    def __init__(self, team: Team, store: KernelStore, n_bytes: int | None = None) -> None:
        """``n_bytes`` of the buffer that is read; by default eight times the last cache."""
        self._team, self._store = team, store  # the store owns the machine code
        wanted = n_bytes or max(_LEAST_BYTES, 8 * last_level_cache())
        self.buffer = allocate(round_up(wanted, _UNIT * team.n_threads), huge=True)
        self.buffer[:] = 1  # pages that nobody wrote are all the same page, in the cache
        self._sink = allocate(64 * team.n_threads)
        sink = self._sink.ctypes.data
        read = store.get("peak_read", make_read())
        dot = store.get("peak_dot", make_dot())
        self._n_units = _UNITS_A_THREAD * team.n_threads
        self._read = self._stage(read, [self.buffer.ctypes.data, sink], len(self.buffer) // _UNIT)
        self._dot = self._stage(dot, [_TURNS, sink], self._n_units)

    def _stage(
        self, kernel: int, args: list[int], n_chunks: int
    ) -> tuple[Stages, NDArray[np.int64], NDArray[np.int64]]:
        stages = Stages()
        stages.parallel("peak", kernel, list(args), stages.constant(n_chunks), 1, [], [])
        stages.plan()
        return (stages, *stages.records(self._team.n_threads))

    def _time(self, stage: tuple[Stages, NDArray[np.int64], NDArray[np.int64]]) -> float:
        _, records, counters = stage
        counters[:] = 0
        started = time.perf_counter()
        self._team.run(records)
        return time.perf_counter() - started

    def read(self) -> float:
        """Bytes a second of one pass over the buffer."""
        return len(self.buffer) / self._time(self._read)

    def dot(self) -> float:
        """Multiply-adds of bytes a second."""
        target = targets.current()
        macs = 4 * target.lanes * _n_sums(target) * _A_TURN * _TURNS * self._n_units
        return macs / self._time(self._dot)
