"""Weights from the file into packed memory: read through bounce buffers, repacked in parallel.

No second copy stays resident, and the file is not needed afterwards but for embedding rows.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.cpu import linear
from edgellm.kernels.cpu.activations import PLAIN, Activation
from edgellm.kernels.cpu.layouts import LAYOUTS
from edgellm.kernels.cpu.memory import allocate, round_up
from edgellm.kernels.cpu.store import KernelStore
from edgellm.kernels.cpu.targets import Target
from edgellm.kernels.graph import Weight
from edgellm.quant.block import QuantType

ReadInto = Callable[[Weight, int, NDArray[np.uint8]], None]  # (weight, first byte, where to)
_KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
_PIECE_BYTES = 4 << 20
_READERS = 2  # threads beside one a core, so that the disk has work while others repack


@dataclass(frozen=True)
class LinearKernel:
    """How matrices of one number format are kept and multiplied on this target."""

    type: QuantType
    name: str
    tile: linear.Tile
    activation: Activation
    is_packed: bool  # a layout of its own; else decode-then-dot on the file's rows

    def n_groups(self, weight: Weight, lanes: int) -> int:
        return -(-weight.n_out // lanes)

    def group_bytes(self, weight: Weight, lanes: int) -> int:
        return weight.n_in // self.tile.block * self.tile.block_bytes(lanes)

    def matrix_bytes(self, weight: Weight, lanes: int) -> int:
        """Of one matrix (one expert's, for stacked tensors)."""
        return self.n_groups(weight, lanes) * self.group_bytes(weight, lanes)


def linear_kernel(quant_type: QuantType, target: Target, precise: bool = False) -> LinearKernel:
    """The kernel for weights of a type; ``precise`` ones read activations of 14 bits."""
    if quant_type.name in LAYOUTS:
        layout = LAYOUTS[quant_type.name]
        form = layout.form.precise() if precise else layout.form
        tile = linear.PackedTile(layout, form, target)
        name = f"linear_{quant_type.name}_{form.name}"
        return LinearKernel(quant_type, name, tile, form, True)
    name = f"linear_{quant_type.name}_f32"
    if quant_type.block == 1:
        return LinearKernel(quant_type, name, linear.FloatTile(quant_type, target), PLAIN, True)
    return decode_kernel(quant_type, target)


def decode_kernel(quant_type: QuantType, target: Target) -> LinearKernel:
    """Decode-then-dot, which runs every type by its own decode."""
    tile = linear.DecodeTile(quant_type, target)
    return LinearKernel(quant_type, f"linear_{quant_type.name}_decoded", tile, PLAIN, False)


class PackedWeights:
    """All matrices of a model in one allocation; ``address`` of each by name."""

    def __init__(
        self, weights: list[Weight], read_into: ReadInto, store: KernelStore, target: Target,
        n_threads: int, progress: Callable[[int, int], None] | None = None,
    ) -> None:  # fmt: skip
        self._read_into, self._lanes = read_into, target.lanes
        self._kernels = {w.type.id: linear_kernel(w.type, target) for w in weights}
        self._pack = {i: self._pack_kernel(k, store) for i, k in self._kernels.items()}
        offsets, size = {}, 0
        for w in weights:
            offsets[w.name] = size
            n_matrices = w.shape[2] if len(w.shape) > 2 else 1
            size += round_up(
                n_matrices * self._kernels[w.type.id].matrix_bytes(w, self._lanes), 4096
            )
        # the widest prefetch reaches past the last matrix; hints never fault
        self.data = allocate(size, huge=True)
        self.n_bytes = size
        self._addresses = {name: self.data.ctypes.data + at for name, at in offsets.items()}
        self._bounce = threading.local()
        self._fill(weights, n_threads, progress)

    def fill_again(self, weight: Weight, n_threads: int) -> None:
        """Read one matrix again, which has changed."""
        self._fill([weight], n_threads, None)

    def address(self, weight: Weight) -> int:
        return self._addresses[weight.name]

    def _pack_kernel(
        self, kernel: LinearKernel, store: KernelStore
    ) -> Callable[[int, int, int, int], None] | None:
        if not kernel.is_packed:
            return None
        emit = (
            linear.make_pack_float(kernel.type)
            if kernel.type.block == 1
            else linear.make_pack(LAYOUTS[kernel.type.name])
        )
        return _KERNEL(store.get(f"pack_{kernel.type.name}", emit))

    def _fill(
        self, weights: list[Weight], n_threads: int, progress: Callable[[int, int], None] | None
    ) -> None:
        pieces = [piece for w in weights for piece in self._pieces(w)]
        total = sum(n for _, _, _, n in pieces)
        done = 0
        with ThreadPoolExecutor(n_threads + _READERS) as pool:
            for n in pool.map(lambda piece: self._load(*piece), pieces):
                done += n
                if progress is not None:
                    progress(done, total)

    def _pieces(self, w: Weight) -> Iterator[tuple[Weight, int, int, int]]:
        """(weight, expert, first group, bytes of the file): about 4 MB each."""
        kernel = self._kernels[w.type.id]
        row_bytes = w.type.row_bytes(w.n_in)
        step = max(1, _PIECE_BYTES // (row_bytes * self._lanes))
        for expert in range(w.shape[2] if len(w.shape) > 2 else 1):
            n_groups = kernel.n_groups(w, self._lanes)
            for group in range(0, n_groups, step):
                first, end = group * self._lanes, min(w.n_out, (group + step) * self._lanes)
                yield w, expert, group, (end - first) * row_bytes

    def _load(self, w: Weight, expert: int, group: int, n_bytes: int) -> int:
        kernel, row_bytes = self._kernels[w.type.id], w.type.row_bytes(w.n_in)
        first_byte = (expert * w.n_out + group * self._lanes) * row_bytes
        out = self.address(w) + expert * kernel.matrix_bytes(w, self._lanes)
        out += group * kernel.group_bytes(w, self._lanes)
        pack = self._pack[w.type.id]
        if pack is None:
            start = out - self.data.ctypes.data
            self._read_into(w, first_byte, self.data[start : start + n_bytes])
            return n_bytes
        buffer = getattr(self._bounce, "data", None)
        if buffer is None or len(buffer) < n_bytes:
            buffer = self._bounce.data = np.empty(max(n_bytes, _PIECE_BYTES), np.uint8)
        self._read_into(w, first_byte, buffer[:n_bytes])
        n_rows = n_bytes // row_bytes
        n_blocks = w.n_in // kernel.tile.block
        args = np.array([buffer.ctypes.data, row_bytes, n_rows, n_blocks, out], np.int64)
        pack(args.ctypes.data, 0, -(-n_rows // self._lanes), 0)
        return n_bytes
