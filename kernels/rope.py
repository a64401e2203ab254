"""Rotation tables shared by all back ends: cosines and sines by position."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.graph import Rope, Weight, Yarn

_STEP = 256  # positions computed at a time


class RopeTable:
    """Rows [2 * dim] by position: factors of x, then factors of x's partner in its pair.

    The rotated x is x * row[:dim] + partner(x) * row[dim:], where partner swaps the halves (neox)
    or neighbours (norm); the sign of the sine is in the table. Rows are computed as positions
    are reached, always in the same runs of 256, so a row does not depend on who asked first.
    """

    def __init__(self, rope: Rope, load: Callable[[Weight], NDArray[np.float32]], n_ctx: int):
        """``n_ctx`` is what the context may grow to: it decides between short and long factors."""
        self.rope = rope
        factors = rope.factors
        if rope.long_factors is not None and n_ctx > rope.n_ctx_short:
            factors = rope.long_factors
        self.inverse = frequencies(rope, None if factors is None else load(factors))
        n_rows = -(-n_ctx // _STEP) * _STEP
        self.rows: NDArray[np.float32] = np.empty((n_rows, 2 * rope.dim), np.float32)
        self._filled = 0

    def fill(self, n_positions: int) -> None:
        """Make rows 0..n_positions-1 valid."""
        while self._filled < n_positions:
            positions = np.arange(self._filled, self._filled + _STEP, dtype=np.float64)
            angle = positions[:, None] * self.inverse
            cos, sin = np.cos(angle) * self.rope.magnitude, np.sin(angle) * self.rope.magnitude
            rows = self.rows[self._filled : self._filled + _STEP]
            if self.rope.layout == "neox":
                rows[:] = np.concatenate([cos, cos, -sin, sin], axis=1)
            else:
                rows[:, : self.rope.dim] = np.repeat(cos, 2, axis=1)
                rows[:, self.rope.dim :] = np.stack([-sin, sin], axis=2).reshape(_STEP, -1)
            self._filled += _STEP


def frequencies(rope: Rope, factors: NDArray[np.float32] | None) -> NDArray[np.float64]:
    """Radians per position of each pair [dim / 2]."""
    exponent = np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim
    fast: NDArray[np.float64] = rope.base**-exponent
    if factors is not None:
        fast = fast / factors.astype(np.float64)
    slow = rope.freq_scale * fast
    if rope.yarn is None:
        return slow
    keep = _yarn_ramp(rope, rope.yarn) * rope.yarn.ext_factor
    mixed: NDArray[np.float64] = slow * (1 - keep) + fast * keep
    return mixed


def _yarn_ramp(rope: Rope, yarn: Yarn) -> NDArray[np.float64]:
    """1 for the pairs that keep their frequency, 0 for those that are interpolated."""

    def pair_that_turns(times: float) -> float:
        turns = yarn.n_ctx / (times * 2 * math.pi)
        return rope.dim * math.log(turns) / (2 * math.log(rope.base))

    low = max(0, math.floor(pair_that_turns(yarn.beta_fast)))
    high = min(rope.dim - 1, math.ceil(pair_that_turns(yarn.beta_slow)))
    pairs = np.arange(rope.dim // 2)
    ramp: NDArray[np.float64] = 1 - np.clip((pairs - low) / max(0.001, high - low), 0, 1)
    return ramp
