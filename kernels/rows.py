"""Compute only what is asked for: rows are selected as early as the graph allows.

A model file selects the tokens whose logits are wanted before its output norm. Ops that work row by
row give the same from selected rows, so the selection moves up through them: what follows the last
layer's attention is computed for those tokens alone, and for none while a long prompt is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from edgellm.kernels.graph import ROW_WISE, Graph, Op, Tensor


def select_early(graph: Graph, keep: Collection[Tensor]) -> Graph:
    """The same graph with ``select`` moved up. Tensors in ``keep`` stay whole: somebody looks at
    them."""
    selects = [op for op in graph.ops if op.kind == "select"]
    if len(selects) != 1:
        return graph
    (select,) = selects
    readers, whole = graph.readers(), set(keep)
    narrow = _narrow(graph, readers, whole)
    while split := _read_in_part(graph, narrow):  # a choice of experts serves all rows or none
        whole |= split
        narrow = _narrow(graph, readers, whole)
    out = Graph(graph.precise)

    def selected(tensor: Tensor) -> Tensor:
        if tensor not in narrow:
            out.layer = None
            narrow[tensor] = out.select(tensor)
        return narrow[tensor]

    moved = set(narrow)
    for op in graph.ops:
        if op is select:
            narrow[op.output] = selected(op.inputs[0])
        elif op.output in moved:
            inputs = tuple(selected(t) for t in op.inputs)
            out.ops.append(replace(op, inputs=inputs, output=narrow[op.output]))
        elif op.output.rows == "out" and select.output in op.inputs:
            inputs = tuple(narrow.get(t, t) for t in op.inputs)
            out.ops.append(replace(op, inputs=inputs))
        else:
            out.ops.append(op)
    return out


def _narrow(
    graph: Graph, readers: Mapping[Tensor, list[Op]], whole: Collection[Tensor]
) -> dict[Tensor, Tensor]:
    """Tensors of which only selected rows are read, as they are then; ``whole`` ones stay."""
    narrow: dict[Tensor, Tensor] = {}
    for op in reversed(graph.ops):
        tensor = op.output
        if op.kind in ROW_WISE and tensor not in whole and tensor.rows == "tokens":
            if all(r.kind == "select" or r.output in narrow for r in readers.get(tensor, ())):
                narrow[tensor] = replace(tensor, rows="out")
    return narrow


def _read_in_part(graph: Graph, narrow: Mapping[Tensor, Tensor]) -> set[Tensor]:
    """Narrow tensors that come from a choice of experts which is needed for all rows: its grouping
    of rows cannot be selected from."""
    routes = {op.output for op in graph.ops if op.kind == "moe_route"} - narrow.keys()
    return {
        op.output for op in graph.ops if op.output in narrow and not routes.isdisjoint(op.inputs)
    }
