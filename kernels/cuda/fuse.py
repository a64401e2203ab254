"""Ops that are launched together: with the same bits as one by one, and without what lies between.

A block of ops is launched where its last op stands, the *head*; the others are late. Their inputs
are needed until then, which the workspace has to know.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from edgellm.kernels.cuda import pack
from edgellm.kernels.cuda.operations import GATES
from edgellm.kernels.graph import MATRIX_OPS, Op, Tensor
from edgellm.kernels.split import Part


@dataclass
class Fused:
    """By head. ``gated``: an activation's two matrices, for generated tokens alone. ``sums``: the
    sum that a norm is taken of. ``norms``: of those norms whose output is quantized, whether the
    readers want two copies, and whether somebody reads floats. ``turned``: the rotations of
    attention's queries and keys."""

    gated: dict[Op, tuple[Op, Op]] = field(default_factory=dict)
    sums: dict[Op, Op] = field(default_factory=dict)
    norms: dict[Op, tuple[bool, bool]] = field(default_factory=dict)
    turned: dict[Op, tuple[Op, Op]] = field(default_factory=dict)

    @property
    def late(self) -> dict[Op, Op]:
        """Op -> the head that it is launched with, whatever the phase."""
        found = {op: head for head, op in self.sums.items()}
        found |= {op: head for head, both in self.turned.items() for op in both}
        return found

    @property
    def late_if_decoded(self) -> dict[Op, Op]:
        """Also those of generated tokens alone."""
        return self.late | {op: head for head, both in self.gated.items() for op in both}


def fuse(parts: Sequence[Part]) -> Fused:
    """What of each part is launched together."""
    found = Fused()
    readers: dict[Tensor, list[Op]] = {}
    for part in parts:
        for op in part.ops:
            for tensor in op.inputs:
                readers.setdefault(tensor, []).append(op)
    for part in parts:
        _fuse_part(part, readers, found)
    return found


def _fuse_part(part: Part, readers: dict[Tensor, list[Op]], found: Fused) -> None:
    made, mine = {op.output: op for op in part.ops}, set(part.ops)
    before = dict(zip(part.ops[1:], part.ops, strict=False))

    def alone(tensor: Tensor, reader: Op) -> bool:
        return readers.get(tensor) == [reader] and tensor not in part.writes

    for op in part.ops:
        if op.kind in GATES:
            both = [made.get(t) for t in op.inputs]
            if _is_gate(op, both) and all(alone(t, op) for t in op.inputs):
                found.gated[op] = both[0], both[1]  # type: ignore[assignment]
        elif op.kind == "rms_norm":
            after = readers.get(op.output, [])
            kinds = {r.weights["weight"].precise for r in after if r in mine and _quantizes(r, op)}
            if op.weights["weight"].shape == (op.output.dim,) and len(kinds) == 1:
                floats = op.output in part.writes or any(not _quantizes(r, op) for r in after)
                found.norms[op] = kinds.pop(), floats or any(r not in mine for r in after)
                previous = before.get(op)
                if previous is not None and previous.kind == "add":
                    if previous.output is op.inputs[0]:
                        found.sums[op] = previous
        elif op.kind == "attention":
            q, k = (made.get(t) for t in op.inputs[:2])
            if q is not None and k is not None and q.kind == k.kind == "rope":
                heads = {x.attrs["head_dim"] for x in (q, k)}
                one = q.attrs["rope"] == k.attrs["rope"] and heads == {op.attrs["head_dim"]}
                if one and all(alone(t, op) for t in op.inputs[:2]):
                    found.turned[op] = q, k


def _is_gate(op: Op, both: Iterable[Op | None]) -> bool:
    gate, up = both
    if gate is None or up is None or gate is up or gate.kind != "linear" or up.kind != "linear":
        return False
    a, b = gate.weights["weight"], up.weights["weight"]
    is_alike = gate.inputs == up.inputs and a.type is b.type and not (a.precise or b.precise)
    return is_alike and a.type.name not in pack.FLOATS


def _quantizes(reader: Op, norm: Op) -> bool:
    """Whether a reader takes the norm's output quantized."""
    if reader.kind not in MATRIX_OPS or reader.inputs[0] is not norm.output:
        return False
    return reader.weights["weight"].type.name not in pack.FLOATS
