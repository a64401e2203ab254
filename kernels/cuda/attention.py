"""Attention's cache on the device, and its launches (attention.cu, kv_cache.cuh)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from edgellm.kernels.cuda.device import Buffer, Device
from edgellm.kernels.cuda.operations import Phase, Rows
from edgellm.quant import by_name

TILE = 32  # tokens that lie together in the cache
PIECE = 256  # positions that are reduced at a time
KV_TYPES = ("f32", "f16", "q8_0", "q4_0")
_QUERIES = 8  # of a block of threads
# Blocks that share a token's pieces: enough for a GPU with one sequence, few enough that those of a
# context which is not filled yet cost nothing (they leave at once).
_BLOCKS = 32


@dataclass(frozen=True)
class Shape:
    """What the attention of some layers has in common. Raises ValueError for heads that there are
    no kernels for."""

    n_heads: int
    n_kv_heads: int
    head_dim: int  # of queries and keys
    v_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    k_type: str = "f16"
    v_type: str = "f16"

    def __post_init__(self) -> None:
        for kind, dim in ((self.k_type, self.head_dim), (self.v_type, self.v_dim)):
            needed = 8 if by_name(kind).block == 1 else by_name(kind).block
            if dim % needed:
                raise ValueError(f"{kind} needs heads that are multiples of {needed}, not {dim}")

    @property
    def module(self) -> str:
        return f"attention/{self.k_type}-{self.v_type}-{self.head_dim}-{self.v_dim}"

    @property
    def heads_of_unit(self) -> int:
        """Heads of a key-value head that one block of threads has at a time."""
        shared = self.n_heads // self.n_kv_heads
        return next(n for n in range(min(shared, _QUERIES), 0, -1) if shared % n == 0)

    @property
    def n_units(self) -> int:
        return self.n_heads // self.heads_of_unit

    @property
    def stored_units(self) -> int:
        """Threads that store a token: 32 elements of a key or value each."""
        return self.n_kv_heads * (-(-self.head_dim // 32) + -(-self.v_dim // 32))

    @property
    def key_tile_bytes(self) -> int:
        """Bytes of a pool of keys for each 32 tokens."""
        return _tile_bytes(self.k_type, self.head_dim) * self.n_kv_heads

    @property
    def value_tile_bytes(self) -> int:
        return _tile_bytes(self.v_type, self.v_dim) * self.n_kv_heads

    def n_pieces(self, n_ctx: int) -> int:
        """Pieces that a token can see when positions are below n_ctx."""
        whole = -(-n_ctx // PIECE)
        return whole if self.window is None else min(whole, -(-self.window // PIECE) + 1)

    def partial_bytes(self, n_rows: int, n_ctx: int) -> int:
        """Bytes of the states that decode leaves for each row and piece."""
        return 4 * n_rows * self.n_pieces(n_ctx) * self.n_heads * (self.v_dim + 2)


@dataclass(frozen=True)
class Seen:
    """Where rows stand, int32 in device memory. ``positions`` [n_rows]; ``last`` [n_rows], the last
    position each may see: its own when causal, else that of its sequence; ``table`` [n_sequences,
    table_row] of block numbers; ``sequences`` [n_rows], the row of the table (for prefill the first
    counts: all rows of a launch are of one sequence). ``block`` tokens, a multiple of 32, belong to
    a block."""

    positions: Buffer
    last: Buffer
    table: Buffer
    sequences: Buffer
    table_row: int
    block: int = TILE


def kv_store(
    device: Device, shape: Shape, k: Buffer, v: Buffer, keys: Buffer, values: Buffer,
    slots: Buffer, rows: Rows, stream: Any = None,
) -> None:  # fmt: skip
    """Rows of k and v into the pools at ``slots``: int32 [n_rows], block * tokens of a block +
    place in it; below 0: nowhere."""
    args = (k, v, keys, values, slots, rows.count, np.int32(shape.n_kv_heads))
    grid = (-(-shape.stored_units // 64), rows.limit)
    device.kernel(f"{shape.module}/kv_store")(grid, (64,), args, 0, stream)


def rope_store(
    device: Device, shape: Shape, q: Buffer, k: Buffer, v: Buffer, angles: Buffer,
    turned_q: Buffer, keys: Buffer, values: Buffer, slots: Buffer, rows: Rows, n_pairs: int,
    layout: str, stream: Any = None,
) -> None:  # fmt: skip
    """``rope`` of q, and of k on its way into the pools, v as it is: one launch with the bits of
    three. k itself stays as it was; turned_q is not q."""
    args = (
        q, k, v, angles, turned_q, keys, values, slots, rows.count, np.int32(shape.n_heads),
        np.int32(shape.n_kv_heads), np.int32(n_pairs), np.int32(layout == "norm"),
    )  # fmt: skip
    n_units = shape.n_heads * -(-shape.head_dim // 32) + shape.stored_units
    grid = (-(-n_units // 64), rows.limit)
    device.kernel(f"{shape.module}/rope_store")(grid, (64,), args, 0, stream)


def attention(
    device: Device, shape: Shape, q: Buffer, keys: Buffer, values: Buffer, out: Buffer,
    seen: Seen, rows: Rows, phase: Phase, partials: Buffer | None = None, n_ctx: int = 0,
    sinks: Buffer | None = None, stream: Any = None,
) -> None:  # fmt: skip
    """Queries over what the pools hold. Prefill takes rows of one sequence; decode rows of any,
    with ``partials`` of ``shape.partial_bytes(rows.limit, n_ctx)`` for positions below n_ctx.
    ``sinks``: a learned score for each head, float32 [n_heads]."""
    window, here = np.int32(shape.window or 0), np.int32(shape.heads_of_unit)
    scale, softcap = np.float32(shape.scale), np.float32(shape.softcap or 0)
    heads = np.int32(shape.n_heads), np.int32(shape.n_kv_heads)
    table = np.int32(seen.table_row), np.int32(seen.block)
    n_units = shape.n_units
    where = seen.positions, seen.last, seen.table, seen.sequences
    if phase == "prefill":
        n_tokens = max(1, _QUERIES // shape.heads_of_unit)
        args: tuple[Any, ...] = (
            q, keys, values, out, *where, sinks, rows.count, *table, *heads, here,
            np.int32(n_tokens), window, scale, softcap,
        )  # fmt: skip
        grid: tuple[int, ...] = (n_units, -(-rows.limit // n_tokens))
        device.kernel(f"{shape.module}/attention_whole")(grid, (128,), args, 0, stream)
        return
    if partials is None or n_ctx < 1:
        raise ValueError("decode needs partials and n_ctx")
    n_pieces = shape.n_pieces(n_ctx)
    args = (
        q, keys, values, partials, *where, rows.count, *table, *heads, here, np.int32(n_pieces),
        window, scale, softcap,
    )  # fmt: skip
    grid = (n_units, min(n_pieces, _BLOCKS), rows.limit)
    device.kernel(f"{shape.module}/attention_split")(grid, (128,), args, 0, stream)
    args = (
        partials, out, seen.positions, seen.last, sinks, rows.count, np.int32(n_pieces),
        np.int32(shape.n_heads), here, window,
    )  # fmt: skip
    grid = (shape.n_heads, rows.limit)
    device.kernel(f"{shape.module}/attention_merge")(grid, (128,), args, 0, stream)


def _tile_bytes(kind: str, dim: int) -> int:
    """Of a head: its dim is rounded up to 32."""
    return TILE * by_name(kind).row_bytes(-(-dim // 32) * 32)
