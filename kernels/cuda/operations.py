"""One function for each op: it knows the kernel's name, grid, block and order of arguments.

Everything that changes from step to step is read from device memory, so a captured launch can be
repeated: token ids, positions, slots, block tables, and how many rows there are. ``Rows`` says how
many a launch is laid out for. Activations are float32 [n_rows, dim]; a view ``buffer.at(...)`` of
a row is where another range of rows begins.

The kernels of a matrix and of attention follow the phase, "prefill" for tokens of a prompt and
"decode" for generated ones (also when several are verified at once), never the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from edgellm.kernels.cuda import pack, quantized
from edgellm.kernels.cuda.device import ALIGNMENT, Buffer, Device
from edgellm.quant.block import QuantType

Phase = Literal["prefill", "decode"]

UNARY = ("scale", "softcap", "sigmoid", "softplus", "silu", "gelu")  # as in elementwise.cu
GATES = ("swiglu", "geglu", "swiglu_clamped")  # as in activations.cuh
BINARY = ("add", "mul", *GATES)
_DECODE_TILES = (1, 2, 4, 8)  # rows that share a read of the weights
PREFILL_TILE = {True: (128, 64), False: (64, 64)}  # outputs and tokens of a block, if quantized


@dataclass(frozen=True)
class Rows:
    """How many rows a launch is for at most, and the int32 that says how many there are."""

    limit: int
    count: Buffer


@dataclass(frozen=True)
class Matrix:
    """Packed weights [n, n_out, n_in] in device memory; n is the number of experts or heads."""

    kind: QuantType
    n_in: int
    n_out: int
    data: Buffer
    n: int = 1
    precise: bool = False  # its inputs have outliers: they are quantized in two copies

    @property
    def is_quantized(self) -> bool:
        """Whether it takes quantized activations; else float32 ones."""
        return self.kind.name not in pack.FLOATS

    @property
    def n_copies(self) -> int:
        return 2 if self.is_quantized and self.precise else 1

    @property
    def input_bytes(self) -> int:
        """Bytes of a row of ``n_in`` elements as the matrix takes it."""
        return self.row_bytes(1)

    def row_bytes(self, n_heads: int) -> int:
        """Bytes of a row of n_heads * n_in elements as the matrix takes it."""
        n = self.n_in * n_heads
        return quantized.row_bytes(n, self.precise) if self.is_quantized else 4 * n

    @property
    def module(self) -> str:
        return f"{'linear' if self.is_quantized else 'linear_float'}/{self.kind.name}"

    @property
    def units(self) -> np.int32:
        """Bytes from matrix to matrix / 256, which fit an int32."""
        return _i(pack.packed_bytes(self.kind, self.n_in, self.n_out) // ALIGNMENT)


# ---- matrices -----------------------------------------------------------------------------------


def quantize(
    device: Device, x: Buffer, out: Buffer, rows: Rows, n_in: int, precise: bool = False,
    stream: Any = None,
) -> None:  # fmt: skip
    """Rows of n_in floats as quantized.py describes them."""
    args = (x, out, rows.count, _i(n_in), _i(2 if precise else 1))
    device.kernel("quantize/quantize")((_up(n_in, 256), rows.limit), (256,), args, 0, stream)


def norm_quantize(
    device: Device, x: Buffer, weight: Buffer, out: Buffer, rows: Rows, n: int, eps: float, *,
    y: Buffer | None = None, total: Buffer | None = None, normed: Buffer | None = None,
    precise: bool = False, stream: Any = None,
) -> None:  # fmt: skip
    """total = x + y (without y: x); normed = rms_norm(total) * weight; out = normed, quantized: in
    one launch, with the bits of three. ``total``, which may be x, and ``normed`` are None where
    nobody needs them."""
    args = (
        x, y, weight, total, normed, out, rows.count, _i(n), np.float32(eps),
        _i(2 if precise else 1),
    )  # fmt: skip
    device.kernel("quantize/norm_quantize")((rows.limit,), _threads(n), args, 0, stream)


def linear(
    device: Device, matrix: Matrix, x: Buffer, out: Buffer, rows: Rows, phase: Phase,
    bias: Buffer | None = None, stream: Any = None,
) -> None:  # fmt: skip
    """x @ matrix.T + bias. x is quantized or float32, as the matrix takes it. A matrix of n > 1 is
    head_linear: x [n_rows, n * n_in], out [n_rows, n * n_out], bias [n, n_out]."""
    n = matrix.n
    row = matrix.row_bytes(n)
    for copy in range(matrix.n_copies):
        args = (
            matrix.data, matrix.units, x.at(copy * row // matrix.n_copies), _i(row),
            None if copy else bias, out, rows.count, _i(matrix.n_in), _i(matrix.n_out), _i(n),
            _i(copy),
        )  # fmt: skip
        if phase == "decode":
            tile = _decode_tile(rows)
            grid = (_up(matrix.n_out, 4), _up(rows.limit, tile), n)
            kernel = device.kernel(f"{matrix.module}/matvec_{tile}")
            kernel(grid, (128,), args, 0, stream)
        else:
            n_outs, n_tokens = PREFILL_TILE[matrix.is_quantized]
            grid = (_up(matrix.n_out, n_outs), _up(rows.limit, n_tokens), n)
            device.kernel(f"{matrix.module}/matmul")(grid, (256,), args, 0, stream)


def can_gate(gate: Matrix, up: Matrix) -> bool:
    """Whether ``gated`` takes both: quantized alike, of one shape, from the same 8 bits."""
    alike = (gate.kind, gate.n_in, gate.n_out, gate.n) == (up.kind, up.n_in, up.n_out, up.n)
    return alike and gate.is_quantized and gate.n_copies == up.n_copies == 1


def gated(
    device: Device, name: str, gate: Matrix, up: Matrix, x: Buffer, out: Buffer, rows: Rows,
    gate_bias: Buffer | None = None, up_bias: Buffer | None = None, stream: Any = None,
) -> None:  # fmt: skip
    """For generated tokens, a function of GATES of (x @ gate.T + bias, x @ up.T + bias) in one
    launch: the bits of ``linear`` twice and ``binary``, without what lies between."""
    args = (
        gate.data, up.data, x, _i(gate.row_bytes(1)), gate_bias, up_bias, out, rows.count,
        _i(gate.n_in), _i(gate.n_out), _i(GATES.index(name)),
    )  # fmt: skip
    tile = _decode_tile(rows)
    grid = (_up(gate.n_out, 4), _up(rows.limit, tile))
    device.kernel(f"{gate.module}/gated_{tile}")(grid, (128,), args, 0, stream)


def table_rows(
    device: Device, table: Matrix, numbers: Buffer, out: Buffer, rows: Rows, stream: Any = None
) -> None:
    """Rows of a table by int32 numbers: embed (token ids), position_rows (positions)."""
    args = (table.data, numbers, out, rows.count, _i(table.n_in), _i(table.n_out))
    per_block = 128 * (32 if table.is_quantized else 8)
    grid = (_up(table.n_in, per_block), rows.limit)
    device.kernel(f"{table.module}/table_rows")(grid, (128,), args, 0, stream)


# ---- rows ---------------------------------------------------------------------------------------


def rms_norm(
    device: Device, x: Buffer, weight: Buffer, out: Buffer, rows: Rows, dim: int, n: int,
    eps: float, weight_rows: int = 1, stream: Any = None,
) -> None:  # fmt: skip
    """Over runs of n elements of rows of dim; weight float32 [weight_rows, n]."""
    args = (x, weight, out, rows.count, _i(n), _i(weight_rows), np.float32(eps))
    device.kernel("rows/rms_norm")((dim // n, rows.limit), _threads(n), args, 0, stream)


def layer_norm(
    device: Device, x: Buffer, weight: Buffer, bias: Buffer | None, out: Buffer, rows: Rows,
    dim: int, n: int, eps: float, weight_rows: int = 1, stream: Any = None,
) -> None:  # fmt: skip
    args = (x, weight, bias, out, rows.count, _i(n), _i(weight_rows), np.float32(eps))
    device.kernel("rows/layer_norm")((dim // n, rows.limit), _threads(n), args, 0, stream)


def l2_norm(
    device: Device, x: Buffer, out: Buffer, rows: Rows, dim: int, n: int, eps: float,
    stream: Any = None,
) -> None:  # fmt: skip
    args = (x, out, rows.count, _i(n), np.float32(eps))
    device.kernel("rows/l2_norm")((dim // n, rows.limit), _threads(n), args, 0, stream)


def rope_angles(
    device: Device, positions: Buffer, frequencies: Buffer, out: Buffer, rows: Rows, n_pairs: int,
    magnitude: float, stream: Any = None,
) -> None:  # fmt: skip
    """Cosine and sine, float32 [n_rows, n_pairs, 2], of each position times each frequency (float64
    [n_pairs], kernels.rope.frequencies), scaled by magnitude: once a step for all layers."""
    args = (positions, frequencies, out, rows.count, _i(n_pairs), np.float32(magnitude))
    device.kernel("rows/rope_angles")((_up(n_pairs, 32), rows.limit), (32,), args, 0, stream)


def rope(
    device: Device, x: Buffer, angles: Buffer, out: Buffer, rows: Rows, dim: int, head_dim: int,
    n_pairs: int, layout: str, stream: Any = None,
) -> None:  # fmt: skip
    """Turn the first 2 * n_pairs elements of each head; layout "neox" or "norm"."""
    args = (x, angles, out, rows.count, _i(dim), _i(head_dim), _i(n_pairs), _i(layout == "norm"))
    device.kernel("rows/rope")((_up(dim // 2, 128), rows.limit), (128,), args, 0, stream)


def temper(
    device: Device, x: Buffer, positions: Buffer, out: Buffer, rows: Rows, dim: int, scale: float,
    length: int, stream: Any = None,
) -> None:  # fmt: skip
    args = (x, positions, out, rows.count, _i(dim), np.float32(scale), _i(length))
    device.kernel("rows/temper")(_grid(dim, rows), (256,), args, 0, stream)


def copy_rows(
    device: Device, x: Buffer, numbers: Buffer, out: Buffer, rows: Rows, dim: int,
    stream: Any = None,
) -> None:  # fmt: skip
    """out[i] = x[numbers[i]]: select. ``rows`` counts the rows of out."""
    args = (x, numbers, out, rows.count, _i(dim))
    device.kernel("rows/copy_rows")(_grid(dim, rows), (256,), args, 0, stream)


def slice_rows(
    device: Device, x: Buffer, out: Buffer, rows: Rows, dim: int, start: int, n: int, run: int,
    stream: Any = None,
) -> None:  # fmt: skip
    args = (x, out, rows.count, _i(dim), _i(start), _i(n), _i(run))
    device.kernel("rows/slice")(_grid(dim // run * n, rows), (256,), args, 0, stream)


def join(
    device: Device, x: Buffer, y: Buffer, out: Buffer, rows: Rows, n_heads: int, n_x: int,
    n_y: int, shared: bool, stream: Any = None,
) -> None:  # fmt: skip
    args = (x, y, out, rows.count, _i(n_heads), _i(n_x), _i(n_y), _i(shared))
    device.kernel("rows/join")(_grid(n_heads * (n_x + n_y), rows), (256,), args, 0, stream)


def unary(
    device: Device, name: str, x: Buffer, out: Buffer, rows: Rows, dim: int, a: float = 0.0,
    stream: Any = None,
) -> None:  # fmt: skip
    """A function of UNARY element by element; a is scale's factor and softcap's cap."""
    args = (x, out, rows.count, _i(dim), _i(UNARY.index(name)), np.float32(a))
    device.kernel("elementwise/unary")(_grid(dim, rows), (256,), args, 0, stream)


def binary(
    device: Device, name: str, x: Buffer, y: Buffer, out: Buffer, rows: Rows, dim: int,
    y_is: Literal["rows", "vector", "column"] = "rows", stream: Any = None,
) -> None:  # fmt: skip
    """A function of BINARY element by element. y has a row for each of x, or is one vector for all
    rows (add_vector, mul_vector), or has one number for each row (mul_row)."""
    row_step, step = {"rows": (dim, 1), "vector": (0, 1), "column": (1, 0)}[y_is]
    args = (
        x, y, out, rows.count, _i(dim), _i(BINARY.index(name)), _i(row_step), _i(step)
    )  # fmt: skip
    device.kernel("elementwise/binary")(_grid(dim, rows), (256,), args, 0, stream)


def _decode_tile(rows: Rows) -> int:
    return next((t for t in _DECODE_TILES if t >= rows.limit), _DECODE_TILES[-1])


def _i(x: int) -> np.int32:
    return np.int32(x)


def _up(n: int, by: int) -> int:
    return -(-n // by)


def _threads(n: int) -> tuple[int]:
    """Of a norm's block; the order of its sum follows from them."""
    return (32 if n <= 128 else 256 if n < 2048 else 1024,)


def _grid(dim: int, rows: Rows) -> tuple[int, int]:
    return (_up(dim, 256), rows.limit)
