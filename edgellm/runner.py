"""Sequences into flat arrays, and one step of the program over them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.cpu.attention import BLOCK
from edgellm.kernels.cpu.inputs import Limits
from edgellm.kernels.cpu.program import Program
from edgellm.kernels.cpu.store import KernelStore
from edgellm.kernels.graph import Graph, Weight
from edgellm.kv_cache import CacheGroup, KVCache
from edgellm.quant.gguf import GGUF
from edgellm.sequence import Sequence


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one sequence in a step. ``wanted``: whose logits are needed."""

    sequence: Sequence
    n_tokens: int
    wanted: str  # "none", "last" or "all"


class Runner:
    """Owns the program and the cache of one model; ``forward`` is one step."""

    def __init__(
        self, gguf: GGUF, graph: Graph, limits: Limits, store: KernelStore,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:  # fmt: skip
        self._gguf, self._limits = gguf, limits
        self._trace = os.environ.get("EDGELLM_TRACE", "") == "ops"
        self.program = Program(
            graph, self._read_into, limits, store, progress, share_memory=not self._trace
        )
        self._table = gguf.tensors[self.program.embedding.name]
        self._attention = list(self.program.groups.values())
        groups = [
            CacheGroup(a.shape.window, a.n_blocks, a.table, a.shape.sinks) for a in self._attention
        ]
        self.cache = KVCache(groups, BLOCK, limits.max_tokens, graph.is_recurrent)

    def _read_into(self, weight: Weight, start: int, out: NDArray[np.uint8]) -> None:
        self._gguf.read_into(self._gguf.tensors[weight.name], start, out)

    def forward(self, runs: list[Run]) -> NDArray[np.float32]:
        """Compute the runs' tokens; logits [n wanted, n_vocab], valid until the next step.

        Advances ``n_computed`` only when the step is complete, so an interrupted one can be
        repeated or dropped.
        """
        inputs = self.program.inputs
        row, wanted = 0, 0
        spans: list[tuple[int, int, int, int]] = []
        for run in runs:
            sequence, n, first = run.sequence, run.n_tokens, run.sequence.n_computed
            self._read_embeddings(sequence.tokens[first : first + n], row)
            positions = np.arange(first, first + n)
            inputs.positions[row : row + n] = positions
            if self._limits.window is not None:
                behind_sinks = self._limits.window + self._limits.sinks - 1
                inputs.sink_positions[row : row + n] = np.minimum(positions, behind_sinks)
            inputs.last_positions[row : row + n] = first + n - 1
            slot = 2 * sequence.row + sequence.state
            inputs.runs[len(spans)] = row, n, slot if first else -1, slot ^ 1
            self.cache.extend(sequence, n)
            for attention, group in zip(self._attention, self.cache.groups, strict=True):
                attention.slots[row : row + n] = self.cache.slots(group, sequence, n)
            spans.append((row, n, first, sequence.row))
            n_wanted = {"none": 0, "last": 1, "all": n}[run.wanted]
            inputs.out_rows[wanted : wanted + n_wanted] = np.arange(row + n - n_wanted, row + n)
            row, wanted = row + n, wanted + n_wanted
        inputs.n_runs[0] = len(spans)
        for attention in self._attention:
            attention.plan(spans)
        n_positions = max(first + n for _, n, first, _ in spans)
        for table in self.program.tables.values():
            table.fill(n_positions)
        self.program.run(row, wanted)
        if self._trace:
            from edgellm.kernels.cpu.trace import check_ops

            check_ops(self.program, spans, wanted, self._read_into)
        for run in runs:
            run.sequence.n_computed += run.n_tokens
            run.sequence.state ^= 1
        return self.program.logits[:wanted]

    def _read_embeddings(self, tokens: list[int], row: int) -> None:
        size = self._table.row_bytes
        out = self.program.inputs.embeddings
        for i, token in enumerate(tokens):
            self._gguf.read_into(self._table, token * size, out[row + i])

    def close(self) -> None:
        self.program.close()
