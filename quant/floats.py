"""F32, F16 and BF16: one element a block, no codes."""

import numpy as np
from numpy.typing import NDArray

from edgellm.quant.block import QuantType


class Float(QuantType):
    block = 1
    chunk = 1


class F32(Float):
    name, id, bytes = "f32", 0, 4

    def dequantize(self, data: NDArray[np.uint8]) -> NDArray[np.float32]:
        rows, n = self._split(data)
        return rows.view("<f4").astype(np.float32, copy=False).reshape(*data.shape[:-1], n)

    def encode(self, rows: NDArray[np.float32]) -> NDArray[np.uint8]:
        return rows.astype("<f4").view(np.uint8)


class F16(Float):
    name, id, bytes = "f16", 1, 2

    def dequantize(self, data: NDArray[np.uint8]) -> NDArray[np.float32]:
        rows, n = self._split(data)
        return rows.view("<f2").astype(np.float32).reshape(*data.shape[:-1], n)

    def encode(self, rows: NDArray[np.float32]) -> NDArray[np.uint8]:
        return rows.astype("<f2").view(np.uint8)


class BF16(Float):
    """The upper half of a float32."""

    name, id, bytes = "bf16", 30, 2

    def dequantize(self, data: NDArray[np.uint8]) -> NDArray[np.float32]:
        rows, n = self._split(data)
        wide = rows.view("<u2").astype(np.uint32) << 16
        return wide.view(np.float32).reshape(*data.shape[:-1], n)

    def encode(self, rows: NDArray[np.float32]) -> NDArray[np.uint8]:
        bits = rows.astype("<f4").view(np.uint32)
        rounded = bits + (0x7FFF + (bits >> 16 & 1))  # halves to even
        kept = np.where(np.isnan(rows), bits | 0x400000, rounded)  # a NaN stays one
        return (kept >> 16).astype("<u2").view(np.uint8)
