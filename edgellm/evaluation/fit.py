"""`quantize --target-size` and `--max-kld`: a format for each matrix, by how much each matters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edgellm.errors import EdgeLLMError
from edgellm.evaluation import sensitivity
from edgellm.evaluation.allocation import Option, for_loss, for_size
from edgellm.evaluation.sensitivity import Reading
from edgellm.evaluation.text import Text
from edgellm.llm import LLM
from edgellm.quant import QuantType, by_name
from edgellm.quant.gguf import GGUF
from edgellm.quant.imatrix import ImportanceMatrix
from edgellm.quant.recipes import MIXES, is_matrix
from edgellm.quant.writer import ALIGNMENT, NewTensor, head
from edgellm.quantize import metadata_of

_TRIES = 6  # of sums of losses, until their measured divergence is near the wanted one
_NEAR = 0.85


@dataclass(frozen=True)
class Fit:
    """``types`` by tensor; ``n_bytes`` of the whole file; ``expected`` is the sum of the losses,
    ``measured`` the divergence with all formats at once, nats."""

    types: dict[str, QuantType]
    n_bytes: int
    expected: float
    measured: float

    @property
    def file_type(self) -> int:
        """general.file_type of the mix whose main format most matrices have."""
        names = [kind.name for kind in self.types.values()]
        common = max(set(names), key=names.count)
        return next((mix.file_type for mix in MIXES.values() if mix.base == common), 0)


class Fitter:
    """Sensitivities of a loaded model on a text; each fit is quick once they are measured."""

    def __init__(self, llm: LLM, text: Text, imatrix: ImportanceMatrix | None = None,
                 extra: Mapping[str, bytes] | None = None,
                 progress: Callable[[int, int], None] | None = None) -> None:  # fmt: skip
        """extra: metadata that the file will have beside the model's. progress: matrices measured,
        and how many there are."""
        self._gguf, self._imatrix, self._extra = llm.gguf, imatrix, (extra := extra or {})
        used = {weight.name for op in llm.graph.ops for weight in op.weights.values()}
        names = [n for n, t in llm.gguf.tensors.items() if n in used and is_matrix(n, t.shape)]
        self._reading = Reading.of(llm, text)
        self.options = sensitivity.options(
            self._reading, names, imatrix,
            lambda done: progress(done, len(names)) if progress else None,
        )  # fmt: skip
        self._other_bytes = size_with(llm.gguf, {}, extra) - sum(
            llm.gguf.tensors[name].n_bytes for name in self.options
        )

    def of_size(self, n_bytes: int) -> Fit:
        """The least loss in a file of at most n_bytes; EdgeLLMError if none is so small."""
        room = n_bytes - self._other_bytes - ALIGNMENT * len(self.options)
        chosen = for_size(self.options, room)
        if chosen is None:
            least = sum(min(o.n_bytes for o in some) for some in self.options.values())
            raise EdgeLLMError(
                f"--target-size: the smallest file of this model has {least + self._other_bytes:,} "
                f"bytes; {n_bytes:,} are not enough."
            )
        return self._fit(chosen)

    def of_loss(self, most: float) -> Fit:
        """The smallest file found whose measured divergence is at most that; EdgeLLMError if even
        the best formats diverge more."""
        aim, best = most, None
        for _ in range(_TRIES):
            found = self._fit(for_loss(self.options, aim))
            if found.measured <= most and (best is None or found.n_bytes < best.n_bytes):
                best = found
            if found.measured <= most and found.measured >= _NEAR * most:
                break
            aim *= 0.97 * most / max(found.measured, most / 8)
        if best is None:
            best = self._fit(for_loss(self.options, 0.0))
        if best.measured > most:
            raise EdgeLLMError(
                f"--max-kld: with the best formats the divergence is {best.measured:.5f}; "
                f"{most} cannot be had."
            )
        return best

    def _fit(self, chosen: Mapping[str, Option]) -> Fit:
        types = {name: by_name(option.type) for name, option in chosen.items()}
        return Fit(
            types, size_with(self._gguf, types, self._extra), sum(o.loss for o in chosen.values()),
            sensitivity.measured(self._reading, types, self._imatrix),
        )  # fmt: skip


def size_with(gguf: GGUF, types: Mapping[str, QuantType], extra: Mapping[str, bytes]) -> int:
    """Bytes of the file whose tensors have these formats, and their own elsewhere."""
    tensors = [
        NewTensor(name, tensor.shape, types.get(name, tensor.type))
        for name, tensor in gguf.tensors.items()
    ]
    start = len(head(metadata_of(gguf, 0, extra), tensors, ALIGNMENT))
    return start + sum(-(-tensor.n_bytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)
