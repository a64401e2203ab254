"""A graph cut where the device changes.

Every op is assigned to a place: "cpu" or the name of a device. Ops of one place that follow each
other, or can be moved together because nothing in between needs them, are a *part*. What a part
reads of another place's is copied when the part begins: ``cpu_graph`` is the CPU's share of the
graph, in which every other part is one op.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from edgellm.kernels.graph import MATRIX_OPS, ROW_WISE, Graph, Op, Tensor

CPU = "cpu"
N_SLOTS = 2  # that streamed weights take turns in: one is read while the other is written
PlaceOf = Callable[[int | None, str], str]  # (layer or None: the output's, matrix name or "")


@dataclass(eq=False)
class Part:
    """Ops in order, the tensors they read of other places, and those that other places read:
    ``peers`` are the devices that reads come from, ``to_cpu`` the writes that the CPU reads.
    ``logits``: the graph's output, if it is made here and is of wanted rows."""

    place: str
    ops: list[Op]
    reads: list[Tensor] = field(default_factory=list)
    writes: list[Tensor] = field(default_factory=list)
    peers: dict[Tensor, str] = field(default_factory=dict)
    to_cpu: list[Tensor] = field(default_factory=list)
    logits: Tensor | None = None


def places(graph: Graph, place_of: PlaceOf, kv_place: Callable[[int], str]) -> dict[Op, str]:
    """Where each op runs: with its matrix, with its layer's keys and values, or with its layer.

    What goes row by row follows matrices that were sent elsewhere than their layer, so that nothing
    is copied to be added up. Rows of tables, which are read from the file, stay on the CPU.
    """
    found: dict[Op, str] = {}
    strays: dict[Tensor, str] = {}  # made elsewhere than the layer is
    first = next((i for i, op in enumerate(graph.ops) if op.layer is not None), 0)
    for i, op in enumerate(graph.ops):
        at = CPU if i < first or op.kind in ("embed", "position_rows") else place_of(op.layer, "")
        if op.kind in MATRIX_OPS:
            own = place_of(op.layer, op.weights["weight"].name)
            if own != at:
                strays[op.output] = at = own
        elif op.kind == "attention" and op.layer is not None:
            at = kv_place(op.layer)
        elif op.kind in ROW_WISE and op.inputs:
            inputs = op.inputs[:1] if op.kind == "moe_sum" else op.inputs
            from_strays = {strays.get(t) for t in inputs}
            if len(from_strays) == 1 and (there := from_strays.pop()) is not None:
                strays[op.output] = at = there
        found[op] = at
    readers = graph.readers()
    for op in graph.ops:
        if op.kind == "select":  # moved up to anywhere: with those who read the selected rows
            found[op] = found[readers[op.output][0]]
        elif op.kind == "moe_route":  # experts on the CPU need their rows grouped there
            readers_at = [found[r] for r in readers[op.output] if r.kind == "moe_linear"]
            found[op] = CPU if CPU in readers_at else found[op]
    return found


def split(graph: Graph, at: dict[Op, str]) -> list[Part]:
    """The parts in an order in which they can run."""
    parts = [Part(place, ops) for place, ops in _in_turns(graph, at)]
    made = {op.output: part for part in parts for op in part.ops}
    readers: dict[Tensor, set[str]] = {graph.output: {CPU}}
    for part in parts:
        for op in part.ops:
            for tensor in op.inputs:
                readers.setdefault(tensor, set()).add(part.place)
    for part in parts:
        read = [t for op in part.ops for t in op.inputs if made[t].place != part.place]
        part.reads = list(dict.fromkeys(read))
        part.writes = [
            op.output for op in part.ops if readers.get(op.output, set()) - {part.place}
        ]  # fmt: skip
        part.peers = {t: made[t].place for t in part.reads if made[t].place != CPU}
        part.to_cpu = [t for t in part.writes if CPU in readers[t]]
    if graph.output.rows == "out":
        made[graph.output].logits = graph.output
    return parts


def _in_turns(graph: Graph, at: dict[Op, str]) -> list[tuple[str, list[Op]]]:
    """Ops by turns of one place: a turn lasts as long as an op of the place is ready."""
    waiting, done = list(graph.ops), set[Tensor]()
    turns: list[tuple[str, list[Op]]] = []
    while waiting:
        place = at[waiting[0]]  # the first in the graph's order is always ready
        mine: list[Op] = []
        rest: list[Op] = []
        for op in waiting:
            if at[op] == place and all(t in done for t in op.inputs):
                mine.append(op)
                done.add(op.output)
            else:
                rest.append(op)
        turns.append((place, mine))
        waiting = rest
    return turns


def sections(part: Part, streamed: Collection[str]) -> list[Part]:
    """A part cut so that each layer with one of these matrices stands alone: its weights come and
    go while the others' stay. A section's reads and writes are those of the part that have to last
    through it: what it or a later section reads, what it or an earlier one made."""
    layers = {
        op.layer
        for op in part.ops
        if op.kind in MATRIX_OPS and op.weights["weight"].name in streamed
    }
    if not layers:
        return [part]
    found = list[Part]()
    current: int | None = None
    for op in part.ops:
        layer = op.layer if op.layer in layers else None
        if not found or (layer != current and op.kind != "select"):  # which is of no layer
            found.append(Part(part.place, []))
            current = layer
        found[-1].ops.append(op)
    made = set[Tensor]()
    for section in found:
        own = {op.output for op in section.ops}
        made |= own
        section.writes = [t for t in part.writes if t in made]
        section.logits = part.logits if part.logits in own else None
    needed = set[Tensor]()
    for section in reversed(found):
        needed |= {t for op in section.ops for t in op.inputs}
        section.reads = [t for t in part.reads if t in needed]
    return found


def staging_bytes(sizes: Collection[int]) -> int:
    """Of device memory that sections with so many bytes of streamed weights share."""
    return min(N_SLOTS, len(sizes)) * max(sizes, default=0)


def cpu_graph(graph: Graph, parts: list[Part]) -> Graph:
    """What the CPU runs: its own ops, and an op "part" for each part of another place. The op's
    output is the last tensor that the part leaves in the CPU's memory; see ``outputs``."""
    out = Graph(graph.precise)
    for part in parts:
        if part.place == CPU:
            out.ops += part.ops
        else:
            out.ops.append(
                Op("part", tuple(part.reads), part.writes[-1], None, attrs={"part": part})
            )
    return out


def outputs(op: Op) -> list[Tensor]:
    """The tensors that an op leaves behind."""
    if op.kind != "part":
        return [op.output]
    part: Part = op.attrs["part"]
    return part.writes
