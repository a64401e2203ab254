"""A team of threads that walks a program's stages without coming back to Python.

Each worker sits in one native call for the life of the team: it is parked until the step number
changes, walks all stages, and the last one to finish wakes the caller. The caller's thread is
never in the team, so Ctrl-C is seen at once; an abort word makes the walk run dry. A step may take
fewer threads than there are (see company); the others sleep until they are called again.

A *stage* is a list of kernel calls over the same chunks. Every thread first works through its own
contiguous range in small chunks from its own counter, which keeps its memory streams apart, and
then helps the others; a barrier separates stages that depend on each other. A stage over rows is
*serial* when there is at most one row: the last thread to reach the barrier runs it before it
opens the barrier. Which thread does what never changes a result.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from edgellm.kernels.cpu.company import Company, idle_of, waits_of
from edgellm.kernels.cpu.cores import allowed_cpus
from edgellm.kernels.cpu.store import EmitKernel, KernelStore
from edgellm.kernels.cpu.vector import I32, I64, Emitter, Value

LINE = 8  # int64 words of a cache line
STAGE_WORDS = 8  # calls, number of calls, address of count, flags, counters, chunk, 0, 0
BARRIER, SERIAL = 1, 2  # stage flags

# Words of the header that Python and the walk share; hot ones have a cache line of their own.
_STAGES, _N_STAGES, _PROFILE, _WAIT, _WAKE, _YIELD = range(6)
_ARRIVED, _GENERATION, _STEP, _FINISHED, _DONE, _ABORT, _EXIT, _SIZE = (
    LINE * k for k in range(1, 9)
)  # fmt: skip
HEADER_WORDS = LINE * 9
# a step's word: its number, and below it how many threads it takes
_SIZE_BITS = 16
MOST_THREADS = 1024  # beyond any machine; each has scratch memory of its own
_SPINS = 100  # pauses (about 2 us) before a waiting thread begins to give its core away
_YIELDS_PARKED = 100  # times a thread out of work gives it away before it sleeps
_KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


class TeamError(RuntimeError):
    """The team cannot run: it was closed, or the process was forked."""


@dataclass(frozen=True)
class _System:
    """The few operating system calls the walk makes, as addresses of C functions.

    ``futex`` is libc's ``syscall`` with the number of futex, where there is one. Elsewhere a
    parked thread sleeps for 50 us at a time.
    """

    sched_yield: int
    syscall: int = 0
    futex: int = 0
    usleep: int = 0

    @classmethod
    def find(cls) -> _System:
        def address(function: object) -> int:
            return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]

        if sys.platform == "win32":
            kernel32 = ctypes.WinDLL("kernel32")
            return cls(address(kernel32.SwitchToThread), usleep=address(kernel32.Sleep))
        libc = ctypes.CDLL(None)
        if sys.platform == "linux":
            numbers = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
            machine = os.uname().machine
            if machine in numbers and sys.maxsize > 1 << 32:
                return cls(address(libc.sched_yield), address(libc.syscall), numbers[machine])
        return cls(address(libc.sched_yield), usleep=address(libc.usleep))


def _call(e: Emitter, address: Value | int, result: ir.Type, *args: Value) -> None:
    ty = ir.FunctionType(result, [a.type for a in args])
    pointer = e.b.inttoptr(e.value(address).v, ty.as_pointer())
    e.b.call(pointer, [a.v for a in args])


class _Walk:
    """Emits the worker: park, walk the stages, report; until told to exit."""

    def __init__(self, e: Emitter, header: Value, tid: Value, futex: int) -> None:
        self.e, self.h, self.tid, self.futex = e, header, tid, futex
        self.n_threads = e.const(0)  # of the step

    def word(self, index: int) -> Value:
        return self.e.load(I64, self.h + 8 * index)

    def _pointer(self, address: Value) -> ir.Value:
        return self.e.b.inttoptr(address.v, I64.as_pointer())

    def get(self, address: Value) -> Value:
        return Value(self.e, self.e.b.load_atomic(self._pointer(address), "acquire", 8))

    def put(self, value: Value | int, address: Value) -> None:
        self.e.b.store_atomic(self.e.value(value).v, self._pointer(address), "release", 8)

    def fetch_add(self, address: Value, n: Value | int) -> Value:
        pointer = self._pointer(address)
        return Value(self.e, self.e.b.atomic_rmw("add", pointer, self.e.value(n).v, "acq_rel"))

    def pause(self) -> None:
        if "x86" in self.e.b.module.triple:
            self.e.call("llvm.x86.sse2.pause", ir.VoidType())

    def yield_core(self) -> None:
        _call(self.e, self.word(_YIELD), I32)

    def _sleep_while(self, address: Value, old: Value) -> None:
        e = self.e
        if self.futex:  # FUTEX_WAIT_PRIVATE on the low half of the word
            _call(e, self.word(_WAIT), I64, e.const(self.futex), address, e.const(128), old,
                  e.const(0), e.const(0), e.const(0))  # fmt: skip
        else:
            _call(e, self.word(_WAIT), I32, e.const(50 if os.name == "posix" else 0, I32))

    def _wake_all(self, address: Value) -> None:
        e = self.e
        if self.futex:
            _call(e, self.word(_WAIT), I64, e.const(self.futex), address, e.const(129),
                  e.const(1 << 30), e.const(0), e.const(0), e.const(0))  # fmt: skip

    def wait(self, address: Value, old: Value, yields: int | None = None) -> None:
        """Until the word differs from ``old``: spin briefly, then give the core away each time,
        and after so many ``yields`` sleep. Spinning on would keep a preempted teammate away."""
        b, e = self.e.b, self.e
        count = e.var(0)
        head, again, rest, done = (b.append_basic_block(f"wait.{n}") for n in "habd")
        b.branch(head)
        b.position_at_end(head)
        b.cbranch(self.get(address).eq(old).v, again, done)
        b.position_at_end(again)
        self.pause()
        count.set(count.get() + 1)
        b.cbranch((count.get() > _SPINS).v, rest, head)
        b.position_at_end(rest)
        if yields is None:
            self.yield_core()
        else:
            e.branch(
                count.get() < _SPINS + yields,
                self.yield_core,
                lambda: self._sleep_while(address, old),
            )
        b.branch(head)
        b.position_at_end(done)

    def run_calls(self, stage: Value, lo: Value, hi: Value) -> None:
        e = self.e
        calls = e.load(I64, stage)
        with e.loop(e.load(I64, stage + 8)) as i:
            call = calls + i * 16
            _call(e, e.load(I64, call), ir.VoidType(), e.load(I64, call + 8), lo, hi, self.tid)

    def barrier(self, serial: Value, stage: Value, n: Value) -> None:
        e = self.e
        generation_at, arrived_at = self.h + 8 * _GENERATION, self.h + 8 * _ARRIVED
        generation = self.get(generation_at)
        is_last = self.fetch_add(arrived_at, 1).eq(self.n_threads - 1)

        def open_it() -> None:
            with e.when(serial):
                self.run_calls(stage, e.const(0), n)
            self.put(0, arrived_at)
            self.put(generation + 1, generation_at)

        e.branch(
            is_last,
            open_it,
            lambda: self.wait(generation_at, generation),
        )

    def share(self, stage: Value, n: Value) -> None:
        """The thread's own range in chunks, then what the others have left."""
        b, e = self.e.b, self.e
        n_threads, counters = self.n_threads, e.load(I64, stage + 32)
        size = e.load(I64, stage + 40)
        with e.loop(n_threads) as i:
            owner = (self.tid + i) % n_threads
            begin, end = n * owner // n_threads, n * (owner + 1) // n_threads
            counter = counters + owner * (8 * LINE)
            claim, work, done = (b.append_basic_block(f"share.{x}") for x in "cwd")
            b.branch(claim)
            b.position_at_end(claim)
            lo = begin + self.fetch_add(counter, size)
            b.cbranch((lo < end).v, work, done)
            b.position_at_end(work)
            self.run_calls(stage, lo, e.minimum(lo + size, end))
            b.branch(claim)
            b.position_at_end(done)

    def stamp(self, index: Value) -> None:
        """Thread 0 notes the time when a profile is wanted."""
        e, profile = self.e, self.word(_PROFILE)
        with e.when(profile.ne(0)), e.when(self.tid.eq(0)):
            e.store(e.call("llvm.readcyclecounter", I64), profile + index * 8)

    def walk(self) -> None:
        e = self.e
        stages = self.word(_STAGES)
        n_stages = self.word(_N_STAGES)
        with e.loop(n_stages) as i:
            stage = stages + i * (8 * STAGE_WORDS)
            n = e.load(I64, e.load(I64, stage + 16))
            aborted = self.get(self.h + 8 * _ABORT).ne(0)
            n = e.select(aborted, e.const(0), n)
            flags = e.load(I64, stage + 24)
            serial = (flags & SERIAL).ne(0) & (n <= 1)
            self.stamp(i * 2)
            with e.when((flags & BARRIER).ne(0)):
                self.barrier(serial, stage, n)
            self.stamp(i * 2 + 1)
            with e.when(serial ^ 1):
                self.share(stage, n)
        self.stamp(n_stages * 2)

    def finish(self, step: Value) -> None:
        e = self.e
        finished_at, done_at = self.h + 8 * _FINISHED, self.h + 8 * _DONE
        with e.when(self.fetch_add(finished_at, 1).eq(self.n_threads - 1)):
            self.put(0, finished_at)
            self.put(step, done_at)
            self._wake_all(done_at)

    def stay_away(self) -> None:
        """Sleep until the team is large enough for this thread again."""
        b, size_at = self.e.b, self.h + 8 * _SIZE
        check, sleep, done = (b.append_basic_block(f"away.{x}") for x in "csd")
        b.branch(check)
        b.position_at_end(check)
        size = self.get(size_at)
        b.cbranch((size > self.tid).v, done, sleep)
        b.position_at_end(sleep)
        self._sleep_while(size_at, size)
        b.branch(check)
        b.position_at_end(done)

    def emit(self) -> None:
        b, e = self.e.b, self.e
        seen = e.var(0)
        step_at = self.h + 8 * _STEP
        park, step, done = (b.append_basic_block(f"worker.{x}") for x in "psd")
        b.branch(park)
        b.position_at_end(park)
        self.wait(step_at, seen.get(), _YIELDS_PARKED)
        seen.set(self.get(step_at))
        b.cbranch(self.get(self.h + 8 * _EXIT).ne(0).v, done, step)
        b.position_at_end(step)
        self.n_threads = seen.get() & ((1 << _SIZE_BITS) - 1)

        def take_part() -> None:
            self.walk()
            self.finish(seen.get())

        e.branch(self.tid < self.n_threads, take_part, self.stay_away)
        b.branch(park)
        b.position_at_end(done)


def make_worker(futex: int) -> EmitKernel:
    """The worker: ``args`` is the header, ``lo`` the thread's number in the team."""

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        _Walk(e, args, lo, futex).emit()

    return emit


class Team:
    """Threads that run one program's stages; not for use by two callers at once."""

    def __init__(self, n_threads: int, store: KernelStore, cpus: tuple[int, ...] = ()) -> None:
        """The threads stay on ``cpus``, where any are given."""
        system = _System.find()
        self.n_threads = n_threads
        self._worker = store.get(f"worker_{system.futex}", make_worker(system.futex))
        self._words = np.zeros(HEADER_WORDS + LINE, np.int64)
        offset = (-self._words.ctypes.data % 64) // 8
        self.header = self._words[offset : offset + HEADER_WORDS]
        self.header[_SIZE] = n_threads
        self.header[_WAIT] = system.syscall or system.usleep
        self.header[_YIELD] = system.sched_yield
        self._futex = system.futex
        self._syscall = ctypes.CDLL(None).syscall if system.futex else None
        self._pid = os.getpid()
        self._threads = [
            threading.Thread(
                target=_work, args=(self._worker, self.header.ctypes.data, i, cpus),
                name=f"edgellm-{i}", daemon=True,
            )
            for i in range(n_threads)
        ]  # fmt: skip
        for i, thread in enumerate(self._threads):
            try:
                thread.start()
            except RuntimeError:  # a limit of the system or of a container
                _stop(self.header, self._threads[:i], self._syscall, system.futex, self._pid)
                raise TeamError(f"only {i} of {n_threads} threads could be started") from None
        waits = waits_of([t.native_id or 0 for t in self._threads])
        self._company = Company(n_threads, waits, idle_of(cpus or allowed_cpus()))
        self._stop = weakref.finalize(
            self, _stop, self.header, self._threads, self._syscall, system.futex, self._pid
        )

    def run(
        self, stages: NDArray[np.int64], profile: NDArray[np.int64] | None = None,
        is_short: bool = False,
    ) -> None:  # fmt: skip
        """Walk ``stages`` [n, STAGE_WORDS]. In a step that ``is_short``, of few tokens, threads
        that keep losing their cores are left out; in a long one they are worth waiting for.
        KeyboardInterrupt ends the step within milliseconds and is raised when the team is at rest
        again."""
        if os.getpid() != self._pid:
            raise TeamError("edgellm cannot be used after a fork; load the model in this process")
        if not self._stop.alive:
            raise TeamError("this model was closed")
        began = time.monotonic()
        if is_short:
            size = self._company.begin()
        else:
            size = self.n_threads
            self._company.interrupt()
        self._walk(stages, profile, size)
        if is_short:
            self._company.end(time.monotonic() - began)

    def _walk(
        self, stages: NDArray[np.int64], profile: NDArray[np.int64] | None, size: int
    ) -> None:
        h = self.header
        h[_STAGES], h[_N_STAGES] = stages.ctypes.data, len(stages)
        h[_PROFILE] = 0 if profile is None else profile.ctypes.data
        h[_ABORT] = 0
        if h[_SIZE] != size:
            h[_SIZE] = size
            _wake(h, _SIZE, self._syscall, self._futex)
        step = ((h[_STEP] >> _SIZE_BITS) + 1) << _SIZE_BITS | size
        h[_STEP] = step
        _wake(h, _STEP, self._syscall, self._futex)
        try:
            self._wait_done(step)
        except BaseException:
            h[_ABORT] = 1
            while h[_DONE] != step:  # a second Ctrl-C must not leave the team in mid-step
                with contextlib.suppress(KeyboardInterrupt):
                    self._wait_done(step)
            raise

    def _wait_done(self, step: np.int64) -> None:
        h = self.header
        timeout = (ctypes.c_int64 * 2)(0, 50_000_000)  # a signal handler runs at least this often
        address = ctypes.c_void_p(h.ctypes.data + 8 * _DONE)
        while (done := h[_DONE]) != step:
            if self._syscall is not None:
                expected = ctypes.c_uint32(int(done) & 0xFFFFFFFF)
                self._syscall(self._futex, address, 128, expected, timeout, None, 0)
            else:
                time.sleep(5e-5)

    @property
    def is_alive(self) -> bool:
        """Whether it can run: neither closed nor the copy of a forked process."""
        return self._stop.alive and os.getpid() == self._pid

    @property
    def was_aborted(self) -> bool:
        """Whether the last step ended early."""
        return bool(self.header[_ABORT])

    def abort(self) -> None:
        """End the running step early (from another thread); its results are void."""
        self.header[_ABORT] = 1

    def close(self) -> None:
        """Stop the threads. Nothing runs afterwards."""
        self._stop()


def _work(worker: int, header: int, number: int, cpus: tuple[int, ...]) -> None:
    """One thread for its whole life."""
    if cpus:
        os.sched_setaffinity(0, cpus)  # of this thread
    _KERNEL(worker)(header, number, 0, 0)


def _wake(header: NDArray[np.int64], word: int, syscall: Any, futex: int) -> None:
    """Wake all threads asleep on a word of the header; FUTEX_WAKE_PRIVATE."""
    if syscall is not None:
        syscall(futex, ctypes.c_void_p(header.ctypes.data + 8 * word), 129, 1 << 30, None, None, 0)


def _stop(
    header: NDArray[np.int64], threads: list[threading.Thread], syscall: Any, futex: int, pid: int
) -> None:
    """End the workers; holds no reference to the team, so that the team can be collected."""
    if os.getpid() != pid:  # the threads do not exist in a forked child
        return
    header[_ABORT] = 1
    patience = time.monotonic() + 5.0
    while header[_DONE] != header[_STEP] and time.monotonic() < patience:
        time.sleep(1e-3)  # a step of another thread runs dry first
    header[_EXIT] = 1
    header[_STEP] += 1 << _SIZE_BITS
    header[_SIZE] = len(threads)
    _wake(header, _STEP, syscall, futex)
    _wake(header, _SIZE, syscall, futex)
    for thread in threads:
        thread.join()
