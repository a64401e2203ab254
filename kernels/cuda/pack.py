"""Weights as the GPU reads them: a file's blocks taken apart into planes.

A block of a file has an odd length (34, 144, 210 bytes), so its parts lie where no vector load can
reach them. A packed matrix has its parts in planes, one behind the other, each [n_out] rows of
[n_in / 32] groups (or of [n_in / 256] for what 256 elements share), which is the order lanes of a
warp read them in. No bit is added: a matrix is larger than the file's by less than 256 bytes for
each plane, to which they are aligned. weights.cuh reads what is written here.

The codes of a group of 32, byte b of word j being element 4 j + b:

    nibbles  16 bytes: byte i holds element i low and element i + 16 high
    pairs    8 bytes: bits 2 j and 2 j + 1 of byte b of word 0 (1) are element 4 j + b (+ 16)
    bits     4 bytes: bit j of byte b is element 4 j + b
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.cuda.device import aligned
from edgellm.quant.block import NumpyBlock, QuantType

GROUP = 32
_CHUNK = 1 << 22  # elements taken apart at a time

Bytes = NDArray[Any]  # uint8; for numpy's type hints a shift would widen it
# Blocks [n, bytes] and their codes [n, block] -> a plane's bytes [n, ...]
Part = Callable[[Bytes, Bytes], Bytes]


def _nibbles(codes: Bytes, shift: int = 0) -> Bytes:
    low = _by_group(codes >> shift & 15)
    found: Bytes = low[..., :16] | low[..., 16:] << 4
    return found.reshape(len(codes), -1)


def _pairs(codes: Bytes, shift: int = 0) -> Bytes:
    words = (_by_group(codes) >> shift & 3).reshape(len(codes), -1, 2, 4, 4)  # half, word, byte
    found = words[..., 0, :] | words[..., 1, :] << 2 | words[..., 2, :] << 4 | words[..., 3, :] << 6
    return found.reshape(len(codes), -1)


def _bits(codes: Bytes, shift: int) -> Bytes:
    words = (_by_group(codes) >> shift & 1).reshape(len(codes), -1, 8, 4)
    found = words[..., 0, :]
    for j in range(1, 8):
        found = found | words[..., j, :] << j
    return found.reshape(len(codes), -1)


def _by_group(codes: Bytes) -> Bytes:
    return codes.reshape(len(codes), -1, GROUP)


def _field(begin: int, end: int) -> Part:
    """Bytes of the block as they are."""
    return lambda blocks, codes: blocks[:, begin:end]


def _twelve_bits(first: Bytes, second: Bytes) -> tuple[Bytes, Bytes]:
    """Two numbers of 6 bits for each of 8 groups [n, 8]: low nibbles of both, a byte for each
    group [n, 8], and their high pairs, a nibble for each [n, 4]."""
    low = first & 15 | (second & 15) << 4
    high = first >> 4 | second >> 4 << 2
    return low, high[:, 0::2] | high[:, 1::2] << 4


def _k_scales(blocks: Bytes, codes: Bytes) -> Bytes:
    """Of Q4_K and Q5_K: d, dmin, then scales and minimums in twelve bits."""
    low, high = blocks[:, 4:8], blocks[:, 8:12]
    rest = blocks[:, 12:16]
    scale = np.concatenate([low & 63, rest & 15 | low >> 6 << 4], axis=1)
    minimum = np.concatenate([high & 63, rest >> 4 | high >> 6 << 4], axis=1)
    return np.concatenate([blocks[:, :4], *_twelve_bits(scale, minimum)], axis=1)


def _q3_scales(blocks: Bytes) -> tuple[Bytes, Bytes]:
    packed = blocks[:, 96:108]
    groups = np.arange(16)
    low = packed[:, groups % 8] >> (groups // 8 * 4).astype(np.uint8) & 15
    high = packed[:, 8 + groups % 4] >> (groups // 4 * 2).astype(np.uint8) & 3
    scale = low | high << 4
    return _twelve_bits(scale[:, 0::2], scale[:, 1::2])


@dataclass(frozen=True)
class Layout:
    """The planes of a type: bytes for each block, and how they are made."""

    planes: tuple[tuple[int, Part], ...]


_NIBBLES: Part = lambda blocks, codes: _nibbles(codes)  # noqa: E731
_PAIRS: Part = lambda blocks, codes: _pairs(codes)  # noqa: E731

LAYOUTS: dict[str, Layout] = {
    "q8_0": Layout(((32, lambda b, c: c ^ 0x80), (2, _field(0, 2)))),  # signed again
    "q4_0": Layout(((16, _NIBBLES), (2, _field(0, 2)))),
    "q4_1": Layout(((16, _NIBBLES), (4, _field(0, 4)))),
    "q5_0": Layout(((16, _NIBBLES), (4, lambda b, c: _bits(c, 4)), (2, _field(0, 2)))),
    "q5_1": Layout(((16, _NIBBLES), (4, lambda b, c: _bits(c, 4)), (4, _field(0, 4)))),
    "iq4_nl": Layout(((16, _NIBBLES), (2, _field(0, 2)))),
    "mxfp4": Layout(((16, _NIBBLES), (1, _field(0, 1)))),
    "iq4_xs": Layout(((128, _NIBBLES), (8, _field(0, 8)))),
    "q4_k": Layout(((128, _NIBBLES), (16, _k_scales))),
    "q5_k": Layout(((128, _NIBBLES), (32, lambda b, c: _bits(c, 4)), (16, _k_scales))),
    "q6_k": Layout((
        (128, _NIBBLES), (64, lambda b, c: _pairs(c, 4)), (16, _field(192, 208)),
        (2, _field(208, 210)),
    )),
    "q3_k": Layout((
        (64, _PAIRS), (32, lambda b, c: _bits(c, 2)), (8, lambda b, c: _q3_scales(b)[0]),
        (4, lambda b, c: _q3_scales(b)[1]), (2, _field(108, 110)),
    )),
    "q2_k": Layout(((64, _PAIRS), (16, _field(0, 16)), (4, _field(80, 84)))),
}  # fmt: skip
FLOATS = ("f32", "f16", "bf16")  # kept as they are: one plane of rows
TYPES = (*LAYOUTS, *FLOATS)  # what there are kernels for


def plane_sizes(kind: QuantType, n_in: int, n_out: int) -> list[int]:
    """Bytes of each plane, without what aligns it. ValueError for a shape or type without kernels:
    rows of floats are read by eights."""
    if kind.name in FLOATS:
        if n_in % 8:
            raise ValueError(f"{kind}: rows of {n_in} elements are no multiple of 8")
        return [n_out * kind.row_bytes(n_in)]
    if kind.name not in LAYOUTS:
        raise ValueError(f"{kind} has no GPU kernels; there are {', '.join(TYPES)}")
    kind.row_bytes(n_in)  # refuses what is no whole number of blocks
    return [n_out * (n_in // kind.block) * n for n, _ in LAYOUTS[kind.name].planes]


def packed_bytes(kind: QuantType, n_in: int, n_out: int) -> int:
    """Bytes of a packed matrix; the matrices of several experts lie one behind the other."""
    return sum(aligned(n) for n in plane_sizes(kind, n_in, n_out))


def pack(kind: QuantType, rows: Bytes) -> Bytes:
    """Rows of the file [n_out, row_bytes] as ``packed_bytes`` bytes."""
    n_out = len(rows)
    n_in = rows.shape[1] // kind.bytes * kind.block
    sizes = plane_sizes(kind, n_in, n_out)
    packed = np.zeros(sum(aligned(n) for n in sizes), np.uint8)
    planes = _planes(packed, sizes, n_out)
    if kind.name in FLOATS:
        planes[0][:] = rows
        return packed
    step = max(1, _CHUNK // n_in)
    for first in range(0, n_out, step):
        part = np.ascontiguousarray(rows[first : first + step])
        blocks = part.reshape(-1, kind.bytes)
        codes = np.concatenate(list(kind.codes(NumpyBlock(blocks))), axis=1)
        for plane, (_, made) in zip(planes, LAYOUTS[kind.name].planes, strict=True):
            plane[first : first + step] = made(blocks, codes).reshape(len(part), -1)
    return packed


def _planes(packed: Bytes, sizes: Sequence[int], n_out: int) -> list[Bytes]:
    planes, at = [], 0
    for n in sizes:
        planes.append(packed[at : at + n].reshape(n_out, -1))
        at += aligned(n)
    return planes
