"""Rotation tables shared by all back ends: cosines and sines by position."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.graph import Rope

_STEP = 256  # positions computed at a time


class RopeTable:
    """Rows [2 * dim] by position: factors of x, then factors of x's partner in its pair.

    The rotated x is x * row[:dim] + partner(x) * row[dim:], where partner swaps the halves (neox)
    or neighbours (norm); the sign of the sine is in the table. Rows are computed as positions
    are reached, always in the same runs of 256, so a row does not depend on who asked first.
    """

    def __init__(self, rope: Rope, factors: NDArray[np.float32] | None, n_ctx: int) -> None:
        self.rope = rope
        exponent = np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim
        self._inverse = rope.freq_scale * rope.base**-exponent
        if factors is not None:
            self._inverse = self._inverse / factors.astype(np.float64)
        n_rows = -(-n_ctx // _STEP) * _STEP
        self.rows: NDArray[np.float32] = np.empty((n_rows, 2 * rope.dim), np.float32)
        self._filled = 0

    def fill(self, n_positions: int) -> None:
        """Make rows 0..n_positions-1 valid."""
        while self._filled < n_positions:
            positions = np.arange(self._filled, self._filled + _STEP, dtype=np.float64)
            angle = positions[:, None] * self._inverse
            cos, sin = np.cos(angle), np.sin(angle)
            rows = self.rows[self._filled : self._filled + _STEP]
            if self.rope.layout == "neox":
                rows[:] = np.concatenate([cos, cos, -sin, sin], axis=1)
            else:
                rows[:, : self.rope.dim] = np.repeat(cos, 2, axis=1)
                rows[:, self.rope.dim :] = np.stack([-sin, sin], axis=2).reshape(_STEP, -1)
            self._filled += _STEP
