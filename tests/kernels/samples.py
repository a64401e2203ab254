"""Random weights for kernel tests, and how far results may be off."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.quant import by_name


def nmse(x: NDArray[np.float32], y: NDArray[np.float32]) -> float:
    difference = x.astype(np.float64) - y
    return float((difference**2).sum() / (y.astype(np.float64) ** 2).sum())


def random_rows(name: str, n_rows: int, n: int, seed: int) -> NDArray[np.uint8]:
    """Rows of blocks with random codes and scales of sane size."""
    kind, rng = by_name(name), np.random.default_rng(seed)
    if kind.block == 1:
        values = rng.standard_normal((n_rows, n)).astype(np.float32)
        if name == "bf16":  # the upper halves
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return kind.quantize(values)
    blocks = rng.integers(0, 256, (n_rows, n // kind.block, kind.bytes), dtype=np.uint8)
    blocks[:2] = [[[255]], [[0]]][:n_rows]  # extreme codes: sums must not leave their bits
    scales = {"q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}
    with_minimum = {"q4_1": (0, 2), "q5_1": (0, 2)}
    scales |= {"tq1_0": (52,), "tq2_0": (64,), "mxfp4": (), "iq1_m": ()}
    for at in scales.get(name, with_minimum.get(name, (0,))):
        d = rng.uniform(-0.02, 0.02, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, at : at + 2] = d.view(np.uint8).reshape(*blocks.shape[:2], 2)
    if name == "iq1_m":  # a half of about 0.01 in the high nibbles
        for i, nibble in enumerate((0, 2, 1, 2)):
            blocks[:, :, 49 + 2 * i] = blocks[:, :, 49 + 2 * i] & 15 | nibble << 4
    if name == "mxfp4":
        blocks[:, :, 0] = rng.integers(115, 125, blocks.shape[:2])
    return blocks.reshape(n_rows, -1)
