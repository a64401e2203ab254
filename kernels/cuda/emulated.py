"""A device without a GPU: kernels run on the CPU, in checked memory, in orders one asks for.

Streams are queues of what has not been done yet. A GPU does the work of different streams in any
order that events allow; a ``policy`` chooses among them, so that a missing wait shows:

    lazy        nothing is done before somebody waits for it
    eager       everything is done at once
    eager-side  everything but the main stream's work
    random      whatever a seed says

Every byte is accounted: ``total`` is how much memory the device has, ``pinned_used`` how much of
the host's is pinned for it.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.cuda.device import (
    Argument,
    Buffer,
    DeviceError,
    OutOfDeviceMemory,
    OutOfHostMemory,
    aligned,
)
from edgellm.kernels.cuda.emulator import ORDERS, EmulatedKernel, EmulatorError, Module
from edgellm.kernels.cuda.source import Source, module, split

POLICIES = ("lazy", "eager", "eager-side", "random")
_PROT_NONE, _MAP_FAILED = 0, ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class GuardedMemory:
    """An allocation between two pages that nobody may touch. It ends where the upper one begins, up
    to 15 bytes; what was never written is NaN as float and half."""

    def __init__(self, n_bytes: int) -> None:
        page = mmap.PAGESIZE
        self.n_bytes, self._base = n_bytes, None
        used = -(-max(n_bytes, 1) // 16) * 16
        whole = -(-used // page) * page
        self._length = whole + 2 * page
        self._base = _libc.mmap(
            None, self._length, mmap.PROT_READ | mmap.PROT_WRITE,
            mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0,
        )  # fmt: skip
        if self._base == _MAP_FAILED:
            self._base = None
            raise MemoryError(f"the system gives the emulator no {n_bytes} bytes")
        _libc.mprotect(self._base, page, _PROT_NONE)
        _libc.mprotect(self._base + page + whole, page, _PROT_NONE)
        self.address = self._base + page + whole - used
        ctypes.memset(self.address, 0xFF, n_bytes)

    def close(self) -> None:
        if self._base:
            _libc.munmap(self._base, self._length)
            self._base = self.address = 0

    def __del__(self) -> None:
        self.close()


class EmulatedDevice:
    kind = "emulated"

    def __init__(
        self, total: int = 1 << 30, policy: str = "lazy", order: str = "ascending", seed: int = 1,
        name: str = "emulated GPU", pinned_total: int | None = None,
    ) -> None:  # fmt: skip
        """``pinned_total`` bytes of the host's memory can be pinned; None: all there are."""
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, not {policy!r}")
        self.total, self.used, self.policy = total, 0, policy
        self.pinned_total, self.pinned_used = pinned_total, 0
        self.order, self.seed, self.name, self.cc = ORDERS.index(order), seed, name, (7, 5)
        self.random = random.Random(seed)
        self.streams: list[EmulatedStream] = []
        self.n_launches = 0
        self._modules: dict[str, Module] = {}
        self._kernels: dict[str, _Launcher] = {}
        self.main = self.stream()

    # ---- memory ---------------------------------------------------------------------------------

    def alloc(self, n_bytes: int) -> Buffer:
        taken = _taken(n_bytes)
        if self.used + taken > self.total:
            raise OutOfDeviceMemory(self.name, n_bytes, self.total - self.used)
        self.used += taken
        return Buffer(GuardedMemory(n_bytes), n_bytes)

    def free(self, buffer: Buffer) -> None:
        memory = buffer.memory
        assert isinstance(memory, GuardedMemory)
        if memory.address:
            self.used -= _taken(memory.n_bytes)
            memory.close()

    def memory(self) -> tuple[int, int]:
        return self.total - self.used, self.total

    def pinned(self, n_bytes: int) -> NDArray[np.uint8]:
        if self.pinned_total is not None and self.pinned_used + n_bytes > self.pinned_total:
            raise OutOfHostMemory(self.name, n_bytes)
        owner = np.empty(n_bytes, np.uint8)
        self.pinned_used += n_bytes
        weakref.finalize(owner, self._unpinned, n_bytes).atexit = False
        return owner.view(_Pinned)

    def _unpinned(self, n_bytes: int) -> None:
        self.pinned_used -= n_bytes

    # ---- copies ---------------------------------------------------------------------------------

    def copy_to(self, buffer: Buffer, array: NDArray[Any], stream: Any = None) -> None:
        """Pinned memory is read when the copy is done, other memory now: CUDA stages it."""
        source = _bytes(array)
        if stream is None or not isinstance(array, _Pinned):
            source = source.copy()
        work = lambda: _view(buffer, source.nbytes).__setitem__(slice(None), source)  # noqa: E731
        self._copy(work, array, stream)

    def copy_from(self, buffer: Buffer, out: NDArray[Any], stream: Any = None) -> None:
        target = _bytes(out)
        work = lambda: target.__setitem__(slice(None), _view(buffer, target.nbytes))  # noqa: E731
        self._copy(work, out, stream)

    def copy(self, target: Buffer, source: Buffer, n_bytes: int, stream: Any = None) -> None:
        work = lambda: _view(target, n_bytes).__setitem__(slice(None), _view(source, n_bytes))  # noqa: E731
        (stream or self.main).submit(work)
        if stream is None:
            self.main.synchronize()

    def copy_from_peer(
        self, target: Buffer, peer: EmulatedDevice, source: Buffer, n_bytes: int, stream: Any
    ) -> None:
        self.copy(target, source, n_bytes, stream)  # all memory is the CPU's

    def _copy(self, work: Callable[[], None], array: NDArray[Any], stream: Any) -> None:
        """Between host and device."""
        queue: EmulatedStream = stream or self.main
        if queue.captured is not None and (stream is None or not isinstance(array, _Pinned)):
            raise DeviceError("only copies from and to pinned memory, on a stream, can be captured")
        queue.submit(work)
        if stream is None:
            queue.synchronize()

    # ---- streams and kernels --------------------------------------------------------------------

    def stream(self) -> EmulatedStream:
        made = EmulatedStream(self)
        self.streams.append(made)
        return made

    def kernel(self, name: str) -> _Launcher:
        if name not in self._kernels:
            of, function = split(name)
            if of not in self._modules:
                self.load(module(of))
            if function not in self._modules[of].functions:
                raise EmulatorError(f"{of} has no kernel {function}")
            self._kernels[name] = _Launcher(self, EmulatedKernel(self._modules[of], function))
        return self._kernels[name]

    def load(self, source: Source) -> None:
        """A module by its text: what ``kernel`` does for files of the folder."""
        self._modules[source.name] = Module(source)

    @contextmanager
    def capture(self, stream: Any) -> Iterator[EmulatedGraph]:
        graph = EmulatedGraph()
        stream.captured = graph.work
        try:
            yield graph
        finally:
            stream.captured = None

    def synchronize(self) -> None:
        for stream in self.streams:
            stream.synchronize()


class _Launcher:
    """A kernel of a device."""

    def __init__(self, device: EmulatedDevice, kernel: EmulatedKernel) -> None:
        self.device, self.kernel = device, kernel

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Argument],
        shared: int = 0, stream: Any = None,
    ) -> None:  # fmt: skip
        device = self.device
        device.n_launches += 1
        launch = self.kernel.bound(grid, block, args, shared, device.order, device.seed)
        (stream or device.main).submit(launch)


class EmulatedGraph:
    """Captured work, repeated in order."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def launch(self, stream: EmulatedStream) -> None:
        for work in self.work:
            stream.submit(work)


class EmulatedEvent:
    def __init__(self, stream: EmulatedStream, at: int) -> None:
        self.stream, self.at = stream, at

    def synchronize(self) -> None:
        self.stream.run_to(self.at)


class EmulatedStream:
    """A queue of work; the device's policy says when it is done."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.device = device
        self.queue: deque[Callable[[], None]] = deque()
        self.n_done = 0
        self.captured: list[Callable[[], None]] | None = None

    @property
    def end(self) -> int:
        """The number of the last thing submitted."""
        return self.n_done + len(self.queue)

    def submit(self, work: Callable[[], None]) -> None:
        if self.captured is not None:
            self.captured.append(work)
            return
        self.queue.append(work)
        policy, device = self.device.policy, self.device
        if policy == "eager" or (policy == "eager-side" and self is not device.main):
            self.run_to(self.end)
        elif policy == "random":
            for stream in device.streams:
                if device.random.random() < 0.5:
                    stream.run_to(stream.n_done + device.random.randint(0, len(stream.queue)))

    def run_to(self, at: int) -> None:
        while self.n_done < at and self.queue:
            work = self.queue.popleft()
            self.n_done += 1
            work()

    def record(self) -> EmulatedEvent:
        return EmulatedEvent(self, self.end)

    def wait(self, event: EmulatedEvent) -> None:
        self.submit(event.synchronize)

    def synchronize(self) -> None:
        if self.captured is not None:
            raise DeviceError("a stream that is being captured cannot be waited for")
        self.run_to(self.end)


class _Pinned(np.ndarray[Any, np.dtype[np.uint8]]):
    """Host memory that copies look at when they are done; so do views of it."""


def _taken(n_bytes: int) -> int:
    return aligned(max(n_bytes, 1))


def _bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The array's own bytes."""
    if not array.flags.c_contiguous:
        raise DeviceError("copies take arrays that lie in one piece")
    return np.asarray(array).reshape(-1).view(np.uint8)


def _view(buffer: Buffer, n_bytes: int) -> NDArray[np.uint8]:
    """Device memory as the copies see it."""
    if n_bytes > buffer.n_bytes:
        raise DeviceError(f"a copy of {n_bytes} bytes leaves a buffer of {buffer.n_bytes}")
    if not buffer.memory.address:
        raise DeviceError("a copy uses memory that was freed")
    return np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(buffer.address))
