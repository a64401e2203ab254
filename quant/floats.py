"""F32, F16 and BF16: one element a block, no codes."""

import numpy as np
from numpy.typing import NDArray

from edgellm.quant.block import QuantType
from edgellm.quant.lanes import Lanes


class Float(QuantType):
    block = 1
    chunk = 1


class F32(Float):
    name, id, bytes = "f32", 0, 4

    def dequantize(self, data: NDArray[np.uint8]) -> NDArray[np.float32]:
        rows, n = self._split(data)
        return rows.view("<f4").astype(np.float32, copy=False).reshape(*data.shape[:-1], n)

    def encode(self, o: Lanes) -> None:
        o.put(0, o.bits(o.x(0)), 4)


class F16(Float):
    name, id, bytes = "f16", 1, 2

    def dequantize(self, data: NDArray[np.uint8]) -> NDArray[np.float32]:
        rows, n = self._split(data)
        return rows.view("<f2").astype(np.float32).reshape(*data.shape[:-1], n)

    def encode(self, o: Lanes) -> None:
        o.put(0, o.half(o.x(0)), 2)


class BF16(Float):
    """The upper half of a float32."""

    name, id, bytes = "bf16", 30, 2
    largest = 3.3895313892515355e38

    def dequantize(self, data: NDArray[np.uint8]) -> NDArray[np.float32]:
        rows, n = self._split(data)
        wide = rows.view("<u2").astype(np.uint32) << 16
        return wide.view(np.float32).reshape(*data.shape[:-1], n)

    def encode(self, o: Lanes) -> None:
        bits = o.bits(o.x(0))
        odd = (bits >> 16) & 1
        o.put(0, (bits + (odd + 0x7FFF)) >> 16, 2)  # ties to even
