"""Q4_0: 32 elements, one scale.

bytes 0-1 scale d (f16) | 2-17 nibbles: byte i holds element i low, element i + 16 high
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from edgellm.quant.block import Block, QuantType, Value, inverse


class Q4_0(QuantType):
    name, id, block, bytes, bias, chunk = "q4_0", 2, 32, 18, 8, 16

    def codes(self, b: Block) -> Iterator[Value]:
        packed = b.u8(2, 16)
        yield packed & 15
        yield packed >> 4

    def scales(self, b: Block) -> Iterator[tuple[Value, Value | None]]:
        d = b.f16(0)
        yield d, None
        yield d, None

    def encode(self, rows: NDArray[np.float32]) -> NDArray[np.uint8]:
        # -8 is the code of the largest element, the first of them; the sum is rounded once
        largest = np.take_along_axis(rows, np.abs(rows).argmax(axis=1)[:, None], axis=1)
        d = largest / np.float32(-8)
        shifted = rows.astype(np.float64) * inverse(d) + 8.5
        codes = np.clip(np.trunc(shifted.astype(np.float32)), 0, 15).astype(np.uint8)
        packed = codes[:, :16] | codes[:, 16:] << 4
        return np.concatenate([d.astype("<f2").view(np.uint8), packed], axis=1)
