"""Where a device keeps rows: every tensor of its parts in one allocation, laid out before anything
runs. Pure arithmetic, so that a plan can ask what rows will need.

Tensors share memory when their times do not overlap. What a part (or a section of one) reads of or
leaves for others is whole for as long as it runs, because phases go through it one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edgellm.kernels.cuda import pack, quantized, sample
from edgellm.kernels.cuda.attention import Shape
from edgellm.kernels.cuda.device import Buffer, aligned
from edgellm.kernels.cuda.fuse import fuse
from edgellm.kernels.graph import MATRIX_OPS, Op, Rope, Tensor
from edgellm.kernels.split import Part

Key = object  # a tensor, a tensor quantized (tensor, precise), or what lives for ever


@dataclass(frozen=True)
class RowLimits:
    """Rows that there is room for. ``decode`` tokens at most are generated at a time."""

    tokens: int
    out: int
    decode: int
    n_ctx: int

    def of(self, tensor: Tensor) -> int:
        return self.out if tensor.rows == "out" else self.tokens


@dataclass
class _Use:
    n_bytes: int
    first: int
    last: int


class Workspace:
    """Offsets of all buffers; ``n_bytes`` in all."""

    def __init__(self, parts: Sequence[Part], limits: RowLimits, shapes: Iterable[Shape]) -> None:
        """``shapes`` are those of the attention ops."""
        self._limits, self._uses = limits, dict[Key, _Use]()
        n_ops = sum(len(part.ops) for part in parts)
        for rope in {op.attrs["rope"] for p in parts for op in p.ops if op.kind == "rope"}:
            self._uses[rope] = _Use(angle_bytes(rope, limits), 0, n_ops)
        partial = max((s.partial_bytes(limits.decode, limits.n_ctx) for s in shapes), default=0)
        self._uses["partials"] = _Use(partial, 0, n_ops)
        read: dict[Tensor, set[Part]] = {}
        for part in parts:
            for op in part.ops:
                for tensor in op.inputs:
                    read.setdefault(tensor, set()).add(part)
        self._late = fuse(parts).late_if_decoded
        at = 0
        for part in parts:
            self._add(part, at, {t for t, by in read.items() if by - {part}})
            at += len(part.ops)
        self._offsets: dict[Key, int]
        self.n_bytes: int
        self._offsets, self.n_bytes = _laid_out(self._uses)

    def _add(self, part: Part, start: int, read_elsewhere: set[Tensor]) -> None:
        end = start + len(part.ops)
        places = {op: i for i, op in enumerate(part.ops, start)}
        own = {op.output for op in part.ops}
        for tensor in (*part.reads, *part.writes):
            self._use(tensor, 4 * self._limits.of(tensor) * tensor.dim, start, end)
        if part.logits is not None:  # launched behind the last op
            self._use("strips", sample.strip_bytes(self._limits.out), end, end)
            self._use("best", sample.key_bytes(self._limits.out), start, end)
        made = {op.output: places[op] for op in part.ops}
        for op, first in places.items():
            i = places[self._late.get(op, op)]  # when it may be launched at the latest
            for tensor in (*op.inputs, op.output):
                self._use(tensor, 4 * self._limits.of(tensor) * tensor.dim, first, i)
                if tensor not in own or tensor in read_elsewhere:
                    self._use(tensor, 0, start, end)
            if op.kind in MATRIX_OPS and is_quantized(op):
                x = op.inputs[0]  # quantized where it is made, or by its first reader
                size = self._limits.of(x) * quantized_row_bytes(*quantized_key(op))
                self._use(quantized_key(op), size, made.get(x, first), i)
            if op.kind == "moe_linear":
                route = op.inputs[1]
                sizes = groups_bytes(op, self._limits.of(route))
                self._use(("groups", route), sum(sizes), i, i)

    def _use(self, key: Key, n_bytes: int, first: int, last: int) -> None:
        use = self._uses.setdefault(key, _Use(n_bytes, first, last))
        use.n_bytes, use.first = max(use.n_bytes, n_bytes), min(use.first, first)
        use.last = max(use.last, last)

    def place(self, memory: Buffer) -> dict[Key, Buffer]:
        """The buffers in an allocation of ``n_bytes``."""
        return {key: memory.at(at, self._uses[key].n_bytes) for key, at in self._offsets.items()}


def angle_bytes(rope: Rope, limits: RowLimits) -> int:
    return 4 * limits.tokens * rope.dim


def is_quantized(op: Op) -> bool:
    """Whether a matrix op's input is quantized."""
    return op.weights["weight"].type.name not in pack.FLOATS


def quantized_key(op: Op) -> tuple[Tensor, bool]:
    """What a matrix op's quantized input is called: who read it alike share it."""
    return (op.inputs[0], op.weights["weight"].precise)


def quantized_row_bytes(x: Tensor, precise: bool) -> int:
    """Of a row as matrices read it. ValueError where there is no such row."""
    return quantized.row_bytes(x.dim, precise)


def groups_bytes(op: Op, n_rows: int) -> tuple[int, int]:
    """Of the order and the starts of the rows of a moe_linear op's experts (experts.Groups)."""
    n_experts = op.weights["weight"].shape[2]
    return aligned(4 * n_rows * op.attrs["n_used"]), aligned(4 * (n_experts + 1))


def _laid_out(uses: dict[Key, _Use]) -> tuple[dict[Key, int], int]:
    """Largest first, each at the lowest place where nobody is at the same time."""
    placed: list[tuple[int, int, _Use]] = []  # begin, end
    offsets: dict[Key, int] = {}
    for key, use in sorted(uses.items(), key=lambda item: -item[1].n_bytes):
        if not use.n_bytes:
            continue
        size, at = aligned(use.n_bytes), 0
        for begin, end, other in placed:  # in order of begin
            if use.first <= other.last and other.first <= use.last:
                if at + size <= begin:
                    break
                at = max(at, end)
        offsets[key] = at
        placed.append((at, at + size, use))
        placed.sort(key=lambda p: p[0])
    return offsets, max((end for _, end, _ in placed), default=0)
