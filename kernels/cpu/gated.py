"""A gated feed-forward in one stage: gate, up, activation and quantization of a run of columns.

Each thread takes chunks of the hidden columns through all four while they are in its cache. Nothing
of it goes through memory, and no thread waits for another in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.kernels.cpu.activations import make_quantize
from edgellm.kernels.cpu.elementwise import make_map
from edgellm.kernels.cpu.stages import Argument, Call
from edgellm.kernels.cpu.store import EmitKernel
from edgellm.kernels.cpu.vector import I64, Emitter, Value
from edgellm.kernels.graph import Graph, Op, Tensor

if TYPE_CHECKING:
    from edgellm.kernels.cpu.program import Program

_GATED = ("swiglu", "geglu", "swiglu_clamped")
_COLUMNS = (128, 64, 32)  # of a chunk: whole spans of activations and whole row groups


def make_columns(row_kernel: EmitKernel, n_arguments: int) -> EmitKernel:
    """A row kernel over chunks of columns of all rows. Arguments: the row kernel's for the first
    chunk, what each of them grows by from chunk to chunk, address of the number of rows."""

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        *both, count = e.arguments(args, 2 * n_arguments + 1)
        block = e.stack(8 * n_arguments)
        with e.loop(hi, lo) as chunk:
            for k in range(n_arguments):
                e.store(both[k] + chunk * both[n_arguments + k], block + 8 * k)
            row_kernel(e, block, e.const(0), e.load(I64, count), tid)

    return emit


def gated_blocks(graph: Graph, whole: set[Tensor]) -> dict[Op, tuple[Op, Op]]:
    """Activations of gated feed-forwards with their two matrices, where nobody else reads in
    between. ``whole``: tensors that somebody looks at."""
    made, readers = {op.output: op for op in graph.ops}, graph.readers()
    found = {}
    for op in graph.ops:
        if op.kind in _GATED and not whole & {op.output, *op.inputs}:
            gate, up = (made[tensor] for tensor in op.inputs)
            alone = gate is not up and all(len(readers[tensor]) == 1 for tensor in op.inputs)
            if alone and gate.kind == up.kind == "linear":
                found[op] = gate, up
    return found


def columns_of_chunk(p: Program, op: Op) -> int:
    """Columns of a chunk; 0 where there is no fitting number."""
    forms = p.forms(op.output)
    unit = max([p.target.lanes, *(form.span for form in forms)])
    return next((c for c in _COLUMNS if op.output.dim % c == 0 and c % unit == 0), 0)


def lower_gated(p: Program, op: Op, matrices: tuple[Op, Op], columns: int) -> None:
    """The whole block as one stage; gate, up and op get their buffers."""
    dim, count = op.output.dim, p.count(op.output)
    calls, reads, writes = [], [], []
    for matrix in matrices:
        kernel, args, x, out = p.linear_call(matrix, columns // p.target.lanes)
        calls.append(Call(kernel, args))
        reads.append(x)
        writes.append(out)
    gate, up = (p.buffers[matrix.output] for matrix in matrices)
    out = p.output(op)
    step = 4 * columns
    own: list[Argument] = [gate, gate.row_bytes, up, up.row_bytes, out, out.row_bytes, columns]
    kernel = p.store.get(f"{op.kind}_columns", make_columns(make_map(op.kind), len(own)))
    calls.append(Call(kernel, [*own, step, 0, step, 0, step, 0, 0, count]))
    writes.append(out)
    for form in p.forms(op.output):
        quantized = p.quantized_buffer(op.output, form)
        n_spans = columns // form.span
        own = [out, out.row_bytes, quantized, quantized.row_bytes, n_spans]
        name = f"quantize_{form.name}_columns"
        kernel = p.store.get(name, make_columns(make_quantize(form), len(own)))
        steps: list[Argument] = [step, 0, form.row_bytes(columns), 0, 0]
        calls.append(Call(kernel, [*own, *steps, count]))
        writes.append(quantized)
    label = matrices[0].label
    p.stages.chain(label, calls, p.stages.constant(dim // columns), 1, reads, writes)
