"""Launches of argmax and top-k: sample.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgellm.kernels.cuda.device import Buffer, Device
from edgellm.kernels.cuda.operations import Rows

SLICE = 2048  # numbers that are sorted at a time
MOST = 1024  # of top_k


def argmax(device: Device, x: Buffer, out: Buffer, rows: Rows, n: int, stream: Any = None) -> None:
    """The place of the largest of each row's n numbers, int32 [n_rows]; ties to the lower, NaN is
    less than anything."""
    args = (x, out, rows.count, np.int32(n))
    device.kernel("sample/argmax")((rows.limit,), (1024,), args, 0, stream)


def top_k_bytes(n_rows: int, n: int, k: int) -> int:
    """Bytes of scratch that top_k needs."""
    return 2 * 8 * n_rows * _n_keys(n, k)


def top_k(
    device: Device, x: Buffer, numbers: Buffer, values: Buffer, scratch: Buffer, rows: Rows,
    n: int, k: int, stream: Any = None,
) -> None:  # fmt: skip
    """The k largest of each row's n numbers, largest first: their places int32 [n_rows, k] and
    values. ValueError unless 1 <= k <= 1024 and k <= n."""
    if not 1 <= k <= min(n, MOST):
        raise ValueError(f"top_k finds 1 to {min(n, MOST)} of {n} numbers, not {k}")
    size = 8 * rows.limit * _n_keys(n, k)
    halves = scratch.at(0, size), scratch.at(size, size)
    source, left, kernel = x, n, "sample/top_of_numbers"
    for turn in range(64):
        n_slices, target = -(-left // SLICE), halves[turn % 2]
        args = (source, target, rows.count, np.int32(left), np.int32(k))
        device.kernel(kernel)((n_slices, rows.limit), (256,), args, 0, stream)
        source, left, kernel = target, n_slices * k, "sample/top_of_keys"
        if n_slices == 1:
            break
    found = (source, x, numbers, values, rows.count, np.int32(n), np.int32(k))
    device.kernel("sample/chosen")((-(-k // 256), rows.limit), (256,), found, 0, stream)


def _n_keys(n: int, k: int) -> int:
    """Keys of a row that the first turn leaves, more than any later."""
    return -(-n // SLICE) * k
