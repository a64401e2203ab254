"""The CPU back end: a graph compiled into stages that the team walks.

One program serves every batch: batch size, positions, slots and block tables are read from arrays
in memory, whose layout is fixed for the largest batch. The engine fills ``StepInputs`` and calls
``run``; between two ops there is no Python.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.cpu import attention, elementwise, experts, targets
from edgellm.kernels.cpu.activations import PLAIN, Activation, make_quantize, quantized
from edgellm.kernels.cpu.attention import AttentionShape
from edgellm.kernels.cpu.hooks import Hook, HookFunction
from edgellm.kernels.cpu.inputs import AttentionGroup, Limits, StepInputs
from edgellm.kernels.cpu.linear import make_linear
from edgellm.kernels.cpu.memory import allocate, round_up
from edgellm.kernels.cpu.stages import Argument, Buffer, Stages
from edgellm.kernels.cpu.store import KernelStore
from edgellm.kernels.cpu.team import LINE, Team
from edgellm.kernels.cpu.weights import LinearKernel, PackedWeights, ReadInto, linear_kernel
from edgellm.kernels.graph import Graph, Op, Rope, Tensor, Weight
from edgellm.kernels.rope import RopeTable
from edgellm.kernels.rows import select_early

_CHUNK_GROUPS, _CHUNKS = 16, 16  # row groups a chunk at most; chunks a matrix at least


class ProgramError(ValueError):
    """The graph asks for something the CPU back end cannot do."""


class Program:
    """A model on the CPU. ``run`` evaluates one step; see ``StepInputs`` and ``AttentionGroup``."""

    def __init__(
        self, graph: Graph, read_into: ReadInto, limits: Limits, store: KernelStore,
        progress: Callable[[int, int], None] | None = None, share_memory: bool = True,
    ) -> None:  # fmt: skip
        self._whole, self.limits, self._store = graph, limits, store
        self.graph = graph  # as it is computed: see lower
        self.target = targets.current()
        self._read_into = read_into
        embedding = next(op for op in graph.ops if op.kind == "embed").weights["table"]
        self.embedding = embedding
        self.inputs = StepInputs(limits, embedding.type.row_bytes(embedding.n_in))
        self.groups: dict[AttentionShape, AttentionGroup] = {}
        self.tables: dict[Rope, RopeTable] = {}
        matrices = {
            op.weights["weight"].name: op.weights["weight"]
            for op in graph.ops
            if op.kind in ("linear", "moe_linear")
        }
        self._kernels = {
            w.type.id: linear_kernel(w.type, self.target, graph.precise) for w in matrices.values()
        }
        self._vectors: dict[str, NDArray[np.float32]] = {}
        self._cache_layers: dict[int, int] = {}  # attention op -> its number in its group
        self._share_memory = share_memory
        self.hooks: dict[Tensor, list[Hook]] = {}
        self._scratch_bytes = self._scratch_of_a_thread()
        self._scratch = allocate(limits.n_threads * self._scratch_bytes)
        for kernel in self._kernels.values():  # compile what has to be compiled before loading
            self._linear_address(kernel)
        self.weights = PackedWeights(
            list(matrices.values()), read_into, store, self.target, limits.n_threads, progress
        )
        self.team = Team(limits.n_threads, store, limits.cpus)
        self.lower()

    def lower(self) -> None:
        """Ops to stages and memory; again when hooks come or go. Weights and caches stay."""
        self.graph = select_early(self._whole, self.hooks)
        self._wanted = _activations_wanted(self.graph, self._kernels)
        self.stages = Stages()
        self.buffers: dict[Tensor, Buffer] = {}
        self._quantized: dict[tuple[Tensor, Activation], Buffer] = {}
        self._places: dict[Tensor, tuple[Buffer, Buffer]] = {}  # of a route: see experts
        for op in self.graph.ops:
            getattr(self, f"_lower_{op.kind}", self._refuse)(op)
            for hook in self.hooks.get(op.output, ()):
                self._lower_hook(op, hook)
            self._quantize_output(op.output)
        self._arena = self.stages.plan(self._share_memory)
        self._records, self._counters = self.stages.records(self.limits.n_threads)
        self.logits = self._view(self.graph.output)

    def _view(self, tensor: Tensor) -> NDArray[np.float32]:
        """A tensor's rows [all that fit, dim] where they lie in the arena."""
        buffer = self.buffers[tensor]
        start = buffer.address - self._arena.ctypes.data
        floats = self._arena[start : start + buffer.n_bytes].view(np.float32)
        return floats.reshape(buffer.n_rows, -1)[:, : tensor.dim]

    def run(self, n_tokens: int, n_out: int, profile: NDArray[np.int64] | None = None) -> None:
        """One step over what ``inputs`` and ``groups`` describe; logits [n_out, n_vocab] after."""
        self.inputs.counts[0], self.inputs.counts[LINE] = n_tokens, n_out
        self._counters[:] = 0
        self.team.run(self._records, profile)
        for hooks in self.hooks.values():
            for hook in hooks:
                hook.raise_error()

    def profile(self, n_tokens: int, n_out: int) -> list[tuple[str, float, float]]:
        """(label, cycles waiting, cycles working) of each stage as thread 0 saw it."""
        stamps = np.zeros(2 * len(self._records) + 2, np.int64)
        self.run(n_tokens, n_out, stamps)
        return [
            (s.label, float(stamps[2 * i + 1] - stamps[2 * i]),
             float(stamps[2 * i + 2] - stamps[2 * i + 1]))
            for i, s in enumerate(self.stages.stages)
        ]  # fmt: skip

    def values(self, tensor: Tensor, n_rows: int) -> NDArray[np.float32]:
        """A tensor after a step; only with ``share_memory=False`` it is certain to be whole."""
        return self._view(tensor)[:n_rows].copy()

    def add_hook(self, tensor: Tensor, function: HookFunction) -> Hook:
        """Call ``function`` with the tensor in every step, before anybody else reads it."""
        hook = Hook(function, self.team.abort)
        self.hooks.setdefault(tensor, []).append(hook)
        self.lower()
        return hook

    def remove_hook(self, tensor: Tensor, hook: Hook) -> None:
        if hook in self.hooks.get(tensor, []):
            self.hooks[tensor].remove(hook)
            if not self.hooks[tensor]:
                del self.hooks[tensor]
            self.lower()

    @property
    def arena_bytes(self) -> int:
        return self._arena.nbytes + self._scratch.nbytes

    def close(self) -> None:
        """Stop the threads and let go of the memory."""
        self.team.close()

    # ---- lowering: one method for each op -------------------------------------------------------

    def _refuse(self, op: Op) -> None:
        raise ProgramError(f"{op.label}: the CPU back end has no op {op.kind!r}")

    def _lower_hook(self, op: Op, hook: Hook) -> None:
        tensor, buffer = op.output, self.buffers[op.output]
        n_rows = self.inputs.counts[LINE if tensor.rows == "out" else 0 :][:1]
        hook.rows = lambda: self._view(tensor)[: int(n_rows[0])]
        once = self.stages.constant(1)
        self.stages.parallel(op.label, hook.address, [], once, 1, [buffer], [buffer])

    def _count(self, tensor: Tensor) -> int:
        return self.inputs.n_out_at if tensor.rows == "out" else self.inputs.n_tokens_at

    def _rows(self, tensor: Tensor) -> int:
        return self.limits.max_out if tensor.rows == "out" else self.limits.max_tokens

    def _output(self, op: Op) -> Buffer:
        if op.kind != "linear" and op.kind != "moe_route" and op.output.dim % 16:
            raise ProgramError(f"{op.label}: rows of {op.output.dim} are no multiple of 16 long")
        buffer = self.stages.buffer(self._rows(op.output), 4 * op.output.dim)
        self.buffers[op.output] = buffer
        return buffer

    def _vector(self, weight: Weight) -> int:
        """The address of a float32 vector of the file, padded to whole lanes."""
        if weight.name not in self._vectors:
            data = np.zeros(round_up(weight.n_in, 16), np.float32)
            raw = np.empty(weight.type.row_bytes(weight.n_in), np.uint8)
            self._read_into(weight, 0, raw)
            data[: weight.n_in] = weight.type.dequantize(raw)
            self._vectors[weight.name] = data
        return self._vectors[weight.name].ctypes.data

    def _quantize_output(self, x: Tensor) -> None:
        """Quantize a tensor right where it is made, once for each format its readers want."""
        for form in self._wanted.get(x, ()):
            kernel = self._store.get(f"quantize_{form.name}", make_quantize(form))
            source = self.buffers[x]
            out = self.stages.buffer(source.n_rows, form.row_bytes(x.dim))
            self._quantized[x, form] = out
            n_spans = x.dim // form.span
            args: list[Argument] = [source, source.row_bytes, out, out.row_bytes, n_spans]
            self.stages.rows("quantize", kernel, args, self._count(x), [source], [out])

    def _row_op(
        self, op: Op, kernel: int, args: list[Argument], reads: list[Buffer], out: Buffer
    ) -> None:
        self.stages.rows(op.label, kernel, args, self._count(op.output), reads, [out])

    def _lower_embed(self, op: Op) -> None:
        table, raw, out = op.weights["table"], self.inputs.embeddings, self._output(op)
        kernel = self._store.get(f"embed_{table.type.name}", elementwise.make_embed(table.type))
        n_blocks = table.n_in // table.type.block
        args: list[Argument] = [
            raw.ctypes.data, raw.strides[0], out, out.row_bytes, n_blocks
        ]  # fmt: skip
        self._row_op(op, kernel, args, [], out)

    def _lower_select(self, op: Op) -> None:
        x, out = self.buffers[op.inputs[0]], self._output(op)
        kernel = self._store.get("select", elementwise.make_select())
        numbers = self.inputs.out_rows.ctypes.data
        args: list[Argument] = [x, x.row_bytes, numbers, out, out.row_bytes, op.output.dim]
        self._row_op(op, kernel, args, [x], out)

    def _lower_rms_norm(self, op: Op) -> None:
        x, out, weight = self.buffers[op.inputs[0]], self._output(op), op.weights["weight"]
        kernel = self._store.get("rms_norm", elementwise.make_rms_norm())
        eps = int(np.float32(op.attrs["eps"]).view(np.uint32))
        args: list[Argument] = [
            x, x.row_bytes, self._vector(weight), out, out.row_bytes,
            op.output.dim // weight.n_in, weight.n_in, eps,
        ]  # fmt: skip
        self._row_op(op, kernel, args, [x], out)

    def _map(self, op: Op, kernel: int) -> None:
        inputs, out = [self.buffers[t] for t in op.inputs], self._output(op)
        args: list[Argument] = []
        for x in inputs:
            args += [x, x.row_bytes]
        self._row_op(op, kernel, [*args, out, out.row_bytes, op.output.dim], inputs, out)

    def _lower_add(self, op: Op) -> None:
        self._map(op, self._store.get("add", elementwise.make_add()))

    def _lower_scale(self, op: Op) -> None:
        factor = float(np.float32(op.attrs["factor"]))
        name = "scale_" + factor.hex().replace(".", "_").replace("-", "m").replace("+", "")
        self._map(op, self._store.get(name, elementwise.make_scale(factor)))

    def _lower_swiglu(self, op: Op) -> None:
        self._map(op, self._store.get("swiglu", elementwise.make_swiglu()))

    def _lower_geglu(self, op: Op) -> None:
        self._map(op, self._store.get("geglu", elementwise.make_geglu()))

    def _lower_rope(self, op: Op) -> None:
        self._rotate(op, self._output(op), self.inputs.positions)

    def _rotate(self, op: Op, out: Buffer, positions: NDArray[np.int64]) -> None:
        """The rope op with given positions, into ``out``."""
        rope, head_dim = op.attrs["rope"], op.attrs["head_dim"]
        if rope not in self.tables:
            factors = None
            if rope.factors is not None:
                self._vector(rope.factors)
                factors = self._vectors[rope.factors.name][: rope.dim // 2]
            self.tables[rope] = RopeTable(rope, factors, self.limits.n_ctx)
        x = self.buffers[op.inputs[0]]
        kernel = self._store.get(
            f"rope_{rope.layout}_{rope.dim}_{head_dim}", elementwise.make_rope(rope, head_dim)
        )
        args: list[Argument] = [
            x, x.row_bytes, positions.ctypes.data,
            self.tables[rope].rows.ctypes.data, out, out.row_bytes, op.output.dim // head_dim,
        ]  # fmt: skip
        self._row_op(op, kernel, args, [x], out)

    def _shape(self, op: Op) -> AttentionShape:
        a, window, sinks = op.attrs, op.attrs["window"], 0
        ring = self.limits.window
        if ring is not None and (window is None or window > ring):
            window, sinks = ring, self.limits.sinks
        return AttentionShape(
            a["n_heads"], a["n_kv_heads"], a["head_dim"], a["scale"], window,
            self.limits.kv_bytes, sinks,
        )  # fmt: skip

    def as_read(self, op: Op, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """The input [n, dim] of a linear op as its kernel reads it."""
        return quantized(x, self._kernels[op.weights["weight"].type.id].activation)

    def group_of(self, op: Op) -> AttentionGroup:
        """The cache group of an attention op."""
        return self.groups[self._shape(op)]

    def _scratch_of_a_thread(self) -> int:
        """Bytes for the largest attention tile."""
        shapes = (self._shape(op) for op in self.graph.ops if op.kind == "attention")
        return round_up(max((s.scratch_bytes() for s in shapes), default=64), 4096)

    def _group(self, shape: AttentionShape) -> AttentionGroup:
        if shape not in self.groups:
            at = LINE * (2 + len(self.groups))
            counts = self.inputs.counts[at : at + 1]
            self.groups[shape] = AttentionGroup(shape, self.limits, counts)
        return self.groups[shape]

    def _lower_attention(self, op: Op) -> None:
        group = self._group(self._shape(op))
        shape = group.shape
        layer = self._cache_layers.setdefault(id(op), -1)
        if layer < 0:
            layer = self._cache_layers[id(op)] = group.add_layer()
        keys, values = group.keys[layer].ctypes.data, group.values[layer].ctypes.data
        q, k, v = (self.buffers[t] for t in op.inputs)
        cache = self.stages.buffer(0, 0)  # stands for the layer's pool: written, then read
        out = self._output(op)
        store = self._store.get(f"kv_store_{shape.name}", attention.make_kv_store(shape))
        args: list[Argument] = [
            k, k.row_bytes, v, v.row_bytes, group.slots.ctypes.data, keys, values
        ]  # fmt: skip
        self.stages.rows(op.label, store, args, self._count(op.output), [k, v], [cache])
        sink_q = self._query_for_sinks(op) if shape.sinks else q
        attend = self._store.get(f"attention_{shape.name}", attention.make_attention(shape))
        args = [
            group.items.ctypes.data, q, q.row_bytes, out, out.row_bytes,
            self.inputs.positions.ctypes.data, group.table.ctypes.data, group.table.strides[0],
            keys, values, self._scratch.ctypes.data, self._scratch_bytes,
            group.partials.ctypes.data, sink_q,
        ]  # fmt: skip
        reads = [q, cache] if sink_q is q else [q, sink_q, cache]
        self.stages.parallel(op.label, attend, args, group.count.ctypes.data, 1, reads, [out])
        merge = self._store.get(f"merge_{shape.name}", attention.make_merge(shape))
        args = [out, out.row_bytes, group.splits.ctypes.data, group.partials.ctypes.data]
        self.stages.rows(op.label, merge, args, self._count(op.output), [out], [out])

    def _query_for_sinks(self, op: Op) -> Buffer:
        """The attention op's queries rotated as if they stood right behind the sinks."""
        made = next(o for o in self.graph.ops if o.output is op.inputs[0])
        if made.kind != "rope":  # a layer without rotation sees no difference
            return self.buffers[op.inputs[0]]
        plain = self.buffers[op.inputs[0]]
        out = self.stages.buffer(plain.n_rows, plain.row_bytes)
        self._rotate(made, out, self.inputs.sink_positions)
        return out

    def _linear_address(self, kernel: LinearKernel) -> int:
        return self._store.get(kernel.name, make_linear(kernel.tile))

    def _activations(self, x: Tensor, form: Activation) -> Buffer:
        return self.buffers[x] if form is PLAIN else self._quantized[x, form]

    def _matrix(self, weight: Weight) -> tuple[LinearKernel, int, int, int, int]:
        """Kernel, blocks a row, row groups, groups a chunk and chunks of a matrix."""
        kernel = self._kernels[weight.type.id]
        n_blocks = weight.n_in // kernel.tile.block
        n_groups = kernel.n_groups(weight, self.target.lanes)
        chunk = max(1, min(_CHUNK_GROUPS, -(-n_groups // _CHUNKS)))
        return kernel, n_blocks, n_groups, chunk, -(-n_groups // chunk)

    def _lower_linear(self, op: Op) -> None:
        weight, bias = op.weights["weight"], op.weights.get("bias")
        kernel, n_blocks, n_groups, chunk, n_chunks = self._matrix(weight)
        x, out = self._activations(op.inputs[0], kernel.activation), self._output(op)
        args: list[Argument] = [
            self.weights.address(weight), x, out, n_blocks, x.row_bytes, out.row_bytes,
            self._vector(bias) if bias is not None else 0, n_groups, chunk,
            kernel.group_bytes(weight, self.target.lanes), self._count(op.output),
        ]  # fmt: skip
        self.stages.parallel(
            op.label, self._linear_address(kernel), args, self.stages.constant(n_chunks), 1,
            [x], [out],
        )  # fmt: skip

    def _lower_moe_route(self, op: Op) -> None:
        n_used, n_experts = op.attrs["n_used"], op.inputs[0].dim
        logits, route = self.buffers[op.inputs[0]], self._output(op)
        normalize = op.attrs["normalize"]
        kernel = self._store.get(
            f"moe_route_{n_experts}_{n_used}_{normalize}",
            experts.make_route(n_experts, n_used, normalize),
        )
        args: list[Argument] = [logits, logits.row_bytes, route, route.row_bytes]
        self._row_op(op, kernel, args, [logits], route)
        starts = self.stages.buffer(1, 8 * (n_experts + 1))
        places = self.stages.buffer(1, 8 * n_used * route.n_rows)
        self._places[op.output] = starts, places
        kernel = self._store.get(
            f"moe_group_{n_experts}_{n_used}", experts.make_group(n_experts, n_used)
        )
        args = [route, route.row_bytes, self._count(op.output), starts, places]
        self.stages.parallel(
            op.label, kernel, args, self.stages.constant(1), 1, [route], [starts, places]
        )

    def _lower_moe_linear(self, op: Op) -> None:
        (x, route), weight, n_used = op.inputs, op.weights["weight"], op.attrs["n_used"]
        starts, places = self._places[route]
        kernel, n_blocks, n_groups, chunk, n_chunks = self._matrix(weight)
        source = self._activations(x, kernel.activation)
        if weight.n_out % 16:
            raise ProgramError(f"{op.label}: rows of {weight.n_out} are no multiple of 16 long")
        n_pairs, count = n_used * self._rows(op.output), self._count(op.output)
        lanes = self.target.lanes
        # pairs lie one after the other, as they do in a token's row of [rank][n_in]
        pair_bytes, result_bytes = kernel.activation.row_bytes(weight.n_in), 4 * weight.n_out
        grouped = self.stages.buffer(1, n_pairs * pair_bytes)
        results = self.stages.buffer(1, n_pairs * result_bytes)
        gather = self._store.get(f"moe_gather_{n_used}", experts.make_gather(n_used))
        rank_bytes = pair_bytes if x.dim != weight.n_in else 0
        args: list[Argument] = [
            source, source.row_bytes, rank_bytes, places, grouped, pair_bytes
        ]  # fmt: skip
        self.stages.rows(op.label, gather, args, count, [source, places], [grouped])
        address = self._store.get(f"expert_{kernel.name}", experts.make_expert_linear(kernel.tile))
        args = [
            self.weights.address(weight), grouped, results, n_blocks, pair_bytes, result_bytes,
            0, n_groups, chunk, kernel.group_bytes(weight, lanes), count,
            starts,
            kernel.matrix_bytes(weight, lanes), n_chunks,
        ]  # fmt: skip
        n_work = self.stages.constant(n_chunks * weight.shape[2])
        self.stages.parallel(op.label, address, args, n_work, 1, [grouped, starts], [results])
        out = self._output(op)
        scatter = self._store.get(f"moe_scatter_{n_used}", experts.make_scatter(n_used))
        args = [out, out.row_bytes, result_bytes, places, results, result_bytes]
        self.stages.rows(op.label, scatter, args, count, [results, places], [out])

    def _lower_moe_sum(self, op: Op) -> None:
        x, route = (self.buffers[t] for t in op.inputs)
        out, n_used = self._output(op), op.attrs["n_used"]
        kernel = self._store.get(f"moe_sum_{n_used}", experts.make_sum(n_used))
        args: list[Argument] = [
            x, x.row_bytes, route, route.row_bytes, out, out.row_bytes, op.output.dim
        ]  # fmt: skip
        self._row_op(op, kernel, args, [x, route], out)


def _activations_wanted(
    graph: Graph, kernels: dict[int, LinearKernel]
) -> dict[Tensor, list[Activation]]:
    """The quantized formats in which each tensor is read."""
    wanted: dict[Tensor, list[Activation]] = {}
    for op in graph.ops:
        if op.kind in ("linear", "moe_linear"):
            form = kernels[op.weights["weight"].type.id].activation
            forms = wanted.setdefault(op.inputs[0], [])
            if form is not PLAIN and form not in forms:
                forms.append(form)
    return wanted
