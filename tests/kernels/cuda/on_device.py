"""Arrays to and from a device, and activations as it quantizes them, computed apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.cuda import operations, pack
from edgellm.kernels.cuda.device import Buffer, Device
from edgellm.kernels.cuda.operations import Matrix, Rows
from edgellm.quant import by_name

Floats = NDArray[np.float32]


def put(device: Device, array: Any, kind: type = np.float32) -> Buffer:
    values = np.ascontiguousarray(array, kind)
    buffer = device.alloc(values.nbytes)
    device.copy_to(buffer, values)
    return buffer


def rows(device: Device, n: int, limit: int | None = None) -> Rows:
    return Rows(limit or n, put(device, [n], np.int32))


def get(device: Device, buffer: Buffer, *shape: int, kind: type = np.float32) -> NDArray[Any]:
    out = np.empty(shape, kind)
    device.copy_from(buffer, out)
    return out


def floats(device: Device, *shape: int) -> Buffer:
    return device.alloc(4 * int(np.prod(shape)))


def matrix(
    device: Device, kind: str, packed_rows: Sequence[NDArray[np.uint8]], n_in: int,
    precise: bool = False,
) -> Matrix:  # fmt: skip
    """Matrices [n][n_out, row bytes] of a file on the device."""
    of = by_name(kind)
    data = np.concatenate([pack.pack(of, rows) for rows in packed_rows])
    n_out = len(packed_rows[0])
    assert len(data) == len(packed_rows) * pack.packed_bytes(of, n_in, n_out)
    return Matrix(of, n_in, n_out, put(device, data, np.uint8), len(packed_rows), precise)


def as_taken(device: Device, weights: Matrix, x: Floats, n: Rows) -> tuple[Buffer, Floats]:
    """x [n_rows, dim] as a matrix takes it, and what its numbers are then."""
    if not weights.is_quantized:
        return put(device, x), x
    dim = x.shape[1]
    row = weights.row_bytes(dim // weights.n_in)
    out = device.alloc(n.limit * row)
    operations.quantize(device, put(device, x), out, n, dim, weights.precise)
    return out, quantized(x, 2 if weights.precise else 1)


def quantized(x: Floats, n_copies: int = 1) -> Floats:
    """What is left of x in 8 bits (15 in two copies): scale = largest of 32 / 127."""
    groups, total = x.reshape(len(x), -1, 32), np.zeros(0)
    rest, total = groups.astype(np.float32), np.zeros(groups.shape, np.float64)
    for _ in range(n_copies):
        scale = np.abs(rest).max(-1, keepdims=True) / np.float32(127)
        codes = np.rint(rest * np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0))
        total += scale.astype(np.float64) * codes
        rest = (rest - scale * codes).astype(np.float32)
    return total.reshape(x.shape)
