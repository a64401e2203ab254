"""Importance matrices: how much each column of a matrix matters, as mean squared activations.

The format is llama.cpp's: a GGUF file of type "imatrix" with `NAME.in_sum2` (sums of squares,
[columns, matrices]) and `NAME.counts` (rows summed, [1, matrices]) for each matrix of a model; one
matrix, or one for each expert. Read also: the binary files (.dat) that it wrote before.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgellm.quant import by_name
from edgellm.quant.gguf import GGUF, GGUFError, TensorInfo
from edgellm.quant.values import encode
from edgellm.quant.writer import NewTensor, Writer

SUMS, COUNTS = ".in_sum2", ".counts"


@dataclass
class ImportanceMatrix:
    """Sums over a text. sums: by tensor [matrices, columns]; counts: by tensor [matrices]."""

    sums: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    counts: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    datasets: Sequence[str] = ()
    n_chunks: int = 0
    chunk_size: int = 0  # tokens

    def importance(self, name: str, columns: int, matrices: int) -> NDArray[np.float32] | None:
        """Mean squares [matrices, columns] of a tensor, None if it has none; an expert that no
        token reached counts alike in all columns. ValueError if the tensor has another shape."""
        if name not in self.sums:
            return None
        sums, counts = self.sums[name], self.counts[name]
        if len(sums) == 1 and sums.size == matrices * columns:  # a .dat file: behind one another
            sums, counts = sums.reshape(matrices, columns), counts.repeat(matrices)
        if sums.shape != (matrices, columns):
            raise ValueError(
                f"has {sums.shape[0]} x {sums.shape[1]} columns for {name}, whose matrices have "
                f"{matrices} x {columns}; it was measured on another model"
            )
        seen = counts[:, None] > 0
        means = np.where(seen, sums / np.where(seen, counts[:, None], 1), 1)
        return means.astype(np.float32)

    def write(self, path: str, *, force: bool = False) -> None:
        """As a GGUF file; GGUFError."""
        metadata = {
            "general.type": encode("imatrix"),
            "imatrix.datasets": encode(list(self.datasets)),
            "imatrix.chunk_count": encode(self.n_chunks),
            "imatrix.chunk_size": encode(self.chunk_size),
        }
        f32, tensors, data = by_name("f32"), [], []
        for name, sums in self.sums.items():
            tensors += [
                NewTensor(name + SUMS, sums.shape[::-1], f32),
                NewTensor(name + COUNTS, (1, len(sums)), f32),
            ]
            data += [sums, self.counts[name]]
        with Writer(path, metadata, tensors, force=force) as out:
            for values in data:
                out.write(values.astype("<f4"))


def read(path: str) -> ImportanceMatrix:
    """A file of either format; GGUFError if it is none."""
    try:
        with open(path, "rb") as file:
            is_gguf = file.read(4) == b"GGUF"
    except OSError as error:
        raise GGUFError(path, 0, "file", f"cannot be read: {error.strerror}") from None
    found = _read_gguf(path) if is_gguf else _read_binary(path)
    for name, sums in found.sums.items():
        counts = found.counts[name]
        are_counts = np.isfinite(counts) & ((counts == 0) | (counts >= 1))
        if not (np.isfinite(sums).all() and (sums >= 0).all() and are_counts.all()):
            raise GGUFError(path, 0, f"tensor {name}", "has values that are no sums of squares")
    return found


def _read_gguf(path: str) -> ImportanceMatrix:
    with GGUF(path) as gguf:
        if gguf.string("general.type", "model") != "imatrix":
            raise GGUFError(path, 0, "file", "is no importance matrix; `edgellm imatrix` makes one")
        names = gguf.strings("imatrix.datasets", [])
        found = ImportanceMatrix(
            datasets=[name.decode(errors="replace") for name in names],
            n_chunks=gguf.integer("imatrix.chunk_count", 0),
            chunk_size=gguf.integer("imatrix.chunk_size", 0),
        )  # fmt: skip
        for name in gguf.tensors:
            base = name.removesuffix(SUMS)
            if base == name:
                continue
            sums, counts = (_floats(gguf, base + suffix) for suffix in (SUMS, COUNTS))
            if sums.ndim != 2 or counts.size != len(sums):
                raise GGUFError(path, 0, f"tensor {name}", "does not fit its counts")
            found.sums[base], found.counts[base] = sums, counts.reshape(-1)
    return found


def _floats(gguf: GGUF, name: str) -> NDArray[np.float32]:
    info: TensorInfo | None = gguf.tensors.get(name)
    if info is None or info.type.name != "f32":
        raise GGUFError(gguf.path, 0, f"tensor {name}", "is missing or not F32")
    values = np.empty(info.shape[::-1] if len(info.shape) > 1 else (1, info.shape[0]), "<f4")
    gguf.read_into(info, 0, values.reshape(-1).view(np.uint8))
    return values


def _read_binary(path: str) -> ImportanceMatrix:
    """i32 n, then n times: i32 length and name, i32 chunks, i32 columns and their sums (f32,
    already means, times the chunks); i32 chunks and the name of the text may follow."""
    with open(path, "rb") as file:
        data = file.read(1 << 30)
    found, pos = ImportanceMatrix(), 0

    def take(n: int) -> bytes:
        nonlocal pos
        if not 0 <= n <= len(data) - pos:
            raise GGUFError(path, pos, "file", "is no importance matrix, or is cut short")
        pos += n
        return data[pos - n : pos]

    def i32() -> int:
        return int(struct.unpack("<i", take(4))[0])

    for _ in range(i32()):
        name = take(i32()).decode(errors="replace")
        n_chunks, columns = i32(), i32()
        sums = np.frombuffer(take(4 * max(columns, 0)), "<f4").copy()
        found.sums[name], found.counts[name] = sums[None], np.array([max(n_chunks, 1)], np.float32)
    if pos < len(data):
        found.n_chunks = i32()
        found.datasets = [take(i32()).decode(errors="replace")] if pos < len(data) else []
    return found


def metadata(path: str, matrix: ImportanceMatrix) -> Mapping[str, bytes]:
    """What a model that was quantized with it says of it, with llama.cpp's keys."""
    return {
        "quantize.imatrix.file": encode(os.path.basename(path)),
        "quantize.imatrix.dataset": encode(", ".join(matrix.datasets)),
        "quantize.imatrix.entries_count": encode(len(matrix.sums)),
        "quantize.imatrix.chunks_count": encode(matrix.n_chunks),
    }
