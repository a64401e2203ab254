"""Quantized activations: what `quantize` writes and matrices of quantized types read.

A row of n_in floats becomes n_in int8 codes, then for each 32 of them 8 bytes: a float32 scale, and
as int16 the sums of the first and the last 16 codes (what a weight's minimum is multiplied with).
Rows are padded to 16 bytes and lie one behind the other, so rows from the i-th on begin
``i * row_bytes`` further. For a *precise* matrix each row has a second copy behind the first, made
of what the first left over.
"""

from __future__ import annotations

GROUP = 32


def copy_bytes(n_in: int) -> int:
    return -(-(n_in + n_in // GROUP * 8) // 16) * 16


def row_bytes(n_in: int, precise: bool = False) -> int:
    """Bytes of a quantized row; ValueError unless n_in is a multiple of 32."""
    if n_in % GROUP:
        raise ValueError(f"{n_in} elements cannot be quantized by {GROUP}")
    return copy_bytes(n_in) * (2 if precise else 1)
