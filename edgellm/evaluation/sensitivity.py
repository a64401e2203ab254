"""How much a model's predictions suffer when one of its matrices is quantized.

One matrix after another takes the values that a 4-bit format leaves of it, the text is read, and
the divergence from the undamaged model is measured. For other formats the divergence is taken to
grow with the squared error of the weights, which it does while it is small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.evaluation.allocation import Option
from edgellm.evaluation.divergence import log_probabilities
from edgellm.evaluation.text import Text
from edgellm.kernels.cpu.convert import Converter
from edgellm.llm import LLM
from edgellm.quant import QuantType, by_name
from edgellm.quant.gguf import TensorInfo
from edgellm.quant.imatrix import ImportanceMatrix
from edgellm.quant.recipes import fitting
from edgellm.quantize import Choice, importance_of, pieces

# What a tensor may become, for rows of any length (see recipes.fitting).
LADDER = ("q2_k", "q3_k", "iq4_xs", "q4_k", "q5_k", "q6_k", "q8_0")
PROBE = "q4_k"
_ROWS = 64  # of a matrix, spread over it, from which the error of a format is estimated

Bytes = NDArray[np.uint8]


@dataclass
class Reading:
    """A text, and what the undamaged model predicts: log-probabilities of the positions that count,
    [n, n_vocab] for each chunk."""

    llm: LLM
    text: Text
    logs: list[NDArray[np.float32]]

    @classmethod
    def of(cls, llm: LLM, text: Text) -> Reading:
        return cls(llm, text, [_logs(llm, chunk, text) for chunk in text.chunks])

    def divergence(self) -> float:
        """Mean KL, nats, of the model as it is now from what it was."""
        total, n = 0.0, 0
        for chunk, p in zip(self.text.chunks, self.logs, strict=True):
            q = _logs(self.llm, chunk, self.text)
            total += float((np.exp(p) * (p - q)).sum(dtype=np.float64))
            n += len(p)
        return max(total / n, 0.0)


def _logs(llm: LLM, chunk: NDArray[np.int64], text: Text) -> NDArray[np.float32]:
    rows = [log_probabilities(logits) for _, logits in llm.scan(chunk.tolist(), text.first)]
    return np.concatenate(rows)


def choices_for(tensor: TensorInfo) -> list[QuantType]:
    """The formats a tensor may have, each once; none that takes more room than it has now."""
    row = tensor.shape[0]
    kinds = dict.fromkeys(fitting(by_name(name), row) for name in LADDER)
    return [kind for kind in kinds if kind.row_bytes(row) <= tensor.row_bytes]


def options(reading: Reading, names: Sequence[str], imatrix: ImportanceMatrix | None,
            progress: Callable[[int], None] | None = None) -> dict[str, list[Option]]:  # fmt: skip
    """For each matrix what it costs and loses in each format. progress: tensors done."""
    llm, found = reading.llm, {}
    with Converter(llm.n_threads) as converter:
        for number, name in enumerate(names):
            tensor = llm.gguf.tensors[name]
            kinds = choices_for(tensor)
            if not kinds:
                continue
            weights = importance_of(tensor, imatrix)
            errors = {kind.name: _error(llm, tensor, kind, weights, converter) for kind in kinds}
            probe = fitting(by_name(PROBE), tensor.shape[0])
            probe = probe if probe in kinds else kinds[0]
            llm.replace(name, damaged(llm, Choice(tensor, probe, weights), converter))
            try:
                loss = reading.divergence()
            finally:
                llm.replace(name, None)
            scale = loss / errors[probe.name] if errors[probe.name] else 0.0
            found[name] = [
                Option(kind.name, tensor.rows * kind.row_bytes(tensor.shape[0]),
                       scale * errors[kind.name])
                for kind in kinds
            ]  # fmt: skip
            if progress:
                progress(number + 1)
    return found


def measured(reading: Reading, types: Mapping[str, QuantType], imatrix: ImportanceMatrix | None
             ) -> float:  # fmt: skip
    """The divergence with all matrices in these formats at once; the model is whole afterwards."""
    llm = reading.llm
    try:
        with Converter(llm.n_threads) as converter:
            for name, kind in types.items():
                tensor = llm.gguf.tensors[name]
                choice = Choice(tensor, kind, importance_of(tensor, imatrix))
                llm.replace(name, damaged(llm, choice, converter))
        return reading.divergence()
    finally:
        for name in types:
            llm.replace(name, None)


def damaged(llm: LLM, choice: Choice, converter: Converter) -> Bytes:
    """The tensor's bytes, in its own format, with what the other format leaves of its values."""
    tensor = choice.tensor
    out = np.empty((tensor.rows, tensor.row_bytes), np.uint8)
    row = 0
    for encoded, _ in pieces(llm.gguf, choice, converter):
        here = out[row : row + len(encoded)]
        converter.convert(encoded, choice.type, tensor.type, out=here)
        row += len(encoded)
    return out.reshape(-1)


def _error(llm: LLM, tensor: TensorInfo, kind: QuantType, weights: NDArray[np.float32] | None,
           converter: Converter) -> float:  # fmt: skip
    """Squared error of some rows over their squares, each column's weighted by its importance."""
    chosen = np.unique(np.linspace(0, tensor.rows - 1, _ROWS).astype(int))
    raw = np.empty((1, tensor.row_bytes), np.uint8)
    error = total = 0.0
    f32 = by_name("f32")
    in_matrix = tensor.shape[1] if len(tensor.shape) > 1 else 1
    for index in chosen.tolist():
        llm.gguf.read_into(tensor, index * tensor.row_bytes, raw[0])
        weight = None if weights is None else weights[index // in_matrix]
        values = converter.convert(raw, tensor.type, f32).view(np.float32)
        encoded = converter.convert(raw, tensor.type, kind, weight)
        kept = converter.convert(encoded, kind, f32).view(np.float32)
        counts = 1.0 if weight is None else weight
        error += float((counts * (values - kept) ** 2).sum(dtype=np.float64))
        total += float((counts * values**2).sum(dtype=np.float64))
    return error / total if total else 0.0
