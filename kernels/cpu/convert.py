"""Rows of weights from one number format to another, by compiled kernels on several threads.

A thread takes some whole rows at a time, decodes them into memory of its own that stays in its
cache, and encodes them from there: no float32 copy of a tensor exists.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.cpu import targets
from edgellm.kernels.cpu.decode import make_decode
from edgellm.kernels.cpu.encode import make_encode
from edgellm.kernels.cpu.store import EmitKernel, KernelStore
from edgellm.quant.block import QuantType, check_encodable

_KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
_PIECE = 1 << 19  # elements that a thread takes at a time: 2 MB of float32; each costs Python 20 us

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Kernel = Callable[[int, int, int, int], None]


class Converter:
    """Converts on ``n_threads``; a context manager, or call ``close``. Kernels are compiled when
    they are first needed."""

    def __init__(self, n_threads: int, store: KernelStore | None = None) -> None:
        self._pool = ThreadPoolExecutor(n_threads, "edgellm-convert")
        self._store = KernelStore() if store is None else store
        self._lanes = targets.current().lanes
        self._own = threading.local()

    def close(self) -> None:
        self._pool.shutdown()

    def __enter__(self) -> Converter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self.close()

    def convert(
        self, data: Bytes, source: QuantType, target: QuantType,
        importance: Floats | None = None, out: Bytes | None = None,
    ) -> Bytes:  # fmt: skip
        """uint8 [n_rows, row bytes of source] -> [n_rows, row bytes of target], the bits of
        ``target.quantize(source.dequantize(data), importance)``, in ``out`` if given.

        Rows of the same type are copied. ValueError for shapes that do not fit, TypeError for a
        type without encoder, UnencodableError for numbers that the type cannot hold.
        """
        if data.ndim != 2 or data.shape[1] % source.bytes:
            raise ValueError(f"{source}: {data.shape} bytes are no rows of whole blocks")
        n_rows, n = len(data), data.shape[1] // source.bytes * source.block
        shape = (n_rows, target.row_bytes(n))
        if importance is not None and importance.shape != (n,):
            raise ValueError(f"{target}: {importance.size} weights of importance for {n} columns")
        if out is None:
            out = np.empty(shape, np.uint8)
        elif out.shape != shape or out.dtype != np.uint8 or not out.flags.c_contiguous:
            raise ValueError(f"{target}: rows of {shape} bytes do not fit into {out.shape}")
        if source is target:
            out[:] = data
            return out
        data, to = np.ascontiguousarray(data), out
        weights = None
        if importance is not None and target.block > 1:
            weights = np.ascontiguousarray(importance, np.float32)
        decode = self._kernel(f"decode_{source.name}", make_decode(source))
        name = f"encode_{target.name}" + ("" if weights is None else "_weighted")
        encode = self._kernel(name, make_encode(target, weights is not None))

        def convert_rows(first: int, end: int) -> None:
            rows = self._decode(decode, source, data[first:end])
            check_encodable(target, rows.reshape(-1, n), first)
            self._encode(encode, target, rows, weights, to[first:end])

        n_pieces = max(1, min(n_rows, round(n_rows * n / _PIECE)))
        cuts = [n_rows * i // n_pieces for i in range(n_pieces + 1)]
        for _ in self._pool.map(convert_rows, cuts[:-1], cuts[1:]):
            pass
        return out

    def _kernel(self, name: str, emit: EmitKernel) -> Kernel:
        return _KERNEL(self._store.get(name, emit))

    def _decode(self, kernel: Kernel, source: QuantType, data: Bytes) -> Floats:
        """float32 [elements], the thread's own until its next call."""
        if source.name == "f32" and data.ctypes.data % 4 == 0:
            return data.reshape(-1).view(np.float32)
        n_blocks = data.size // source.bytes
        if n_blocks < self._lanes:
            return source.dequantize(data).reshape(-1)
        size = n_blocks * source.block
        floats: Floats | None = getattr(self._own, "floats", None)
        if floats is None or len(floats) < size:
            floats = self._own.floats = np.empty(size, np.float32)
        args = np.array([data.ctypes.data, floats.ctypes.data, n_blocks], np.int64)
        n_steps = -(-n_blocks // self._lanes) if source.block == 1 else n_blocks
        kernel(args.ctypes.data, 0, n_steps, 0)
        return floats[:size]

    def _encode(
        self, kernel: Kernel, target: QuantType, rows: Floats, weights: Floats | None, out: Bytes
    ) -> None:
        n_blocks, n_lanes = rows.size // target.block, self._lanes
        if n_blocks == 0:
            return
        if n_blocks < n_lanes:  # a kernel fills all lanes: with zeros
            padded = np.zeros(n_lanes * target.block, np.float32)
            padded[: rows.size] = rows
            wide = np.empty(n_lanes * target.bytes, np.uint8)
            self._encode(kernel, target, padded, weights, wide)
            out.reshape(-1)[:] = wide[: out.size]
            return
        importance, per_row = 0, 1
        if weights is not None:
            importance, per_row = weights.ctypes.data, weights.size // target.block
        args = np.array(
            [rows.ctypes.data, out.ctypes.data, n_blocks, importance, per_row], np.int64
        )
        kernel(args.ctypes.data, 0, -(-n_blocks // n_lanes), 0)
