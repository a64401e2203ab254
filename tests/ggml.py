"""ggml's encoders, called in the library of llama-cpp-python (a development tool only)."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.quant import QuantType


@cache
def _library() -> Any:
    import llama_cpp

    folder = Path(llama_cpp.__file__).parent / "lib"
    found = next(folder.glob("*ggml-base.*"))  # libggml-base.so, ggml-base.dll, ...
    encode = ctypes.CDLL(str(found)).ggml_quantize_chunk
    encode.restype = ctypes.c_size_t
    # type, source, target, first element, rows, elements of a row, importance
    encode.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    return encode


def quantize(
    kind: QuantType, rows: NDArray[np.float32], importance: NDArray[np.float32] | None = None
) -> NDArray[np.uint8]:
    """Contiguous float32 [n_rows, n] -> uint8 [n_rows, row bytes], on one thread."""
    n_rows, n = rows.shape
    out = np.zeros((n_rows, kind.row_bytes(n)), np.uint8)
    weights = None if importance is None else importance.ctypes.data
    _library()(kind.id, rows.ctypes.data, out.ctypes.data, 0, n_rows, n, weights)
    return out
