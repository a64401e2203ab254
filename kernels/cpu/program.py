"""The CPU back end: a graph compiled into stages that the team walks.

One program serves every batch: batch size, positions, slots and block tables are read from arrays
in memory, whose layout is fixed for the largest batch. The engine fills ``StepInputs`` and calls
``run``; between two ops there is no Python.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.cpu import (
    lower_attention,
    lower_experts,
    lower_recurrent,
    lower_rows,
    targets,
)
from edgellm.kernels.cpu.activations import PLAIN, Activation, make_quantize, quantized
from edgellm.kernels.cpu.attention import AttentionShape
from edgellm.kernels.cpu.gated import columns_of_chunk, gated_blocks, lower_gated
from edgellm.kernels.cpu.hooks import Hook, HookFunction
from edgellm.kernels.cpu.inputs import AttentionGroup, Limits, StepInputs
from edgellm.kernels.cpu.linear import make_linear
from edgellm.kernels.cpu.lowering import Lowering, PartRunner, ProgramError
from edgellm.kernels.cpu.memory import allocate, round_up
from edgellm.kernels.cpu.stages import Argument, Buffer, Stages
from edgellm.kernels.cpu.store import KernelStore
from edgellm.kernels.cpu.team import LINE, Team, TeamError
from edgellm.kernels.cpu.weights import LinearKernel, PackedWeights, ReadInto, linear_kernel
from edgellm.kernels.graph import MATRIX_OPS, Graph, Op, Rope, Rows, Tensor, Weight
from edgellm.kernels.rope import RopeTable
from edgellm.kernels.rows import select_early
from edgellm.kernels.split import outputs

__all__ = ["LOWERINGS", "Program", "ProgramError"]

_SHORT = 16  # tokens: such steps are bound by memory and full of barriers
_CHUNK_GROUPS, _CHUNKS = 16, 16  # row groups a chunk at most; chunks a matrix at least


class Program:
    """A model on the CPU. ``run`` evaluates one step; see ``StepInputs`` and ``AttentionGroup``."""

    def __init__(
        self, graph: Graph, read_into: ReadInto, limits: Limits, store: KernelStore,
        progress: Callable[[int, int], None] | None = None, share_memory: bool = True,
        devices: Mapping[str, PartRunner] | None = None,
    ) -> None:  # fmt: skip
        """``devices`` run the graph's parts of other places (see split)."""
        self._whole, self.limits, self.store = graph, limits, store
        self._devices = devices or {}
        self.graph = graph  # as it is computed: see lower
        self.target = targets.current()
        self._read_into = read_into
        embedding = next(op for op in graph.ops if op.kind == "embed").weights["table"]
        self.embedding = embedding
        self.inputs = StepInputs(limits, embedding.type.row_bytes(embedding.n_in))
        self.groups: dict[AttentionShape, AttentionGroup] = {}
        self.tables: dict[Rope, RopeTable] = {}
        self.temperatures: dict[tuple[float, int], NDArray[np.float32]] = {}
        matrices = {
            op.weights["weight"].name: op.weights["weight"]
            for op in graph.ops
            if op.kind in MATRIX_OPS
        }
        self._kernels = {
            (w.type.id, w.precise): linear_kernel(w.type, self.target, w.precise)
            for op in graph.ops
            if op.kind in MATRIX_OPS
            for w in (op.weights["weight"],)
        }
        self._vectors: dict[str, NDArray[np.float32]] = {}
        # attention op and what its cache is like -> its number in its group
        self.cache_layers: dict[tuple[int, AttentionShape], int] = {}
        self.states: dict[int, NDArray[np.uint8]] = {}  # recurrent op -> [slot], see recurrent
        self._share_memory = share_memory
        self.hooks: dict[Tensor, list[Hook]] = {}
        shapes = [lower_attention.shape_of(self, op) for op in graph.ops if op.kind == "attention"]
        self.scratch_bytes = round_up(max((s.scratch_bytes() for s in shapes), default=64), 4096)
        self.scratch = allocate(limits.n_threads * self.scratch_bytes)
        for kernel in self._kernels.values():  # compile what has to be compiled before loading
            self._linear_address(kernel)
        self.weights = PackedWeights(
            list(matrices.values()), read_into, store, self.target, limits.n_threads, progress
        )
        self.seconds = 0.0  # in which kernels ran, of all steps so far
        self.team = Team(limits.n_threads, store, limits.cpus)
        self.lower()

    def lower(self) -> None:
        """Ops to stages and memory; again when hooks come or go. Weights and caches stay."""
        # a graph that was split has its rows selected already
        self.graph = self._whole if self._devices else select_early(self._whole, self.hooks)
        self._wanted = self._activations_wanted()
        self.stages = Stages()
        self.buffers: dict[Tensor, Buffer] = {}
        self._quantized: dict[tuple[Tensor, Activation], Buffer] = {}
        # where rows go, by route or by heads and kind of rows: see experts
        self.places: dict[Tensor | tuple[int, Rows], tuple[Buffer, Buffer]] = {}
        gated = gated_blocks(self.graph, set(self.hooks))
        columns = {op: n for op in gated if (n := columns_of_chunk(self, op))}
        within = {op for block in columns for op in gated[block]}
        for op in self.graph.ops:
            if op in columns:
                lower_gated(self, op, gated[op], columns[op])
            elif op not in within:
                LOWERINGS.get(op.kind, _refuse)(self, op)
                for hook in self.hooks.get(op.output, ()):
                    self._lower_hook(op, hook)
                for tensor in outputs(op):
                    self._quantize_output(tensor)
        self._arena = self.stages.plan(self._share_memory)
        self._records, self._counters = self.stages.records(self.limits.n_threads)
        self._walks = self.stages.walks()
        self.logits = self._view(self.graph.output)

    def keep_in(self, k_type: str, v_type: str) -> list[AttentionGroup]:
        """Go on with keys and values in these types (names of KV_TYPES); returns their groups. Each
        pair of types has caches of its own, which stay; so do weights and recurrent states."""
        self.limits = replace(self.limits, k_type=k_type, v_type=v_type)
        self.lower()
        attention = (op for op in self.graph.ops if op.kind == "attention")
        return list(dict.fromkeys(self.group_of(op) for op in attention))

    def _view(self, tensor: Tensor) -> NDArray[np.float32]:
        """A tensor's rows [all that fit, dim] where they lie in the arena."""
        buffer = self.buffers[tensor]
        start, first = buffer.whole.address - self._arena.ctypes.data, buffer.offset // 4
        floats = self._arena[start : start + buffer.whole.n_bytes].view(np.float32)
        return floats.reshape(buffer.n_rows, -1)[:, first : first + tensor.dim]

    def run(self, n_tokens: int, n_out: int, profile: NDArray[np.int64] | None = None) -> None:
        """One step over what ``inputs`` and ``groups`` describe; logits [n_out, n_vocab] after."""
        self.inputs.counts[0], self.inputs.counts[LINE] = n_tokens, n_out
        self._counters[:] = 0
        started = time.perf_counter()
        for first, end, behind in self._walks:
            if end > first:
                stamps = None if profile is None else profile[2 * first :]
                self.team.run(self._records[first:end], stamps, is_short=n_tokens <= _SHORT)
            if behind is not None:
                behind()
        self.seconds += time.perf_counter() - started
        for hooks in self.hooks.values():
            for hook in hooks:
                hook.raise_error()
        if self.team.was_aborted:
            raise TeamError("the step was given up: the model is being closed")

    def profile(self, n_tokens: int, n_out: int) -> list[tuple[str, float, float]]:
        """(label, cycles waiting, cycles working) of the CPU's stages as thread 0 saw them."""
        stamps = np.zeros(2 * len(self._records) + 2, np.int64)
        self.run(n_tokens, n_out, stamps)
        return [
            (s.label, float(stamps[2 * i + 1] - stamps[2 * i]),
             float(stamps[2 * i + 2] - stamps[2 * i + 1]))
            for i, s in enumerate(self.stages.stages) if s.run is None
        ]  # fmt: skip

    def values(self, tensor: Tensor, n_rows: int) -> NDArray[np.float32]:
        """A tensor after a step; only with ``share_memory=False`` it is certain to be whole."""
        return self._view(tensor)[:n_rows].copy()

    def add_hooks(self, functions: Mapping[Tensor, HookFunction]) -> list[tuple[Tensor, Hook]]:
        """Call each function with its tensor in every step, before anybody else reads it."""
        added = [(t, Hook(function, self.team.abort)) for t, function in functions.items()]
        for tensor, hook in added:
            self.hooks.setdefault(tensor, []).append(hook)
        self.lower()
        return added

    def remove_hooks(self, added: list[tuple[Tensor, Hook]]) -> None:
        for tensor, hook in added:
            if hook in self.hooks.get(tensor, []):
                self.hooks[tensor].remove(hook)
                if not self.hooks[tensor]:
                    del self.hooks[tensor]
        self.lower()

    @property
    def arena_bytes(self) -> int:
        return self._arena.nbytes + self.scratch.nbytes

    @property
    def state_slots(self) -> list[NDArray[np.uint8]]:
        """What recurrent layers keep, [slot, bytes] of each."""
        return [states.reshape(self.limits.n_states, -1) for states in self.states.values()]

    def close(self) -> None:
        """Stop the threads and let go of the memory, also where somebody still holds the program,
        as a request that has just ended may."""
        self.team.close()
        self.weights.data = self.weights.data[:0].copy()
        for group in self.groups.values():
            group.keys.clear()
            group.values.clear()
        self.states.clear()

    # ---- what lowerings use ---------------------------------------------------------------------

    def _lower_hook(self, op: Op, hook: Hook) -> None:
        tensor, buffer = op.output, self.buffers[op.output]
        n_rows = self.inputs.counts[LINE if tensor.rows == "out" else 0 :][:1]
        hook.rows = lambda: self._view(tensor)[: int(n_rows[0])]
        once = self.stages.constant(1)
        self.stages.parallel(op.label, hook.address, [], once, 1, [buffer], [buffer])

    def count(self, tensor: Tensor) -> int:
        """The address of the number of a tensor's rows."""
        return self.inputs.n_out_at if tensor.rows == "out" else self.inputs.n_tokens_at

    def rows(self, tensor: Tensor) -> int:
        """How many rows a tensor has at most."""
        return self.limits.max_out if tensor.rows == "out" else self.limits.max_tokens

    def output(self, op: Op) -> Buffer:
        """A buffer for what the op puts out; rows are padded to 16 floats."""
        buffer = self.stages.buffer(self.rows(op.output), 4 * op.output.dim)
        self.buffers[op.output] = buffer
        return buffer

    def load(self, weight: Weight) -> NDArray[np.float32]:
        """A small tensor of the file as float32, in numpy's order."""
        n_rows = math.prod(weight.shape[1:])
        raw = np.empty((n_rows, weight.type.row_bytes(weight.n_in)), np.uint8)
        self._read_into(weight, 0, raw.reshape(-1))
        return weight.type.dequantize(raw).reshape(weight.shape[::-1])

    def vector(self, weight: Weight, transposed: bool = False) -> int:
        """The address of such a tensor, with room for a vector behind it."""
        if weight.name not in self._vectors:
            values = self.load(weight)
            values = values.T if transposed else values
            data = np.zeros(values.size + 16, np.float32)
            data[: values.size] = values.reshape(-1)
            self._vectors[weight.name] = data
        return self._vectors[weight.name].ctypes.data

    def _quantize_output(self, x: Tensor) -> None:
        """Quantize a tensor right where it is made, once for each format its readers want."""
        for form in self.forms(x):
            kernel = self.store.get(f"quantize_{form.name}", make_quantize(form))
            source, out = self.buffers[x], self.quantized_buffer(x, form)
            n_spans = x.dim // form.span
            args: list[Argument] = [source, source.row_bytes, out, out.row_bytes, n_spans]
            self.stages.rows("quantize", kernel, args, self.count(x), [source], [out])

    def forms(self, x: Tensor) -> list[Activation]:
        """The quantized formats in which a tensor is read."""
        return self._wanted.get(x, [])

    def quantized_buffer(self, x: Tensor, form: Activation) -> Buffer:
        out = self.stages.buffer(self.buffers[x].n_rows, form.row_bytes(x.dim))
        self._quantized[x, form] = out
        return out

    def row_op(
        self, op: Op, kernel: int, args: list[Argument], reads: list[Buffer], out: Buffer
    ) -> None:
        self.stages.rows(op.label, kernel, args, self.count(op.output), reads, [out])

    def _kernel_of(self, weight: Weight) -> LinearKernel:
        return self._kernels[weight.type.id, weight.precise]

    def _activations_wanted(self) -> dict[Tensor, list[Activation]]:
        """The quantized formats in which each tensor is read."""
        wanted: dict[Tensor, list[Activation]] = {}
        for op in self.graph.ops:
            if op.kind in MATRIX_OPS:
                form = self._kernel_of(op.weights["weight"]).activation
                forms = wanted.setdefault(op.inputs[0], [])
                if form is not PLAIN and form not in forms:
                    forms.append(form)
        return wanted

    def as_read(self, op: Op, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """The input [n, dim] of a linear op as its kernel reads it."""
        return quantized(x, self._kernel_of(op.weights["weight"]).activation)

    def group_of(self, op: Op) -> AttentionGroup:
        """The cache group of an attention op, wherever it runs."""
        shape = lower_attention.shape_of(self, op)
        if shape not in self.groups:
            at = LINE * (2 + len(self.groups))
            self.groups[shape] = AttentionGroup(shape, self.limits, self.inputs.counts[at : at + 1])
        return self.groups[shape]

    def _linear_address(self, kernel: LinearKernel) -> int:
        return self.store.get(kernel.name, make_linear(kernel.tile))

    def activations(self, x: Tensor, form: Activation) -> Buffer:
        return self.buffers[x] if form is PLAIN else self._quantized[x, form]

    def matrix(self, weight: Weight) -> tuple[LinearKernel, int, int, int, int]:
        """Kernel, blocks a row, row groups, groups a chunk and chunks of a matrix."""
        kernel = self._kernel_of(weight)
        span = max(kernel.tile.block, kernel.activation.span)
        if weight.n_in % span:
            raise ProgramError(
                f"{weight.name}: rows of {weight.n_in} are no multiple of {span} long"
            )
        n_blocks = weight.n_in // kernel.tile.block
        n_groups = kernel.n_groups(weight, self.target.lanes)
        chunk = max(1, min(_CHUNK_GROUPS, -(-n_groups // _CHUNKS)))
        return kernel, n_blocks, n_groups, chunk, -(-n_groups // chunk)

    def linear_call(self, op: Op, chunk: int) -> tuple[int, list[Argument], Buffer, Buffer]:
        """A linear op's kernel, with its arguments for ``chunk`` groups at a time, input and
        output."""
        weight, bias = op.weights["weight"], op.weights.get("bias")
        kernel, n_blocks, n_groups, _, _ = self.matrix(weight)
        x, out = self.activations(op.inputs[0], kernel.activation), self.output(op)
        args: list[Argument] = [
            self.weights.address(weight), x, out, n_blocks, x.row_bytes, out.row_bytes,
            self.vector(bias) if bias is not None else 0, n_groups, chunk,
            kernel.group_bytes(weight, self.target.lanes), self.count(op.output),
        ]  # fmt: skip
        return self._linear_address(kernel), args, x, out


def _linear(p: Program, op: Op) -> None:
    *_, chunk, n_chunks = p.matrix(op.weights["weight"])
    kernel, args, x, out = p.linear_call(op, chunk)
    p.stages.parallel(op.label, kernel, args, p.stages.constant(n_chunks), 1, [x], [out])


def _part(p: Program, op: Op) -> None:
    """Ops of another device: the team stands still while they run."""
    part = op.attrs["part"]
    device, reads = p._devices[part.place], [p.buffers[t] for t in part.reads]
    for tensor in part.writes:
        p.buffers[tensor] = p.stages.buffer(p.rows(tensor), 4 * tensor.dim)

    def rows(tensor: Tensor) -> NDArray[np.float32]:
        n = p.inputs.counts[LINE if tensor.rows == "out" else 0]
        return p._view(tensor)[: int(n)]

    p.stages.cut(
        f"{part.place}: {part.ops[0].label} to {part.ops[-1].label}",
        lambda: device.run(part, rows), reads, [p.buffers[t] for t in part.writes],
    )  # fmt: skip


def _refuse(p: Program, op: Op) -> None:
    raise ProgramError(f"{op.label}: the CPU back end has no op {op.kind!r}")


LOWERINGS: dict[str, Lowering] = {
    "linear": _linear,
    "part": _part,
    **lower_rows.LOWERINGS,
    **lower_attention.LOWERINGS,
    **lower_experts.LOWERINGS,
    **lower_recurrent.LOWERINGS,
}
