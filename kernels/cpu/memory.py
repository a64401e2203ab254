"""Memory for weights, caches and activations: anonymous, page-aligned, in huge pages if asked."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

_HUGE_PAGE = 2 << 20
# Linux gives huge pages to private memory only; Python's default is shared. Windows has one kind
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


def allocate(n_bytes: int, huge: bool = False) -> NDArray[np.uint8]:
    """Zeroed bytes, 64-byte aligned; pages cost nothing until they are touched. Freed with the
    array and all its views. ``huge`` pages spare address translation on long streams."""
    size = max(1, n_bytes) + (_HUGE_PAGE if huge else 0)
    area = mmap.mmap(-1, size, **_PRIVATE)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            area.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel built without them
            pass
    data = np.frombuffer(area, np.uint8)
    start = -data.ctypes.data % _HUGE_PAGE if huge else 0
    return data[start : start + n_bytes]


def round_up(n: int, to: int) -> int:
    return -(-n // to) * to
