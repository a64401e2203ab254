"""What a number format is, and the view of one block that its decode is written over.

A type's decode is written once, over the small set of operations of `Block`. numpy executes it here
(that is the specification) and kernels/cpu traces the same text into LLVM vector code. Therefore
`codes`, `scales` and `decode` use only the methods of `Block` and + - * & | ^ << >> on its values,
with Python ints as constants: no numpy, and no branch that depends on data.
"""

from collections.abc import Iterator
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgellm.quant.grids import Grid
from edgellm.quant.lanes import Lanes, NumpyLanes

# A vector of n lanes (u8, i8 or f32) for each block. An ndarray [n_blocks, n] here, a traced value
# in a compiler. One lane broadcasts against n. u8 arithmetic wraps modulo 256 and >> is logical.
# Float operations are rounded one by one to float32: nothing is fused or reassociated.
Value: TypeAlias = Any

_AT_ONCE = 4096  # blocks that numpy encodes together: their values stay in cache


class Block(Protocol):
    """The bytes of a block, read by offset. Every method is total: no errors, no bounds to check,
    since offsets are constants of the format and lie within its `bytes`."""

    def u8(self, offset: int, n: int = 1) -> Value:
        """n unsigned bytes from `offset`."""

    def i8(self, offset: int, n: int = 1) -> Value:
        """n signed bytes from `offset`."""

    def f16(self, offset: int) -> Value:
        """The little-endian half at `offset`, widened exactly to float32 (subnormals kept)."""

    def bits(self, offset: int, n: int) -> Value:
        """n u8 values 0 or 1: bit i is bit i % 8 of byte `offset` + i // 8."""

    def f32(self, x: Value) -> Value:
        """Integer lanes to float32, exact."""

    def lookup(self, table: tuple[int, ...], codes: Value) -> Value:
        """i8 lanes table[code]; codes are below len(table), which is 16 for every known type."""

    def entries(self, grid: Grid, low: Value, high: Value | None = None) -> Value:
        """The entries of a codebook whose numbers are low + 256 * high (u8 lanes), one behind the
        other: u8 lanes. Numbers are below the codebook's length."""

    def join(self, parts: list[Value]) -> Value:
        """The lanes of all parts, which have one type and number."""

    def half(self, low: Value, high: Value) -> Value:
        """float32 [1] of the half whose bytes are given, u8 [1] each."""

    def e8m0_half(self, offset: int) -> Value:
        """Half of the power of two whose exponent is the byte: 2 ** (byte - 128), as float32."""


class NumpyBlock:
    """`Block` over many blocks at once: data is uint8 [n_blocks, bytes]."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self.data = data

    def u8(self, offset: int, n: int = 1) -> Value:
        return self.data[:, offset : offset + n]

    def i8(self, offset: int, n: int = 1) -> Value:
        return self.u8(offset, n).view(np.int8)

    def f16(self, offset: int) -> Value:
        return self.u8(offset, 2).view("<f2").astype(np.float32)

    def bits(self, offset: int, n: int) -> Value:
        return np.unpackbits(self.u8(offset, n // 8), axis=1, bitorder="little")

    def f32(self, x: Value) -> Value:
        return x.astype(np.float32)

    def lookup(self, table: tuple[int, ...], codes: Value) -> Value:
        return np.array(table, np.int8)[codes]

    def entries(self, grid: Grid, low: Value, high: Value | None = None) -> Value:
        numbers = low.astype(np.intp) if high is None else low + 256 * high.astype(np.intp)
        return grid.rows[numbers].reshape(len(low), -1)

    def join(self, parts: list[Value]) -> Value:
        return np.concatenate(parts, axis=1)

    def half(self, low: Value, high: Value) -> Value:
        return np.concatenate([low, high], axis=1).view("<f2").astype(np.float32)

    def e8m0_half(self, offset: int) -> Value:
        # ldexp on float64 and one rounding: 2 ** -128 and 2 ** -127 are float32 subnormals, exact.
        return np.ldexp(1.0, self.u8(offset).astype(np.int32) - 128).astype(np.float32)


class UnencodableError(ValueError):
    """A number that a format cannot hold."""


class QuantType:
    """One GGUF number format. Subclasses fill in the attributes, `codes` and `scales`.

    An element is scale * (code - bias) - minimum, or scale * table[code] - minimum.
    """

    name: str  # lower-case ggml name, "q4_k"
    id: int  # ggml type id in the file
    block: int  # elements in a block; 1 for plain floats, which have no codes
    bytes: int  # bytes in a block
    bias: int = 0
    table: tuple[int, ...] | None = None
    chunk: int  # elements in each chunk that codes() yields, 16 or 32
    largest: float = 65504.0  # magnitude that may be encoded: a scale is a half, its largest

    def codes(self, b: Block) -> Iterator[Value]:
        """Yield u8 [chunk] codes, block // chunk times, in element order."""
        raise TypeError(f"{self} has no codes")

    def scales(self, b: Block) -> Iterator[tuple[Value, Value | None]]:
        """Yield (scale, minimum or None), float32 [1] each, for each chunk of codes()."""
        raise TypeError(f"{self} has no scales")

    def decode(self, b: Block) -> Iterator[Value]:
        """Yield float32 [chunk] elements in order."""
        for codes, (scale, minimum) in zip(self.codes(b), self.scales(b), strict=True):
            if self.table is not None:
                value = b.f32(b.lookup(self.table, codes))
            else:
                value = b.f32(codes)
                if self.bias:
                    value = value - self.bias  # exact: small integers in float32
            value = scale * value
            yield value if minimum is None else value - minimum

    def dequantize(self, data: NDArray[np.uint8]) -> NDArray[np.float32]:
        """uint8 [..., n_blocks * bytes] -> float32 [..., n_blocks * block].

        Raises ValueError when the last axis is not a whole number of blocks.
        """
        rows, n_blocks = self._split(data)
        # Scales may be Inf or NaN in a damaged file; the result says so, a warning adds nothing.
        with np.errstate(invalid="ignore", over="ignore"):
            chunks = list(self.decode(NumpyBlock(rows)))
        return np.concatenate(chunks, axis=1).reshape(*data.shape[:-1], n_blocks * self.block)

    def encode(self, o: Lanes) -> None:
        """Write the block's bytes. Finite elements up to 65504 give finite blocks; what is not
        finite may become anything."""
        raise TypeError(f"{self} has no encoder")

    def quantize(
        self, values: NDArray[np.float32], importance: NDArray[np.float32] | None = None
    ) -> NDArray[np.uint8]:
        """float32 [..., n] -> uint8 [..., row_bytes(n)]; the specification of encoders.

        ``importance`` float32 [n], >= 0: how much the errors of each column count, as the mean
        square of what it is multiplied with. Without it all count alike, and Q4_0, Q4_1, Q5_0 and
        Q5_1 are rounded as ggml does, not searched: ask for that with ones. Q8_0 always is.
        TypeError without an encoder, ValueError unless n is a whole number of blocks and there is
        one weight for each column.
        """
        n = values.shape[-1]
        out = np.empty((values.size // self.block, self.bytes), np.uint8)
        shape = (*values.shape[:-1], self.row_bytes(n))
        blocks = values.reshape(-1, self.block).astype(np.float32, copy=False)
        weights = None
        if importance is not None:
            if importance.shape != (n,):
                raise ValueError(f"{self}: {importance.size} weights of importance for {n} columns")
            weights = importance.astype(np.float32, copy=False).reshape(-1, self.block)
        with np.errstate(all="ignore"):  # what is not finite, or too large for a half, stays so
            for first in range(0, len(blocks), _AT_ONCE):
                here = slice(first, first + _AT_ONCE)
                w = None
                if weights is not None:
                    numbers = np.arange(first, first + len(blocks[here])) % len(weights)
                    w = weights[numbers]
                self.encode(NumpyLanes(blocks[here], w, out[here]))
        return out.reshape(shape)

    def _split(self, data: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], int]:
        """The data as contiguous uint8 [blocks in all, bytes], and the blocks of one row."""
        n_blocks, rest = divmod(data.shape[-1], self.bytes)
        if rest or data.dtype != np.uint8:
            raise ValueError(
                f"{self}: rows must be uint8 and a multiple of {self.bytes} bytes, "
                f"got {data.dtype} {data.shape}"
            )
        return np.ascontiguousarray(data).reshape(-1, self.bytes), n_blocks

    def row_bytes(self, n: int) -> int:
        """Bytes of a row of n elements; ValueError unless n is a whole number of blocks."""
        if n % self.block:
            raise ValueError(f"{self}: {n} elements are no whole number of blocks of {self.block}")
        return n // self.block * self.bytes

    def __str__(self) -> str:
        return self.name.upper()

    def __repr__(self) -> str:
        return f"<QuantType {self}>"


def check_encodable(quant_type: QuantType, rows: NDArray[np.float32], first_row: int = 0) -> None:
    """UnencodableError where rows [n_rows, n] hold NaN or a magnitude above ``largest``; it names
    row and column, rows counted from ``first_row``. F32 holds everything."""
    if quant_type.name == "f32" or not rows.size:
        return
    # largest and smallest are NaN where an element is
    if rows.max() <= quant_type.largest and rows.min() >= -quant_type.largest:
        return
    row, column = np.argwhere(~(np.abs(rows) <= quant_type.largest))[0].tolist()
    raise UnencodableError(
        f"{quant_type} cannot hold {rows[row, column]} in row {first_row + row}, column {column}"
    )
