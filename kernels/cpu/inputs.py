"""What a step is described by: arrays that the engine fills and kernels read where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.cpu.attention import ITEM_WORDS, PIECE, AttentionShape
from edgellm.kernels.cpu.kv_types import BLOCK
from edgellm.kernels.cpu.memory import allocate
from edgellm.kernels.cpu.recurrent import RUN_WORDS
from edgellm.kernels.cpu.team import LINE

_REMEMBERED = 8  # windows that are kept for requests that begin like an earlier one


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
    block: int = BLOCK  # tokens of keys and values that lie together
    n_states: int = 0  # slots of recurrent states: two for each sequence, and checkpoints
    cpus: tuple[int, ...] = ()  # that the threads stay on; none: wherever the system puts them


def pool_blocks(window: int | None, limits: Limits) -> int:
    """Blocks of the pools of a layer with this window."""
    if window is None:
        return limits.n_blocks
    # older blocks are released: window, step, two cut blocks and that of the sinks
    most = -(-(window + limits.max_tokens) // limits.block) + 3
    kept = _REMEMBERED * -(-window // limits.block)
    return min(limits.n_blocks, most * limits.max_seqs + kept)


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
        self.n_blocks = pool_blocks(shape.window, limits)
        if shape.window is not None:
            n_pieces = min(n_pieces, -(-shape.window // PIECE) + 1) + 1  # cut at both ends; sinks
        # a token is split over pieces only when its sequence brings one token: max_seqs at most
        self.slots = np.zeros(limits.max_tokens, np.int64)
        self.table = np.zeros((limits.max_seqs, -(-limits.n_ctx // shape.block)), np.int32)
        n_items = shape.n_units * (limits.max_tokens + limits.max_seqs * n_pieces)
        self.items = np.zeros((n_items, ITEM_WORDS), np.int64)
        self.splits = np.zeros((limits.max_tokens, 2), np.int64)
        n_slots = limits.max_seqs * n_pieces * shape.n_units
        self.partials = allocate(n_slots * shape.group * shape.partial_bytes())
        self.count = counts
        self._outlook_before: list[tuple[int, int, int, int, bool]] | None = None

    def add_layer(self) -> int:
        """Memory for one more layer's keys and values; returns its number in the group."""
        self.keys.append(allocate(self.n_blocks * self.shape.key_block_bytes()))
        self.values.append(allocate(self.n_blocks * self.shape.value_block_bytes()))
        return len(self.keys) - 1

    def plan(self, runs: Sequence[tuple[int, int, int, int]]) -> None:
        """Work items for runs of consecutive tokens (first row, n tokens, first position, table
        row), longest work first."""
        outlook = self._outlook(runs)
        if outlook is not None and outlook == self._outlook_before:
            return  # the items are there
        self._outlook_before = None
        shape, heads = self.shape, np.arange(self.shape.n_units)
        singles = [run for run in runs if run[1] == 1]
        at = self._plan_singles(np.array(singles, np.int64)) if singles else 0
        for first_row, n, position, table_row in runs:
            if n == 1:
                continue
            self.splits[first_row : first_row + n] = 0
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
        self._outlook_before = outlook

    def _outlook(
        self, runs: Sequence[tuple[int, int, int, int]]
    ) -> list[tuple[int, int, int, int, bool]] | None:
        """What the items of runs of one token follow from: the same for most steps of those who
        generate. None where a run is longer."""
        found = []
        for row, n, position, table_row in runs:
            if n != 1:
                return None
            begin, end = self._pieces(position, position)
            found.append((row, table_row, begin, end, self._meets_sinks(position)))
        return found

    def _plan_singles(self, runs: NDArray[np.int64]) -> int:
        """Items of runs of one token, split by pieces so that threads share a long context;
        returns how many. Order: run, unit, piece."""
        rows, position, table_row = runs[:, 0], runs[:, 2], runs[:, 3]
        begin, end = self._pieces(position, position)
        sinks = np.asarray(self._meets_sinks(position)).astype(np.int64)
        n_pieces = end - begin + sinks
        n_units = self.shape.n_units
        n_items = np.repeat(n_pieces, n_units)  # of each run and unit
        pair = np.repeat(np.arange(len(n_items)), n_items)
        run, unit = pair // n_units, pair % n_units
        nth = np.arange(len(pair)) - (np.cumsum(n_items) - n_items)[pair]  # piece of the pair
        is_sinks = (nth == 0) & (sinks[run] == 1)
        piece = begin[run] - sinks[run] + nth
        items = self.items[: len(pair)]
        items[:, 0], items[:, 1], items[:, 2], items[:, 6] = rows[run], 1, unit, table_row[run]
        items[:, 3] = np.where(is_sinks, begin[run], piece)  # an empty run of pieces after them
        items[:, 4] = np.where(is_sinks, begin[run], piece + 1)
        items[:, 7] = is_sinks
        is_split = (n_pieces > 1)[run]
        items[:, 5] = np.where(is_split, np.cumsum(is_split) - 1, -1)
        n_slots = np.where(n_pieces > 1, n_pieces * n_units, 0)
        self.splits[rows, 0] = np.cumsum(n_slots) - n_slots
        self.splits[rows, 1] = np.where(n_pieces > 1, n_pieces, 0)
        return len(pair)

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
