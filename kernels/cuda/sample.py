"""The best of each row of logits, so that whole rows can stay on the device: launches of sample.cu
and what they leave, as the host reads it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.cuda.device import Buffer, Device
from edgellm.kernels.cuda.operations import Rows

MOST = 64  # logits of a row
_SLICE = 2048  # keys in a block's shared memory
_STRIPS = _SLICE // MOST - 1  # of a row: the second launch takes the best of all at once
_KEY = 8  # bytes: a logit and its place


def width_of(k: int) -> int:
    """How many are found where k are wanted: one or MOST, so that few graphs are captured."""
    return 1 if k == 1 else MOST


def key_bytes(n_rows: int, width: int = MOST) -> int:
    """Of the best of so many rows."""
    return _KEY * width * n_rows


def strip_bytes(n_rows: int) -> int:
    """Of memory that ``best`` needs between its launches."""
    return _STRIPS * key_bytes(n_rows)


def best(
    device: Device, logits: Buffer, strips: Buffer, out: Buffer, rows: Rows, n: int, width: int,
    stream: Any = None,
) -> None:  # fmt: skip
    """The ``width`` (a power of two, MOST at most) largest of each row's n logits as keys, uint64
    [n_rows, width], best first: see ``decoded``. Where n is less, the last are 0."""
    kernel = device.kernel("sample/best")
    strip = -(-n // _STRIPS)
    n_strips = -(-n // strip)
    length = np.int32(width)
    kernel(
        (n_strips, rows.limit), (256,),
        (logits, None, strips, rows.count, np.int32(n), np.int32(strip), length), 0, stream,
    )  # fmt: skip
    n_keys = np.int32(n_strips * width)
    kernel(
        (1, rows.limit), (256,), (None, strips, out, rows.count, n_keys, n_keys, length), 0, stream
    )


def decoded(keys: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Places in the row and logits: the same bits, but that -0 is 0 and a NaN is any."""
    places = (~keys & np.uint64(0xFFFFFFFF)).astype(np.int64)
    ordered = (keys >> np.uint64(32)).astype(np.uint32)
    sign = np.uint32(1 << 31)
    return places, np.where(ordered & sign, ordered ^ sign, ~ordered).view(np.float32)
