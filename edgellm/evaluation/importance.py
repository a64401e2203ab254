"""What `edgellm imatrix` measures: the squared inputs of every matrix, summed over a text."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgellm.evaluation.text import Text, scan
from edgellm.kernels.graph import Op, Tensor
from edgellm.llm import LLM
from edgellm.quant.imatrix import ImportanceMatrix


def measure(llm: LLM, text: Text, name: str = "", with_output: bool = False,
            progress: Callable[[int], None] | None = None) -> ImportanceMatrix:  # fmt: skip
    """Sums over the chunks. `name` is the text's; the output matrix is left out unless asked for,
    since it is kept precise anyway. progress is told of the chunks done. EdgeLLMError where the
    model is not on the CPU alone: hooks do not reach further."""
    collected = _Collector(llm, with_output)
    try:
        for number, chunk in enumerate(text.chunks):
            # Logits are needed only where the output matrix is.
            for _ in scan(llm, chunk, first=0 if with_output else text.n_ctx - 1):
                pass
            if progress:
                progress(number + 1)
    finally:
        collected.stop()
    return ImportanceMatrix(
        sums={key: sums.astype(np.float32) for key, sums in collected.sums.items()},
        counts={key: counts.astype(np.float32) for key, counts in collected.counts.items()},
        datasets=[name] if name else [], n_chunks=text.n_chunks, chunk_size=text.n_ctx,
    )  # fmt: skip


class _Collector:
    """Hooks on the inputs of all matrices."""

    def __init__(self, llm: LLM, with_output: bool) -> None:
        self.sums: dict[str, NDArray[np.float64]] = {}  # [matrices, columns]
        self.counts: dict[str, NDArray[np.float64]] = {}  # [matrices]
        self._readers: dict[Tensor, list[Op]] = {}
        # of experts' inputs: how many steps they were seen in, and the last one's rows
        self._rows: dict[Tensor, tuple[int, NDArray[np.float32]]] = {}
        for op in llm.graph.ops:
            if op.kind not in ("linear", "head_linear", "moe_linear"):
                continue
            weight = op.weights["weight"]
            if op.output is llm.graph.output and not with_output:
                continue
            matrices = weight.shape[2] if len(weight.shape) > 2 else 1
            self.sums[weight.name] = np.zeros((matrices, weight.n_in))
            self.counts[weight.name] = np.zeros(matrices)
            for tensor in op.inputs if op.kind == "moe_linear" else op.inputs[:1]:
                self._readers.setdefault(tensor, []).append(op)
        self.stop = llm.on_tensors({tensor: self._take(tensor) for tensor in self._readers})

    def _take(self, tensor: Tensor) -> Callable[[NDArray[np.float32]], None]:
        """What is done with the tensor's rows of each step."""
        plain = [op for op in self._readers[tensor] if op.kind != "moe_linear"]
        experts = [op for op in self._readers[tensor] if op.kind == "moe_linear"]

        def take(rows: NDArray[np.float32]) -> None:
            if plain:
                squares = np.einsum("ij,ij->j", rows, rows, dtype=np.float64)
            for op in plain:
                name = op.weights["weight"].name
                self.sums[name] += squares.reshape(self.sums[name].shape)
                self.counts[name] += len(rows)
            if experts:
                steps = self._rows[tensor][0] if tensor in self._rows else 0
                self._rows[tensor] = steps + 1, rows.copy()
            for op in experts:
                self._take_experts(op)

        return take

    def _take_experts(self, op: Op) -> None:
        """Once both of its inputs are there: activations and who gets them, in either order."""
        seen = [self._rows.get(tensor) for tensor in op.inputs]
        if seen[0] is None or seen[1] is None or seen[0][0] != seen[1][0]:
            return
        (_, x), (_, route) = seen[0], seen[1]
        name = op.weights["weight"].name
        n_in, n_used = self.sums[name].shape[1], route.shape[1] // 2
        ids = route[:, :n_used].astype(np.int64)
        each = np.broadcast_to(x.reshape(len(x), -1, n_in), (len(x), n_used, n_in))
        for expert in np.unique(ids):
            chosen = each[ids == expert]
            self.sums[name][expert] += np.einsum("ij,ij->j", chosen, chosen, dtype=np.float64)
            self.counts[name][expert] += len(chosen)
