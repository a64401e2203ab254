"""Q8_0: 32 signed bytes, one scale.

bytes 0-1 scale d (f16) | 2-33 signed codes
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from edgellm.quant.block import Block, QuantType, Value, inverse


class Q8_0(QuantType):
    name, id, block, bytes, bias, chunk = "q8_0", 8, 32, 34, 128, 32

    def codes(self, b: Block) -> Iterator[Value]:
        yield b.u8(2, 32) ^ 0x80  # signed to biased: every type's codes are unsigned

    def scales(self, b: Block) -> Iterator[tuple[Value, Value | None]]:
        yield b.f16(0), None

    def encode(self, rows: NDArray[np.float32]) -> NDArray[np.uint8]:
        d = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
        scaled = rows * inverse(d)
        size = np.abs(scaled)
        whole = np.floor(size)
        rounded = whole + (size - whole >= 0.5)  # halves away from zero
        codes = np.clip(np.copysign(rounded, scaled), -127, 127).astype(np.int8)
        return np.concatenate([d.astype("<f2").view(np.uint8), codes.view(np.uint8)], axis=1)
