"""What layers would take of a GPU's memory, reckoned from a graph without loading anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgellm.kernels.cpu.inputs import Limits
from edgellm.kernels.cuda import experts, program, weights
from edgellm.kernels.cuda.attention import TILE
from edgellm.kernels.cuda.device import ALIGNMENT
from edgellm.kernels.cuda.lower import LOWERINGS
from edgellm.kernels.cuda.staging import unit_bytes, units_of
from edgellm.kernels.cuda.workspace import is_quantized, quantized_row_bytes
from edgellm.kernels.graph import MATRIX_OPS, Graph, Op
from edgellm.kernels.rows import select_early
from edgellm.kernels.split import CPU, Part, places, sections, split, staging_bytes
from edgellm.offload import Layer, Matrix, Options, Plan, Room, Sizes
from edgellm.offload_plan import plan

_MOST_TRIES = 6


def device_sizes(graph: Graph, n_layers: int, limits: Limits) -> Sizes:
    """Of each layer and of rows. Layers that cannot leave the CPU say why."""
    whole = select_early(graph, ())
    at = places(whole, lambda layer, name: "gpu", lambda layer: "gpu")
    mine = [op for op in whole.ops if at[op] != CPU]
    by_layer: dict[int | None, list[Op]] = {}
    for op in mine:
        by_layer.setdefault(op.layer, []).append(op)
    taken: set[str] = set()  # a matrix or vector that two layers share counts once
    layers = tuple(_layer(by_layer.get(i, []), limits, taken) for i in range(n_layers))
    output = _layer([op for op in by_layer.get(None, []) if op.kind != "select"], limits, taken)
    usable = {i for i, layer in enumerate(layers) if not layer.why}
    ops = [op for op in mine if op.layer in usable or (op.layer is None and not output.why)]
    return Sizes(layers, output, _workspace(whole, ops, limits) if ops else 0)


def fitted_plan(
    graph: Graph, sizes: Sizes, limits: Limits, rooms: Sequence[Room], options: Options
) -> Plan:
    """A plan with the room that its own rows need: a plan decides what they are, and they what is
    left for layers, so it is made again until they agree. ``sizes``: the graph's device_sizes."""
    whole = select_early(graph, ())
    best: tuple[int, Plan] | None = None
    for _ in range(_MOST_TRIES):
        made = plan(sizes, rooms, options)
        needed = {name: device_rows(whole, made, limits, name) for name in made.taken}
        fits = all(needed[name] <= taken.workspace for name, taken in made.taken.items())
        if fits:
            for name, taken in made.taken.items():
                taken.workspace = needed[name]
            used = sum(taken.total for taken in made.taken.values())
            if best is not None and used <= best[0]:
                break
            best = used, made
        most = max(needed.values(), default=0)
        if most == sizes.workspace or not most:
            break
        sizes = replace(sizes, workspace=most)
    while best is None:  # more than any of them: small steps towards what fits
        sizes = replace(sizes, workspace=int(1.1 * sizes.workspace) + 1)
        made = plan(sizes, rooms, options)
        needed = {name: device_rows(whole, made, limits, name) for name in made.taken}
        if all(needed[name] <= taken.workspace for name, taken in made.taken.items()):
            best = 0, made
    return best[1]


def device_rows(whole: Graph, made: Plan, limits: Limits, name: str) -> int:
    """Bytes that rows take on a device under a plan, and what came along with planned matrices:
    vectors, and matrices that several layers read.
    ``whole``: its rows are selected already."""
    parts = split(whole, places(whole, made.place_of, made.kv_place))
    mine = [s for part in parts if part.place == name for s in sections(part, made.streamed)]
    if not mine:
        return 0
    ops = [op for section in mine for op in section.ops]
    units = [unit_bytes(unit) for unit in units_of(mine, made.streamed).values()]
    there = sum(map(weights.matrix_bytes, weights.matrices_of(ops).values())) - sum(units)
    there += sum(map(weights.vector_bytes, weights.vectors_of(ops).values()))
    there += staging_bytes(units)
    taken = made.taken[name]
    return _rows(mine, limits) + max(0, there - taken.weights - taken.staging)


def _layer(ops: list[Op], limits: Limits, taken: set[str]) -> Layer:
    why = next((reason for op in ops if (reason := why_not(op, limits))), "")
    if why:
        return Layer(_matrices(ops, taken, sized=False), why=why)
    matrices = _matrices(ops, taken)
    vectors = [w for w in weights.vectors_of(ops).values() if w.name not in taken]
    taken |= {w.name for w in vectors}
    kv = sum(sum(program.pool_bytes(op, limits)) for op in ops if op.kind == "attention")
    return Layer(matrices, kv, sum(map(weights.vector_bytes, vectors)))


def _matrices(ops: list[Op], taken: set[str], sized: bool = True) -> tuple[Matrix, ...]:
    found = []
    mixed = {op.weights["weight"].name for op in ops if op.kind == "moe_linear"}
    for name, weight in weights.matrices_of(ops).items():
        if name not in taken:
            n = weights.matrix_bytes(weight) if sized else 0
            found.append(Matrix(name, n, name in mixed))
            taken.add(name)
    return tuple(found)


def _workspace(graph: Graph, ops: list[Op], limits: Limits) -> int:
    """Were all of these one part."""
    made = {op.output for op in ops}
    reads = list(dict.fromkeys(t for op in ops for t in op.inputs if t not in made))
    last = ops[-1].output
    logits = last if last is graph.output and last.rows == "out" else None
    return _rows([Part("gpu", ops, reads, [last], logits=logits)], limits)


def _rows(parts: list[Part], limits: Limits) -> int:
    ops = [op for part in parts for op in part.ops]
    shapes = [program.shape_of(op, limits) for op in ops if op.kind == "attention"]
    ropes = {op.attrs["rope"] for op in ops if op.kind == "rope"}
    frequencies: int = sum(4 * rope.dim + ALIGNMENT for rope in ropes)
    rows = program.workspace(parts, limits, shapes).n_bytes
    slack = 4 * ALIGNMENT  # allocations are rounded up
    return rows + program.number_bytes(len(set(shapes)), limits) + frequencies + slack


def why_not(op: Op, limits: Limits) -> str:
    """Why an op cannot run on a GPU; empty: it can."""
    if op.kind not in LOWERINGS:
        return f"{op.kind} has no GPU kernel"
    try:
        if op.kind in MATRIX_OPS:
            weight = op.weights["weight"]
            weights.matrix_bytes(weight)
            if is_quantized(op):
                quantized_row_bytes(op.inputs[0], weight.precise)
                if op.kind == "moe_linear" and weight.precise:
                    return "experts whose inputs have outliers have no GPU kernel"
        if op.kind == "moe_route":
            n, n_groups = op.inputs[0].dim, op.attrs["n_groups"]
            if n > experts.MOST_EXPERTS or n_groups > experts.MOST_GROUPS:
                return f"{n} experts in {n_groups} groups have no GPU kernel"
        if op.kind == "attention":
            window = op.attrs["window"]
            if limits.window is not None and (window is None or window > limits.window):
                return "the ring context policy has no GPU kernel"
            if limits.block % TILE:
                return f"blocks of {limits.block} tokens have no GPU kernel"
            program.shape_of(op, limits)
    except ValueError as error:
        return str(error)
    return ""
