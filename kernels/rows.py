"""Compute only what is asked for: rows are selected as early as the graph allows.

A model file selects the tokens whose logits are wanted before its output norm. Ops that work row by
row give the same from selected rows, so the selection moves up through them: what follows the last
layer's attention is computed for those tokens alone, and for none while a long prompt is read.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from edgellm.kernels.graph import ROW_WISE, Graph, Op, Tensor


def select_early(graph: Graph, keep: Collection[Tensor]) -> Graph:
    """The same graph with ``select`` moved up. Tensors in ``keep`` stay whole: somebody looks at
    them."""
    selects = [op for op in graph.ops if op.kind == "select"]
    if len(selects) != 1:
        return graph
    (select,) = selects
    readers: dict[Tensor, list[Op]] = {}
    for op in graph.ops:
        for tensor in op.inputs:
            readers.setdefault(tensor, []).append(op)
    narrow: dict[Tensor, Tensor] = {}  # tensors of which only selected rows are read
    for op in reversed(graph.ops):
        tensor = op.output
        if op.kind in ROW_WISE and tensor not in keep and tensor.rows == "tokens":
            if all(r is select or r.output in narrow for r in readers.get(tensor, ())):
                narrow[tensor] = replace(tensor, rows="out")
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
