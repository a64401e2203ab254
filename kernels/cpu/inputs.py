"""What a step is described by: arrays that the engine fills and kernels read where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.cpu.attention import BLOCK, ITEM_WORDS, PIECE, AttentionShape
from edgellm.kernels.cpu.memory import allocate
from edgellm.kernels.cpu.recurrent import RUN_WORDS
from edgellm.kernels.cpu.team import LINE


@dataclass(frozen=True)
class Limits:
    """What the program's memory is laid out for."""

    n_threads: int
    max_tokens: int  # rows of a step
    max_out: int  # rows whose logits are wanted
    max_seqs: int  # rows of the block tables
    n_ctx: int  # positions of one sequence
    n_blocks: int  # blocks of each cache pool
    k_type: str = "f16"  # of keys: a name of KV_TYPES
    v_type: str = "f16"
    window: int | None = None  # context policy ring: what full attention is narrowed to
    sinks: int = 0  # beside it, the first tokens of a sequence
    cpus: tuple[int, ...] = ()  # that the threads stay on; none: wherever the system puts them


class AttentionGroup:
    """Layers with the same heads and window: they share block tables, slots and work items.

    The engine writes ``slots`` [n_tokens] and ``table`` [max_seqs, blocks of a sequence] (int32)
    before a step; items and splits follow from positions (``plan``).
    """

    def __init__(self, shape: AttentionShape, limits: Limits, counts: NDArray[np.int64]) -> None:
        self.shape, self.limits = shape, limits
        self.keys: list[NDArray[np.uint8]] = []  # one pool for each layer
        self.values: list[NDArray[np.uint8]] = []
        n_pieces = -(-limits.n_ctx // PIECE)
        self.n_blocks = limits.n_blocks
        if shape.window is not None:
            n_pieces = min(n_pieces, -(-shape.window // PIECE) + 1) + 1  # cut at both ends; sinks
            # older blocks are released: window, step, two cut blocks and that of the sinks
            most = -(-(shape.window + limits.max_tokens) // BLOCK) + 3
            self.n_blocks = min(self.n_blocks, most * limits.max_seqs)
        # a token is split over pieces only when its sequence brings one token: max_seqs at most
        self.slots = np.zeros(limits.max_tokens, np.int64)
        self.table = np.zeros((limits.max_seqs, -(-limits.n_ctx // BLOCK)), np.int32)
        n_items = shape.n_units * (limits.max_tokens + limits.max_seqs * n_pieces)
        self.items = np.zeros((n_items, ITEM_WORDS), np.int64)
        self.splits = np.zeros((limits.max_tokens, 2), np.int64)
        n_slots = limits.max_seqs * n_pieces * shape.n_units
        self.partials = allocate(n_slots * shape.group * shape.partial_bytes())
        self.count = counts

    def add_layer(self) -> int:
        """Memory for one more layer's keys and values; returns its number in the group."""
        self.keys.append(allocate(self.n_blocks * self.shape.key_block_bytes()))
        self.values.append(allocate(self.n_blocks * self.shape.value_block_bytes()))
        return len(self.keys) - 1

    def plan(self, runs: Sequence[tuple[int, int, int, int]]) -> None:
        """Work items for runs of consecutive tokens (first row, n tokens, first position, table
        row), longest work first."""
        shape, heads = self.shape, np.arange(self.shape.n_units)
        at, slot = 0, 0
        for first_row, n, position, table_row in runs:
            self.splits[first_row : first_row + n] = 0
            if n == 1:
                begin, end = self._pieces(position, position)
                sinks = int(self._meets_sinks(position))
                n_pieces = end - begin + sinks
                items = self.items[at : at + shape.n_units * n_pieces]
                cube = items.reshape(shape.n_units, n_pieces, ITEM_WORDS)
                cube[..., 0], cube[..., 1], cube[..., 6] = first_row, 1, table_row
                cube[..., 2] = heads[:, None]
                pieces = np.arange(begin - sinks, end)
                cube[..., 3], cube[..., 4], cube[..., 7] = pieces, pieces + 1, 0
                if sinks:  # an empty run of pieces after them
                    cube[:, 0, 3:5], cube[:, 0, 7] = begin, 1
                if n_pieces == 1:
                    items[:, 5] = -1
                else:
                    items[:, 5] = slot + np.arange(len(items))
                    self.splits[first_row] = slot, n_pieces
                    slot += len(items)
                at += len(items)
                continue
            width = shape.tile_tokens
            starts = np.arange(0, n - n % width, width)
            sizes = np.full(len(starts), width)
            starts = np.concatenate([starts, np.arange(n - n % width, n)])[::-1]
            sizes = np.concatenate([sizes, np.ones(n % width, np.int64)])[::-1]
            newest = position + starts + sizes - 1
            if not shape.causal:
                newest[:] = position + n - 1
            begin, end = self._pieces(position + starts, newest)
            items = self.items[at : at + len(starts) * shape.n_units]
            cube = items.reshape(len(starts), shape.n_units, ITEM_WORDS)
            cube[..., 0], cube[..., 1] = (first_row + starts)[:, None], sizes[:, None]
            cube[..., 2], cube[..., 5], cube[..., 6] = heads, -1, table_row
            cube[..., 3] = np.broadcast_to(np.asarray(begin), starts.shape)[:, None]
            cube[..., 4] = end[:, None]
            cube[..., 7] = self._meets_sinks(position + starts + sizes - 1)[:, None]
            at += len(items)
        self.count[0] = at

    def _meets_sinks(self, last: Any) -> Any:
        """Whether a token up to position ``last`` has sinks outside its window."""
        window = self.shape.window
        return (last >= window) if self.shape.sinks and window is not None else last < 0

    def _pieces(self, first: Any, last: Any) -> tuple[Any, Any]:
        """First and end piece that tokens at positions first..last look at (numbers or arrays)."""
        end = last // PIECE + 1
        if self.shape.window is None:
            return first * 0, end
        return np.maximum(0, first - self.shape.window + 1) // PIECE, end


class StepInputs:
    """Arrays a step is described by; the program's kernels read them where they lie."""

    def __init__(self, limits: Limits, embedding_row_bytes: int) -> None:
        self.embeddings = np.zeros((limits.max_tokens, embedding_row_bytes), np.uint8)  # file rows
        self.positions = np.zeros(limits.max_tokens, np.int64)
        self.last_positions = np.zeros(limits.max_tokens, np.int64)  # of each token's sequence
        self.sink_positions = np.zeros(limits.max_tokens, np.int64)  # where queries meet the sinks
        self.out_rows = np.zeros(limits.max_out, np.int64)
        self.counts = np.zeros(LINE * 64, np.int64)  # tokens, wanted rows, then items by group
        self.runs = np.zeros((limits.max_seqs, RUN_WORDS), np.int64)  # see recurrent
        self.n_runs = np.zeros(1, np.int64)

    @property
    def n_tokens_at(self) -> int:
        return self.counts.ctypes.data

    @property
    def n_out_at(self) -> int:
        return self.counts.ctypes.data + 8 * LINE
