"""Weights of a device: how many bytes they take, and from the file into its memory.

All lie in one allocation. A matrix goes through a bounce buffer in pieces of rows, which threads
take apart into planes while others are on their way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.cuda import pack
from edgellm.kernels.cuda.device import Buffer, Device, aligned
from edgellm.kernels.cuda.operations import Matrix
from edgellm.kernels.graph import MATRIX_OPS, Op, Weight
from edgellm.kernels.rope import RopeTable

if TYPE_CHECKING:
    from edgellm.kernels.cuda.staging import Staging

ReadInto = Callable[[Weight, int, NDArray[np.uint8]], None]  # (weight, first byte, where to)
Progress = Callable[[int, int], None]
_PIECE_BYTES = 16 << 20
_HOST_ONLY = ("factors", "long_factors")  # go into frequencies
_Piece = tuple[Weight, int, int, int]  # matrix, which of several, first row, rows


def n_matrices(weight: Weight) -> int:
    """Experts or heads."""
    return weight.shape[2] if len(weight.shape) > 2 else 1


def matrix_bytes(weight: Weight) -> int:
    """ValueError for a type or shape that there are no kernels for."""
    one = pack.packed_bytes(weight.type, weight.n_in, weight.n_out)
    return n_matrices(weight) * one


def vector_bytes(weight: Weight) -> int:
    n = math.prod(weight.shape)
    return aligned(4 * n)


def matrices_of(ops: Iterable[Op]) -> dict[str, Weight]:
    return {w.name: w for op in ops if op.kind in MATRIX_OPS for w in [op.weights["weight"]]}


def vectors_of(ops: Iterable[Op]) -> dict[str, Weight]:
    return {
        weight.name: weight
        for op in ops
        for key, weight in op.weights.items()
        if key not in _HOST_ONLY and not (key == "weight" and op.kind in MATRIX_OPS)
    }


class DeviceWeights:
    """The matrices, vectors and rotation frequencies of ops in device memory. Those matrices that
    ``staging`` has are filled into the host's memory, and come and go."""

    def __init__(
        self, device: Device, ops: list[Op], read_into: ReadInto, n_ctx: int, staging: Staging
    ) -> None:
        """Takes the memory; ``fill`` reads the file. OutOfDeviceMemory."""
        self._device, self._read_into, self._n_ctx = device, read_into, n_ctx
        self._matrices, self._vectors = matrices_of(ops), vectors_of(ops)
        self._ropes = dict.fromkeys(op.attrs["rope"] for op in ops if op.kind == "rope")
        self._staging = staging
        sizes = {
            w.name: matrix_bytes(w) for w in self._matrices.values() if w.name not in staging.at
        }
        sizes |= {w.name: vector_bytes(w) for w in self._vectors.values()}
        sizes |= {rope: aligned(4 * rope.dim) for rope in self._ropes}
        self.n_bytes = sum(sizes.values())
        self.memory = device.alloc(self.n_bytes)
        self._at, at = dict[object, Buffer](), 0
        self._at.update(staging.at)
        for key, size in sizes.items():
            self._at[key] = self.memory.at(at, size)
            at += size

    def vector(self, weight: Weight | None) -> Buffer | None:
        return None if weight is None else self._at[weight.name]

    def frequencies(self, rope: object) -> Buffer:
        return self._at[rope]

    def matrix(self, weight: Weight, n: int | None = None) -> Matrix:
        return Matrix(
            weight.type, weight.n_in, weight.n_out, self._at[weight.name],
            n_matrices(weight) if n is None else n, weight.precise,
        )  # fmt: skip

    # ---- loading --------------------------------------------------------------------------------

    def fill(self, n_threads: int, progress: Progress | None = None) -> None:
        for weight in self._vectors.values():
            self._device.copy_to(self._at[weight.name], self._load(weight).reshape(-1))
        for rope in self._ropes:
            inverse = RopeTable(rope, self._load, self._n_ctx).inverse
            self._device.copy_to(self._at[rope], inverse)
        pieces = [piece for w in self._matrices.values() for piece in _pieces(w)]
        total = sum(n * w.type.row_bytes(w.n_in) for w, _, _, n in pieces)
        done, bounce = 0, self._device.pinned(2 * _PIECE_BYTES)
        with ThreadPoolExecutor(n_threads) as pool:
            for start in range(0, len(pieces), 2 * n_threads):  # few are packed ahead
                some = pieces[start : start + 2 * n_threads]
                for piece, packed in zip(some, pool.map(self._packed, some), strict=True):
                    self._put(piece, packed, bounce)
                    weight, _, _, n = piece
                    done += n * weight.type.row_bytes(weight.n_in)
                    if progress is not None:
                        progress(done, total)
        self._staging.start()

    def _load(self, weight: Weight) -> NDArray[np.float32]:
        """A small tensor as float32, in numpy's order."""
        n_rows = math.prod(weight.shape[1:])
        raw = np.empty((n_rows, weight.type.row_bytes(weight.n_in)), np.uint8)
        self._read_into(weight, 0, raw.reshape(-1))
        return weight.type.dequantize(raw).reshape(weight.shape[::-1])

    def _packed(self, piece: _Piece) -> NDArray[np.uint8]:
        weight, i, first, n = piece
        row_bytes = weight.type.row_bytes(weight.n_in)
        raw = np.empty((n, row_bytes), np.uint8)
        self._read_into(weight, (i * weight.n_out + first) * row_bytes, raw.reshape(-1))
        return pack.pack(weight.type, raw)

    def _put(self, piece: _Piece, packed: NDArray[np.uint8], bounce: NDArray[np.uint8]) -> None:
        """A piece has planes of its own, whose rows go into the planes of the matrix."""
        weight, i, first, n = piece
        whole = pack.plane_sizes(weight.type, weight.n_in, weight.n_out)
        matrix, host = self._at[weight.name], self._staging.host.get(weight.name)
        to, source = i * pack.packed_bytes(weight.type, weight.n_in, weight.n_out), 0
        for size in whole:
            row = size // weight.n_out
            for at in range(0, n * row, len(bounce)):
                part = packed[source + at : source + min(at + len(bounce), n * row)]
                target = to + first * row + at
                if host is not None:
                    host[target : target + len(part)] = part
                    continue
                bounce[: len(part)] = part
                self._device.copy_to(matrix.at(target), bounce[: len(part)])
            to, source = to + aligned(size), source + aligned(n * row)


def _pieces(weight: Weight) -> Iterator[_Piece]:
    step = max(1, _PIECE_BYTES // weight.type.row_bytes(weight.n_in))
    for i in range(n_matrices(weight)):
        for first in range(0, weight.n_out, step):
            yield weight, i, first, min(step, weight.n_out - first)
