"""What a GPU is to the rest of the program: memory, streams, copies, kernels, captured graphs.

Two classes are devices: ``CudaDevice`` (gpu.py, through CuPy) and ``EmulatedDevice`` (emulated.py,
which runs the same kernels on the CPU and watches them). Nobody else imports CuPy.

A copy without a stream is done when the call returns; a kernel without one goes to ``main``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.cpu.memory import round_up

# What kernels take: memory (None: the null pointer) and numbers that know their size. CuPy would
# pass a Python int as 8 bytes and a float as a double, whatever the kernel expects.
Argument: TypeAlias = "Buffer | np.int32 | np.float32 | None"


ALIGNMENT = 256  # bytes, of allocations and of what lies within them
_EXTRAS = "pip install 'edgellm[cuda13]', or 'edgellm[cuda12]' for a driver older than CUDA 13"


def aligned(n: int) -> int:
    return round_up(n, ALIGNMENT)


class DeviceError(RuntimeError):
    """A device refused or failed; its message says which and what to do."""

    exit_code = 3  # of a command that ends with it


class OutOfDeviceMemory(DeviceError):
    """Memory was asked for that the device does not have."""

    def __init__(self, name: str, n_bytes: int, n_free: int) -> None:
        super().__init__(f"{name} is out of memory: {n_bytes} bytes asked for, {n_free} free.")
        self.n_bytes, self.n_free = n_bytes, n_free


class OutOfHostMemory(DeviceError):
    """Pinned memory was asked for that the system does not give."""

    def __init__(self, name: str, n_bytes: int) -> None:
        super().__init__(
            f"The system gives no {n_bytes} bytes of its memory that {name} could copy from."
        )


class Memory(Protocol):
    """An allocation."""

    @property
    def address(self) -> int: ...


class Buffer:
    """A run of bytes in a device's memory; views of it share the allocation."""

    __slots__ = ("memory", "n_bytes", "offset")

    def __init__(self, memory: Memory, n_bytes: int, offset: int = 0) -> None:
        self.memory, self.n_bytes, self.offset = memory, n_bytes, offset

    @property
    def address(self) -> int:
        return self.memory.address + self.offset

    def at(self, offset: int, n_bytes: int | None = None) -> Buffer:
        """The bytes from ``offset`` on, ``n_bytes`` of them or all."""
        rest = self.n_bytes - offset
        n = rest if n_bytes is None else n_bytes
        if offset < 0 or n < 0 or n > rest:
            raise ValueError(f"{n} bytes from {offset} on leave a buffer of {self.n_bytes}")
        return Buffer(self.memory, n, self.offset + offset)

    def __array__(self, *args: Any, **options: Any) -> Any:
        raise TypeError("a buffer lies in device memory: read it with copy_from")


class Event(Protocol):
    """A point of a stream."""

    def synchronize(self) -> None: ...


class Stream(Protocol):
    """Work that is done in order, beside other streams."""

    def record(self) -> Event: ...
    def wait(self, event: Any) -> None:
        """What follows here starts after the event."""

    def synchronize(self) -> None: ...


class Graph(Protocol):
    """Captured launches, repeated as one. What changes between repetitions is in memory."""

    def launch(self, stream: Any) -> None: ...


class Kernel(Protocol):
    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Argument],
        shared: int = 0, stream: Any = None,
    ) -> None: ...  # fmt: skip


class Device(Protocol):
    """See the module. ``cc`` is the compute capability, (9, 0)."""

    kind: str  # "cuda" or "emulated"
    name: str
    cc: tuple[int, int]
    main: Any  # the stream of kernels that name none

    def alloc(self, n_bytes: int) -> Buffer:
        """Memory whose contents are undefined, aligned to 256 bytes. Raises OutOfDeviceMemory."""

    def free(self, buffer: Buffer) -> None:
        """Give the whole allocation back; no work that uses it may be left."""

    def memory(self) -> tuple[int, int]:
        """Bytes free and in all."""

    def pinned(self, n_bytes: int) -> NDArray[np.uint8]:
        """Host memory that copies read and write while the program goes on; given back with the
        last view of it. Raises OutOfHostMemory."""

    def copy_to(self, buffer: Buffer, array: NDArray[Any], stream: Any = None) -> None: ...
    def copy_from(self, buffer: Buffer, out: NDArray[Any], stream: Any = None) -> None: ...
    def copy(self, target: Buffer, source: Buffer, n_bytes: int, stream: Any = None) -> None: ...
    def copy_from_peer(
        self, target: Buffer, peer: Any, source: Buffer, n_bytes: int, stream: Any
    ) -> None:
        """From another device of this kind. ``stream`` is of this one, and waits for nothing of
        the other's by itself."""

    def stream(self) -> Stream: ...
    def kernel(self, name: str) -> Kernel:
        """A kernel by its name, "file/variant/function": see source.py."""

    def capture(self, stream: Any) -> AbstractContextManager[Graph]:
        """Record the launches on ``stream`` instead of doing them."""

    def synchronize(self) -> None:
        """Wait for all streams."""


def open_devices() -> tuple[list[Device], str]:
    """The GPUs of this machine and, when there is none to use, the reason in one sentence."""
    if find_spec("cupy") is None:
        return [], f"No GPU is used: CuPy is not installed ({_EXTRAS})."
    try:
        from edgellm.kernels.cuda import gpu
    except Exception as error:  # whatever its libraries raise when they do not fit together
        return [], f"No GPU is used: CuPy cannot be imported ({error}); again: {_EXTRAS}."
    return gpu.open_devices()
