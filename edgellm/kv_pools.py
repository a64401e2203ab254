"""The keys or values of one layer, block by block, where the layer runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from edgellm.kernels.cuda.device import Buffer, Device


class Pool(Protocol):
    """``block_bytes`` is the size of one of its blocks."""

    block_bytes: int

    def copy(self, source: int, target: int) -> None: ...
    def read(self, block: int) -> bytes: ...
    def write(self, block: int, data: bytes) -> None: ...


class HostPool:
    def __init__(self, data: NDArray[np.uint8], block_bytes: int) -> None:
        """``data`` is whole blocks, and may have bytes behind them."""
        self.block_bytes = block_bytes
        self._blocks = data[: len(data) // block_bytes * block_bytes].reshape(-1, block_bytes)

    def copy(self, source: int, target: int) -> None:
        self._blocks[target] = self._blocks[source]

    def read(self, block: int) -> bytes:
        data: bytes = self._blocks[block].tobytes()
        return data

    def write(self, block: int, data: bytes) -> None:
        self._blocks[block] = np.frombuffer(data, np.uint8)


class DevicePool:
    """Copies wait for nothing but each other: between steps a device is at rest."""

    def __init__(self, device: Device, buffer: Buffer, block_bytes: int) -> None:
        self.block_bytes, self._device, self._buffer = block_bytes, device, buffer

    def _at(self, block: int) -> Buffer:
        return self._buffer.at(block * self.block_bytes, self.block_bytes)

    def copy(self, source: int, target: int) -> None:
        self._device.copy(self._at(target), self._at(source), self.block_bytes)

    def read(self, block: int) -> bytes:
        out = np.empty(self.block_bytes, np.uint8)
        self._device.copy_from(self._at(block), out)
        return out.tobytes()

    def write(self, block: int, data: bytes) -> None:
        self._device.copy_to(self._at(block), np.frombuffer(data, np.uint8))
