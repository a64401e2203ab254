"""NVIDIA GPUs through CuPy: the only file that imports it.

CuPy compiles each module by NVRTC for the GPU at hand and keeps the result in a cache of its own
(CUPY_CACHE_DIR). Memory is taken from the driver directly, without CuPy's pool: what is accounted
is what is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime
from numpy.typing import NDArray

from edgellm.kernels.cuda.device import (
    Argument,
    Buffer,
    Device,
    DeviceError,
    OutOfDeviceMemory,
    OutOfHostMemory,
)
from edgellm.kernels.cuda.source import module, split

OLDEST = (7, 5)  # dp4a is older, int8 matrix products are not
_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation


def open_devices() -> tuple[list[Device], str]:
    """See device.open_devices."""
    try:
        n = runtime.getDeviceCount()
    except RuntimeError as error:
        return [], f"No GPU is used: CuPy finds no NVIDIA driver it can work with ({error})."
    found: list[Device] = []
    refused = []
    for i in range(n):
        try:
            device = CudaDevice(i)
            device.memory()
        except RuntimeError as error:  # another process has it for itself, or has filled it
            refused.append(f"GPU {i} cannot be used ({error})")
            continue
        if device.cc >= OLDEST:
            found.append(device)
        else:
            refused.append(f"{device.name} has compute capability {device.cc[0]}.{device.cc[1]}, "
                           "which is below 7.5")  # fmt: skip
    if found:
        return found, ""
    if refused:
        return [], f"No GPU is used: {'; '.join(refused)}."
    return [], "No GPU is used: the driver lists none (CUDA_VISIBLE_DEVICES may hide them)."


class _DeviceMemory:
    """An allocation; freed with the last reference, or by ``close``."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory

    @property
    def address(self) -> int:
        if self._memory is None:
            raise DeviceError("device memory is used that was freed")
        return int(self._memory.ptr)

    def close(self) -> None:
        self._memory = None


class CudaDevice:
    kind = "cuda"

    def __init__(self, index: int) -> None:
        self.index = index
        self._device = cupy.cuda.Device(index)
        properties = runtime.getDeviceProperties(index)
        self.name = properties["name"].decode()
        self.cc = (int(properties["major"]), int(properties["minor"]))
        self._modules: dict[str, Any] = {}
        self._kernels: dict[str, CudaKernel] = {}
        self._peers = set[int]()  # other devices whose memory this one may have access to
        self.main = self.stream()

    # ---- memory ---------------------------------------------------------------------------------

    def alloc(self, n_bytes: int) -> Buffer:
        with self._device:
            try:
                memory = cupy.cuda.Memory(max(n_bytes, 1))
            except (RuntimeError, cupy.cuda.memory.OutOfMemoryError) as error:
                if getattr(error, "status", _MEMORY_ALLOCATION) != _MEMORY_ALLOCATION:
                    raise DeviceError(f"{self.name} failed: {error}") from None
                raise OutOfDeviceMemory(self.name, n_bytes, self.memory()[0]) from None
        return Buffer(_DeviceMemory(memory), n_bytes)

    def free(self, buffer: Buffer) -> None:
        assert isinstance(buffer.memory, _DeviceMemory)
        buffer.memory.close()

    def memory(self) -> tuple[int, int]:
        with self._device, _failures(self.name):
            free, total = runtime.memGetInfo()
        return int(free), int(total)

    def pinned(self, n_bytes: int) -> NDArray[np.uint8]:
        """Not of CuPy's pool, which takes the next power of two and keeps it."""
        with self._device, _failures(self.name):
            try:
                memory = cupy.cuda.PinnedMemory(max(n_bytes, 1))
            except RuntimeError as error:
                if getattr(error, "status", None) != _MEMORY_ALLOCATION:
                    raise
                raise OutOfHostMemory(self.name, n_bytes) from None
        return np.frombuffer(cupy.cuda.PinnedMemoryPointer(memory, 0), np.uint8, n_bytes)

    # ---- copies ---------------------------------------------------------------------------------

    def copy_to(self, buffer: Buffer, array: NDArray[Any], stream: Any = None) -> None:
        self._copy(buffer.address, _checked(array, buffer), array.nbytes,
                   runtime.memcpyHostToDevice, stream)  # fmt: skip

    def copy_from(self, buffer: Buffer, out: NDArray[Any], stream: Any = None) -> None:
        self._copy(_checked(out, buffer), buffer.address, out.nbytes,
                   runtime.memcpyDeviceToHost, stream)  # fmt: skip

    def copy(self, target: Buffer, source: Buffer, n_bytes: int, stream: Any = None) -> None:
        self._copy(target.address, source.address, n_bytes, runtime.memcpyDeviceToDevice, stream)

    def copy_from_peer(
        self, target: Buffer, peer: CudaDevice, source: Buffer, n_bytes: int, stream: Any
    ) -> None:
        """Directly where the machine allows it; else the driver goes through the host's memory."""
        with self._device, _failures(self.name):
            if peer.index not in self._peers:
                self._peers.add(peer.index)
                if runtime.deviceCanAccessPeer(self.index, peer.index):
                    with suppress(runtime.CUDARuntimeError):  # another model has enabled it
                        runtime.deviceEnablePeerAccess(peer.index)
            runtime.memcpyPeerAsync(
                target.address, self.index, source.address, peer.index, n_bytes, stream.stream.ptr
            )

    def _copy(self, target: int, source: int, n_bytes: int, kind: int, stream: Any) -> None:
        queue = stream or self.main
        with self._device, _failures(self.name):
            runtime.memcpyAsync(target, source, n_bytes, kind, queue.stream.ptr)
        if stream is None:
            queue.synchronize()

    # ---- streams and kernels --------------------------------------------------------------------

    def stream(self) -> CudaStream:
        with self._device:
            return CudaStream(cupy.cuda.Stream(non_blocking=True), self)

    def kernel(self, name: str) -> CudaKernel:
        if name not in self._kernels:
            of, function = split(name)
            if of not in self._modules:
                source = module(of)
                self._modules[of] = cupy.RawModule(code=source.text, options=source.options)
            # RawKernel.kernel skips RawKernel's look-up at every call
            with self._device, _failures(f"compiling kernels for {self.name}"):
                compiled = self._modules[of].get_function(function).kernel
            self._kernels[name] = CudaKernel(compiled, self)
        return self._kernels[name]

    @contextmanager
    def capture(self, stream: Any) -> Iterator[CudaGraph]:
        graph = CudaGraph()
        with self._device, _failures(self.name):
            stream.stream.begin_capture()
            try:
                yield graph
            finally:
                graph.graph = stream.stream.end_capture()
            graph.graph.upload(stream.stream)

    def synchronize(self) -> None:
        with _failures(self.name):
            self._device.synchronize()


class CudaKernel:
    def __init__(self, function: Any, device: CudaDevice) -> None:
        self.function, self.device = function, device

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Argument],
        shared: int = 0, stream: Any = None,
    ) -> None:  # fmt: skip
        queue = stream or self.device.main
        values = tuple(
            np.uint64(x.address) if isinstance(x, Buffer) else np.uint64(0) if x is None else x
            for x in args
        )
        with self.device._device, _failures(self.device.name):
            self.function(grid, block, values, shared, queue.stream)


class CudaGraph:
    """What was captured; the buffers it names must live as long."""

    graph: Any = None

    def launch(self, stream: CudaStream) -> None:
        with _failures(stream.device.name):
            self.graph.launch(stream.stream)


class CudaStream:
    def __init__(self, stream: Any, device: CudaDevice) -> None:
        self.stream, self.device = stream, device

    def record(self) -> Any:
        with self.device._device, _failures(self.device.name):
            event = cupy.cuda.Event(disable_timing=True)
            event.record(self.stream)
        return event

    def wait(self, event: Any) -> None:
        self.stream.wait_event(event)

    def synchronize(self) -> None:
        with _failures(self.device.name):
            self.stream.synchronize()


@contextmanager
def _failures(name: str) -> Iterator[None]:
    """What CuPy reports, as our error. After an illegal address the process can use the GPU no
    more."""
    try:
        yield
    except DeviceError:
        raise
    except (RuntimeError, cupy.cuda.compiler.CompileException) as error:
        raise DeviceError(f"{name} failed: {error}") from None


def _checked(array: NDArray[Any], buffer: Buffer) -> int:
    """The host address of an array that lies in one piece and fits the buffer."""
    if not array.flags.c_contiguous:
        raise DeviceError("copies take arrays that lie in one piece")
    if array.nbytes > buffer.n_bytes:
        raise DeviceError(f"a copy of {array.nbytes} bytes leaves a buffer of {buffer.n_bytes}")
    return int(array.ctypes.data)
