"""Sequences into flat arrays, and one step of the program over them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.cpu.inputs import AttentionGroup, Limits
from edgellm.kernels.cpu.program import Program
from edgellm.kernels.cpu.store import KernelStore
from edgellm.kernels.graph import Graph, Weight
from edgellm.kernels.rows import select_early
from edgellm.kernels.split import Part, cpu_graph, places, split
from edgellm.kv_cache import CacheGroup, KVCache, NoRoom
from edgellm.kv_pools import DevicePool, HostPool, Pool
from edgellm.offload import Plan
from edgellm.quant.gguf import GGUF
from edgellm.samplers.chain import Candidates
from edgellm.sequence import Sequence

if TYPE_CHECKING:
    from edgellm.kernels.cuda.device import Device
    from edgellm.kernels.cuda.program import DeviceProgram


@dataclass(frozen=True)
class Offload:
    """Where layers run, and the devices that the plan names."""

    plan: Plan
    devices: Mapping[str, Device]


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one sequence in a step, and behind them the tokens of a ``draft``,
    which may turn out to be wrong. ``wanted``: whose logits are needed; with "last" those of the
    draft are too."""

    sequence: Sequence
    n_tokens: int  # without the draft's
    wanted: str  # "none", "last" or "all"
    draft: tuple[int, ...] = ()

    @property
    def n_rows(self) -> int:
        return self.n_tokens + len(self.draft)

    @property
    def n_wanted(self) -> int:
        return {"none": 0, "last": 1 + len(self.draft), "all": self.n_rows}[self.wanted]


class Runner:
    """Owns the program and the cache of one model; ``forward`` is one step."""

    def __init__(
        self, gguf: GGUF, graph: Graph, limits: Limits, store: KernelStore,
        progress: Callable[[int, int], None] | None = None, offload: Offload | None = None,
    ) -> None:  # fmt: skip
        """``offload`` None: all layers are on the CPU."""
        self._gguf, self._limits = gguf, limits
        self._trace = os.environ.get("EDGELLM_TRACE", "") == "ops"
        self.devices: dict[str, DeviceProgram] = {}
        # where every token sees the whole text, all of its rows are one pass, and nothing is reused
        self._is_strict = offload is not None and offload.plan.strict and graph.is_causal
        self._undecided: dict[Run, int] = {}  # states behind drafts
        cpu_share = graph
        if offload is not None:
            whole = select_early(graph, ())
            parts = split(whole, places(whole, offload.plan.place_of, offload.plan.kv_place))
            cpu_share = cpu_graph(whole, parts)
            self.devices = self._programs(parts, offload)
        self.program = Program(
            cpu_share, self._read_into, limits, store, progress,
            share_memory=not self._trace, devices=self.devices,
        )  # fmt: skip
        try:
            for device in self.devices.values():
                device.load(self.program.group_of, progress)
        except BaseException:
            self.close()
            raise
        self._table = gguf.tensors[self.program.embedding.name]
        self._attention = list(self.program.groups.values())
        self._pools = [self._pools_of(attention) for attention in self._attention]
        groups = [
            CacheGroup(a.shape.window, a.n_blocks, a.table, a.shape.sinks) for a in self._attention
        ]
        self.cache = KVCache(
            groups, limits.block, limits.max_tokens, limits.n_states if graph.is_recurrent else 0,
            self._copy_block, limits.max_seqs,
        )  # fmt: skip

    def _programs(self, parts: list[Part], offload: Offload) -> dict[str, DeviceProgram]:
        """One for each device that has a part."""
        from edgellm.kernels.cuda.program import DeviceProgram

        used = dict.fromkeys(part.place for part in parts if part.place in offload.devices)
        made = {
            name: DeviceProgram(
                offload.devices[name], [part for part in parts if part.place == name],
                self._limits, self._read_into, offload.plan.streamed,
            )
            for name in used
        }  # fmt: skip
        for program in made.values():
            program.peers = made
        return made

    def _pools_of(self, attention: AttentionGroup) -> list[Pool]:
        """Keys and values of a group's layers, on the CPU and then on the devices."""
        shape = attention.shape
        pools: list[Pool] = [HostPool(k, shape.key_block_bytes()) for k in attention.keys]
        pools += [HostPool(v, shape.value_block_bytes()) for v in attention.values]
        for program in self.devices.values():
            for buffer, block_bytes in program.pools(attention):
                pools.append(DevicePool(program.device, buffer, block_bytes))
        return pools

    def _copy_block(self, group: int, source: int, target: int) -> None:
        for pool in self._pools[group]:
            pool.copy(source, target)

    def read_block(self, group: int, block: int) -> bytes:
        """What a block holds, of all layers of its group."""
        return b"".join(pool.read(block) for pool in self._pools[group])

    def write_block(self, group: int, block: int, data: bytes) -> None:
        """The opposite of ``read_block``."""
        at = 0
        for pool in self._pools[group]:
            pool.write(block, data[at : at + pool.block_bytes])
            at += pool.block_bytes

    def block_bytes(self, group: int) -> int:
        """Length of ``read_block``."""
        return sum(pool.block_bytes for pool in self._pools[group])

    def read_state(self, slot: int) -> bytes:
        """The states of recurrent layers in a slot."""
        return b"".join(states[slot].tobytes() for states in self.program.state_slots)

    def write_state(self, slot: int, data: bytes) -> None:
        """The opposite of ``read_state``."""
        at = 0
        for states in self.program.state_slots:
            size = states.shape[1]
            states[slot] = np.frombuffer(data, np.uint8, size, at)
            at += size

    @property
    def state_bytes(self) -> int:
        """Length of ``read_state``."""
        return sum(states.shape[1] for states in self.program.state_slots)

    def _read_into(self, weight: Weight, start: int, out: NDArray[np.uint8]) -> None:
        self._gguf.read_into(self._gguf.tensors[weight.name], start, out)

    def forward(self, runs: list[Run]) -> NDArray[np.float32]:
        """Compute the runs' tokens; logits [n wanted, n_vocab], valid until the next step.

        Makes room where the scheduler has not (NoRoom), and advances ``n_computed`` only when the
        step is complete, so an interrupted one can be repeated or dropped. Runs with a draft have
        to be settled before the next step.
        """
        inputs, cache = self.program.inputs, self.cache
        while self._undecided:  # of a step whose results nobody took
            cache.states.drop(self._undecided.popitem()[1])
        row, wanted = 0, 0
        spans: list[tuple[int, int, int, int]] = []
        tokens: list[int] = []
        for run in runs:
            sequence, n, first = run.sequence, run.n_rows, run.sequence.n_computed
            if not cache.extend(sequence, n):
                raise NoRoom("The key-value cache has no room for the step (-c).")
            tokens += sequence.tokens[first : first + run.n_tokens]
            tokens += run.draft
            spans.append((row, n, first, sequence.row))
            n_wanted = run.n_wanted
            if n_wanted:
                inputs.out_rows[wanted : wanted + n_wanted] = range(row + n - n_wanted, row + n)
            row, wanted = row + n, wanted + n_wanted
        self._read_embeddings(tokens)
        self._describe(np.array(spans, np.int64), row)
        for attention in self._attention:
            if attention.keys:  # a layer of it is on the CPU
                attention.plan(spans)
        n_positions = max(first + n for _, n, first, _ in spans)
        for table in self.program.tables.values():
            table.fill(n_positions)
        if self.devices:
            is_decode = [
                self._is_strict or run.sequence.n_computed >= run.sequence.n_prompt for run in runs
            ]
            for device in self.devices.values():
                device.begin(spans, is_decode, inputs.out_rows[:wanted])
        with self._states(runs):
            self.program.run(row, wanted)
        if self._trace:
            from edgellm.kernels.cpu.trace import check_ops

            check_ops(self.program, spans, wanted, self._read_into)
        for run in runs:
            if not run.draft:
                cache.commit(run.sequence, run.n_tokens)
        return self.program.logits[:wanted]

    def best(self, runs: list[Run], n: int) -> list[Candidates]:
        """``forward`` for who needs no more than the ``n`` largest logits of each wanted row (0:
        all). Where a GPU makes the logits and n is small, the others stay there."""
        device = next((d for d in self.devices.values() if 0 < n <= d.most_best), None)
        if device is None:
            return [Candidates(row) for row in self.forward(runs)]
        with device.choosing(n):
            self.forward(runs)
            ids, logits = device.best(sum(run.n_wanted for run in runs))
        return [Candidates(*row, ordered=True) for row in zip(logits, ids, strict=True)]

    def room(self, n_rows: int, n_wanted: int) -> int:
        """How many rows with logits fit beside those of a step."""
        return min(self._limits.max_tokens - n_rows, self._limits.max_out - n_wanted)

    def settle(self, run: Run, n_accepted: int) -> None:
        """The first ``n_accepted`` tokens of a run's draft were right, and are its sequence's now.

        What was computed of the others lies behind the sequence's end, where it is written over.
        A recurrent state cannot be cut: unless all were right it stays what it was before the step,
        and the run's tokens are computed once more beside those of the next step.
        """
        sequence = run.sequence
        n_known = run.n_tokens + n_accepted
        if self.cache.is_recurrent:
            slot = self._undecided.pop(run)
            if n_accepted < len(run.draft):
                self.cache.states.drop(slot)
                sequence.n_again = n_known
                return
            self._take_state(sequence, slot)
        self.cache.commit(sequence, n_known)

    def _describe(self, spans: NDArray[np.int64], n: int) -> None:
        """Positions and slots of all ``n`` rows. ``spans``: first row, tokens, first position and
        table row of each run."""
        inputs, lengths, block = self.program.inputs, spans[:, 1], self.cache.block
        if n == len(spans):  # everybody generates
            positions = last_positions = spans[:, 2]
            table_rows = spans[:, 3]
        else:
            positions = np.arange(n) + np.repeat(spans[:, 2] - spans[:, 0], lengths)
            last_positions = np.repeat(spans[:, 2] + lengths - 1, lengths)
            table_rows = np.repeat(spans[:, 3], lengths)
        inputs.positions[:n] = positions
        inputs.last_positions[:n] = last_positions
        if self._limits.window is not None:
            behind_sinks = self._limits.window + self._limits.sinks - 1
            inputs.sink_positions[:n] = np.minimum(positions, behind_sinks)
        places, within = np.divmod(positions, block)
        for attention in self._attention:
            attention.slots[:n] = attention.table[table_rows, places]
            attention.slots[:n] *= block
            attention.slots[:n] += within

    @contextmanager
    def _states(self, runs: list[Run]) -> Iterator[None]:
        """Slots for the recurrent states of a step: it reads one and writes another, so what it
        began with is there until it is done."""
        inputs, states = self.program.inputs, self.cache.states
        inputs.n_runs[0] = len(runs)
        if not self.cache.is_recurrent:
            yield
            return
        new: list[int] = []
        try:
            row = 0
            for i, run in enumerate(runs):
                slot = states.take()
                assert slot is not None  # there are two for each running sequence
                new.append(slot)
                inputs.runs[i] = row, run.n_rows, run.sequence.state, slot
                row += run.n_rows
            yield
        except BaseException:
            for slot in new:
                states.drop(slot)
            raise
        for run, slot in zip(runs, new, strict=True):
            if run.draft:
                self._undecided[run] = slot
            else:
                self._take_state(run.sequence, slot)

    def _take_state(self, sequence: Sequence, slot: int) -> None:
        if sequence.state >= 0:
            self.cache.states.drop(sequence.state)
        sequence.state, sequence.n_again = slot, 0

    def _read_embeddings(self, tokens: list[int]) -> None:
        size, out = self._table.row_bytes, self.program.inputs.embeddings
        for row, token in enumerate(tokens):
            self._gguf.read_into(self._table, token * size, out[row])

    @property
    def is_alive(self) -> bool:
        """Whether there can be another step."""
        return self.program.team.is_alive and not self.lost_device

    @property
    def lost_device(self) -> str:
        """The name of a device that failed, which this process can use no more; else nothing."""
        return next((d.device.name for d in self.devices.values() if d.is_broken), "")

    def close(self) -> None:
        self.program.close()
        self._free_devices()

    def _free_devices(self) -> None:
        for device in self.devices.values():
            device.close()
