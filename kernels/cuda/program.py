"""The CUDA back end: a device's parts of a graph, as launches on its stream.

A part begins with what it reads of the CPU's memory or of another device, which is copied from
there, and ends with what the CPU reads of it, which is the only wait: where all layers are on
devices, once a step. Of logits only the best of each row are copied where a step asks for no more.
Generated tokens are launched as a captured graph, one for each section and each power of two of
rows; prompts launch by launch. Copies go through pinned memory on the stream. A part is one
section, or several where weights are streamed: a section's weights are copied once a step, whatever
goes through it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.cpu.inputs import AttentionGroup, Limits, pool_blocks
from edgellm.kernels.cpu.lowering import ProgramError
from edgellm.kernels.cuda import experts, operations, sample
from edgellm.kernels.cuda.attention import TILE, Shape
from edgellm.kernels.cuda.device import Buffer, Device, aligned
from edgellm.kernels.cuda.device import Graph as Captured
from edgellm.kernels.cuda.fuse import fuse
from edgellm.kernels.cuda.lower import LOWERINGS, lower_gated
from edgellm.kernels.cuda.staging import Staging, units_of
from edgellm.kernels.cuda.step import Pass, Span, StepNumbers
from edgellm.kernels.cuda.weights import DeviceWeights, Progress, ReadInto
from edgellm.kernels.cuda.workspace import (
    Key,
    RowLimits,
    Workspace,
    groups_bytes,
    is_quantized,
    quantized_row_bytes,
)
from edgellm.kernels.graph import Op, Rope, Tensor
from edgellm.kernels.split import Part, sections

MOST_DECODED = 64  # rows of generated tokens that go through a part at once
_MOST_CAPTURED = 64  # graphs of a section that are kept


class DeviceProgram:
    """Parts of one place. ``load`` takes the memory and reads the weights; then, for each step,
    ``begin`` and, in the CPU's order, ``run`` for each part."""

    def __init__(
        self, device: Device, parts: Sequence[Part], limits: Limits, read_into: ReadInto,
        streamed: Collection[str] = (),
    ) -> None:  # fmt: skip
        """``streamed``: matrices that stay in the host's memory and are copied for each step."""
        self.device, self.parts, self.limits = device, list(parts), limits
        self._sections = {part: sections(part, streamed) for part in parts}
        self.sections = [section for part in parts for section in self._sections[part]]
        self._streamed = streamed
        self.ops = [op for part in parts for op in part.ops]
        missing = next((op for op in self.ops if op.kind not in LOWERINGS), None)
        if missing is not None:
            raise ProgramError(f"{missing.label}: the GPU has no op {missing.kind!r}")
        self.shapes = {op: shape_of(op, limits) for op in self.ops if op.kind == "attention"}
        self.fused = fuse(self.sections)
        self._late = {"prefill": self.fused.late, "decode": self.fused.late_if_decoded}
        self.logits = next((part.logits for part in parts if part.logits is not None), None)
        self._n_best = 0  # of the logits that are copied; 0: all
        self.stream = device.main
        self.peers: Mapping[str, DeviceProgram] = {}  # by place; whoever makes several tells them
        self._read_into, self._allocated = read_into, list[Buffer]()
        self._pinned = list[Staging | StepNumbers]()
        self._host = dict[Tensor, NDArray[np.float32]]()  # rows that cross to the CPU and back
        self._best = np.zeros(0, np.uint64)  # keys of the best logits
        self._captured: OrderedDict[tuple[int, ...], Captured | None] = OrderedDict()
        self._done: set[Key] = set()  # what the running pass has made already
        self.seconds = 0.0  # in which parts ran, of all steps so far
        self.is_broken = False

    # ---- loading --------------------------------------------------------------------------------

    def load(
        self, group_of: Callable[[Op], AttentionGroup], progress: Progress | None = None
    ) -> None:
        """Raises OutOfDeviceMemory and OutOfHostMemory; ``close`` then gives back what was
        taken."""
        device, limits = self.device, self.limits
        self.groups = {op: group_of(op) for op in self.shapes}
        groups = list(dict.fromkeys(self.groups.values()))
        self.staging = Staging(device, units_of(self.sections, self._streamed))
        self._pinned.append(self.staging)
        if self.staging.memory is not None:
            self._allocated.append(self.staging.memory)
        self.weights = DeviceWeights(device, self.ops, self._read_into, limits.n_ctx, self.staging)
        self._allocated.append(self.weights.memory)
        self._pools: dict[Op, tuple[Buffer, Buffer]] = {}
        if self.shapes:
            pools = device.alloc(sum(sum(pool_bytes(op, limits)) for op in self.shapes))
            self._allocated.append(pools)
            at = 0
            for op in self.shapes:
                keys, values = pool_bytes(op, limits)
                self._pools[op] = pools.at(at, keys), pools.at(at + keys, values)
                at += keys + values
        layout = workspace(self.sections, limits, self.shapes.values())
        memory = device.alloc(layout.n_bytes)
        self._allocated.append(memory)
        self.buffers = layout.place(memory)
        self.numbers = StepNumbers(device, limits, groups, n_decode(limits))
        self._allocated.append(self.numbers.memory)
        self._pinned.append(self.numbers)
        crossing = dict.fromkeys(
            t for part in self.parts for t in (*part.reads, *part.to_cpu) if t not in part.peers
        )
        self._host = {
            t: device.pinned(4 * row_limits(limits).of(t) * t.dim)
            .view(np.float32).reshape(-1, t.dim)
            for t in crossing
        }  # fmt: skip
        self._best = device.pinned(sample.key_bytes(limits.max_out)).view(np.uint64)
        self.staging.pin()
        self.weights.fill(limits.n_threads, progress)

    def pools(self, group: AttentionGroup) -> list[tuple[Buffer, int]]:
        """Keys and values of the group's layers here, each with the bytes of a block."""
        found: list[tuple[Buffer, int]] = []
        for op, pools in self._pools.items():
            if self.groups[op] is group:
                found += zip(pools, block_bytes(self.shapes[op], self.limits.block), strict=True)
        return found

    def close(self) -> None:
        if not self.is_broken:  # else nothing is under way
            self.device.synchronize()
        self._captured.clear()
        for buffer in self._allocated:
            self.device.free(buffer)
        self._allocated.clear()
        for holder in self._pinned:  # whoever still knows the program must not keep it
            holder.close()
        self._host.clear()
        self._best = self._best[:0].copy()

    # ---- a step ---------------------------------------------------------------------------------

    def begin(
        self, spans: Sequence[Span], is_decode: Sequence[bool], out_rows: NDArray[np.int64]
    ) -> None:
        """What the step is about: runs of rows, which of them are generated tokens, whose logits
        are wanted."""
        with self._watched():
            self.stream.synchronize()  # of a step that was interrupted something may be left
            self.numbers.describe(spans, is_decode, out_rows, self.stream)

    @property
    def most_best(self) -> int:
        """How many logits of a row ``choosing`` can be asked for: fewer than all, and none where
        they are not made."""
        return 0 if self.logits is None else min(sample.MOST, self.logits.dim - 1)

    @contextmanager
    def choosing(self, n: int) -> Iterator[None]:
        """Steps within leave the logits here but for the n best of each row, or some more: ``best``
        has them."""
        self._n_best = sample.width_of(n)
        try:
            yield
        finally:
            self._n_best = 0

    def best(self, n_rows: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Token ids and logits [n_rows, n] of the step's wanted rows: best first, of equals the
        lowest id, NaN before all."""
        keys = self._best[: n_rows * self._n_best].reshape(n_rows, -1)
        if (order := self.numbers.out_order) is not None:
            keys = keys[np.argsort(order)]
        return sample.decoded(keys[:, : self.most_best])

    def run(self, part: Part, rows: Callable[[Tensor], NDArray[np.float32]]) -> None:
        """See PartRunner. After an error of the device nothing can be computed any more."""
        started = time.perf_counter()
        with self._watched():
            self._run(part, rows)
        self.seconds += time.perf_counter() - started

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Between steps the device is at rest, also when Ctrl-C ends one: what was launched is
        waited for, since the next step writes what it reads."""
        try:
            yield
        except Exception:
            self.is_broken = True
            raise
        except BaseException:
            is_resting = False
            while not is_resting:  # a second Ctrl-C must not leave it in mid-step
                with suppress(KeyboardInterrupt):
                    self.device.synchronize()
                    is_resting = True
            raise

    def _run(self, part: Part, rows: Callable[[Tensor], NDArray[np.float32]]) -> None:
        for tensor, place in part.peers.items():
            self._fetch(tensor, self.peers[place], len(rows(tensor)))
        for tensor in part.reads:
            if tensor in part.peers:
                continue
            source, order = rows(tensor), self._order(tensor)
            staged = self._host[tensor][: len(source)]
            staged[:] = source if order is None else source[order]
            if len(source):
                self.device.copy_to(self.buffers[tensor], staged, self.stream)
        for section in self._sections[part]:
            self.staging.enter(section, self.stream)
            for s in self.numbers.passes:
                self._pass(section, s)
            self.staging.leave(section, self.stream)
        whole = [t for t in part.to_cpu if t is not part.logits or not self._n_best]
        for tensor in whole:
            staged = self._host[tensor][: len(rows(tensor))]
            if len(staged):
                self.device.copy_from(self.buffers[tensor], staged, self.stream)
        if part.logits is not None and (n_keys := self._n_best * len(rows(part.logits))):
            self.device.copy_from(self.buffers["best"], self._best[:n_keys], self.stream)
        if part.to_cpu:
            self.stream.synchronize()
        for tensor in whole:
            target, order = rows(tensor), self._order(tensor)
            target[slice(None) if order is None else order] = self._host[tensor][: len(target)]

    def _fetch(self, tensor: Tensor, peer: DeviceProgram, n_rows: int) -> None:
        """Rows that another device made, which lie there in the same order: after they are made,
        and before their memory is used for something else (which of two devices the second would
        not do anyway: its next part waits for the first; of three it might)."""
        n_bytes = 4 * n_rows * tensor.dim
        if not n_bytes:
            return
        self.stream.wait(peer.stream.record())
        self.device.copy_from_peer(
            self.buffers[tensor], peer.device, peer.buffers[tensor], n_bytes, self.stream
        )
        peer.stream.wait(self.stream.record())

    def _order(self, tensor: Tensor) -> NDArray[np.int64] | None:
        return self.numbers.out_order if tensor.rows == "out" else self.numbers.order

    def _pass(self, section: Part, s: Pass) -> None:
        """A pass that begins with the step's first row is captured when it comes again: by then its
        kernels are loaded."""
        if s.phase == "prefill" or s.first:
            self._launch(section, s)
            return
        n_best = 0 if section.logits is None else self._n_best
        key = (self.sections.index(section), s.tokens.limit, s.wanted.limit, n_best)
        if key not in self._captured:
            self._captured[key] = None
            self._launch(section, s)
        else:
            captured = self._captured.pop(key)
            if captured is None:
                with self.device.capture(self.stream) as captured:
                    self._launch(section, s)
            self._captured[key] = captured
            captured.launch(self.stream)
        if len(self._captured) > _MOST_CAPTURED * len(self.sections):
            self._captured.popitem(last=False)

    def _launch(self, section: Part, s: Pass) -> None:
        self._done.clear()
        late = self._late[s.phase]
        for op in section.ops:
            if op in late or not s.rows(op.output).limit:
                continue
            if s.phase == "decode" and op in self.fused.gated:
                lower_gated(self, op, *self.fused.gated[op], s)
            else:
                LOWERINGS[op.kind](self, op, s)
        if section.logits is not None and self._n_best and s.wanted.limit:
            out = self.buffers["best"].at(sample.key_bytes(s.out, self._n_best))
            sample.best(
                self.device, self.at(section.logits, s), self.buffers["strips"], out, s.wanted,
                section.logits.dim, self._n_best, self.stream,
            )  # fmt: skip

    # ---- what lowerings use ---------------------------------------------------------------------

    def at(self, tensor: Tensor, s: Pass) -> Buffer:
        """The pass's rows of a tensor."""
        return self.row(tensor, s.start(tensor))

    def row(self, tensor: Tensor, row: int) -> Buffer:
        return self.buffers[tensor].at(4 * row * tensor.dim)

    def vector(self, op: Op, name: str) -> Buffer:
        found = self.weights.vector(op.weights[name])
        assert found is not None
        return found

    def pools_of(self, op: Op) -> tuple[Buffer, Buffer]:
        return self._pools[op]

    def as_read(self, op: Op, s: Pass) -> Buffer:
        """A matrix op's input as its matrix takes it, quantized once for all that read it alike."""
        x = op.inputs[0]
        if not is_quantized(op):
            return self.at(x, s)
        precise = op.weights["weight"].precise
        is_made = (x, precise) in self._done
        out = self.quantized(x, precise, s)
        if not is_made:
            operations.quantize(
                self.device, self.at(x, s), out, s.rows(x), x.dim, precise, self.stream
            )
        return out

    def quantized(self, x: Tensor, precise: bool, s: Pass) -> Buffer:
        """Where the pass's rows of a tensor are quantized, by whoever asks first."""
        self._done.add((x, precise))
        row_bytes = quantized_row_bytes(x, precise)
        return self.buffers[x, precise].at(s.start(x) * row_bytes)

    def groups_of(self, op: Op, s: Pass) -> experts.Groups:
        """The rows of each expert, found once for each route."""
        route, n_used = op.inputs[1], op.attrs["n_used"]
        key = ("groups", route)
        order, starts = groups_bytes(op, row_limits(self.limits).of(route))
        memory = self.buffers[key]
        found = experts.Groups(memory.at(0, order), memory.at(order, starts))
        if key not in self._done:
            self._done.add(key)
            experts.group_pairs(
                self.device, self.at(route, s), found, s.rows(route), n_used,
                op.weights["weight"].shape[2], self.stream,
            )  # fmt: skip
        return found

    def angles(self, rope: Rope, s: Pass) -> Buffer:
        """Cosines and sines of the pass's positions."""
        out = self.angles_of(rope, s.first)
        if rope not in self._done:
            self._done.add(rope)
            operations.rope_angles(
                self.device, self.numbers.buffer("positions", s.first),
                self.weights.frequencies(rope), out, s.tokens, rope.dim // 2, rope.magnitude,
                self.stream,
            )  # fmt: skip
        return out

    def angles_of(self, rope: Rope, row: int) -> Buffer:
        """Those of the rows from ``row`` on, once they are computed."""
        return self.buffers[rope].at(4 * row * rope.dim)


# ---- sizes, for plans too -----------------------------------------------------------------------


def n_decode(limits: Limits) -> int:
    return min(MOST_DECODED, max(8, limits.max_seqs))


def row_limits(limits: Limits) -> RowLimits:
    return RowLimits(limits.max_tokens, limits.max_out, n_decode(limits), limits.n_ctx)


def shape_of(op: Op, limits: Limits) -> Shape:
    """ValueError for heads without kernels."""
    a = op.attrs
    return Shape(
        a["n_heads"], a["n_kv_heads"], a["head_dim"], a["v_dim"], a["scale"], a["window"],
        a["softcap"], limits.k_type, limits.v_type,
    )  # fmt: skip


def block_bytes(shape: Shape, block: int) -> tuple[int, int]:
    """Of a block of ``block`` tokens of one layer: keys, values."""
    return shape.key_tile_bytes * block // TILE, shape.value_tile_bytes * block // TILE


def pool_bytes(op: Op, limits: Limits) -> tuple[int, int]:
    """Of an attention op's pools: keys, values; whole lines."""
    n = pool_blocks(op.attrs["window"], limits)
    keys, values = (n * size for size in block_bytes(shape_of(op, limits), limits.block))
    return aligned(keys), aligned(values)


def number_bytes(n_groups: int, limits: Limits) -> int:
    """Of a step's numbers, for so many groups of layers."""
    row = -(-limits.n_ctx // limits.block)
    return StepNumbers.n_bytes(limits, [row] * n_groups, n_decode(limits))


def workspace(parts: Sequence[Part], limits: Limits, shapes: Iterable[Shape]) -> Workspace:
    return Workspace(parts, row_limits(limits), shapes)
