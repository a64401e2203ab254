"""`edgellm quantize`: a model's matrices in another number format.

Rows are read, widened, encoded and written in pieces, so that memory does not depend on the size of
the model. What is not a matrix, and what has its format already, is copied as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import EdgeLLMError
from edgellm.gguf_files import (
    Counter,
    Progress,
    copy,
    name_all,
    part_metadata,
    part_names,
    refuse_own,
)
from edgellm.kernels.cpu.convert import Converter
from edgellm.kernels.cpu.cores import default_threads
from edgellm.quant import QuantType, recipes
from edgellm.quant.block import UnencodableError
from edgellm.quant.gguf import GGUF, GGUFError, TensorInfo
from edgellm.quant.imatrix import ImportanceMatrix
from edgellm.quant.values import encode
from edgellm.quant.writer import NewTensor, Writer, refuse_existing

PIECE = 4 << 20  # elements that are converted at a time
Bytes = NDArray[np.uint8]
_FLOATS = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class Choice:
    """A tensor and what becomes of it."""

    tensor: TensorInfo
    type: QuantType
    importance: NDArray[np.float32] | None = None  # [matrices, columns]

    @property
    def new(self) -> NewTensor:
        return NewTensor(self.tensor.name, self.tensor.shape, self.type)

    @property
    def is_copied(self) -> bool:
        return self.type is self.tensor.type

    @property
    def is_blocks(self) -> bool:
        """Whether importance may count: of what is encoded, elements that share a scale."""
        return not self.is_copied and self.type.block > 1


def facts_of(gguf: GGUF, has_importance: bool = False) -> recipes.Facts:
    """What a mix asks about the model. GGUFError where a key is missing or senseless."""
    prefix = gguf.architecture
    heads = gguf.integers(f"{prefix}.attention.head_count")
    kv_heads = gguf.integers(f"{prefix}.attention.head_count_kv", heads)
    return recipes.Facts(
        n_layers=gguf.integer(f"{prefix}.block_count", low=1),
        n_gqa=int(heads.max()) // max(int(kv_heads.max()), 1),
        n_experts=gguf.integer(f"{prefix}.expert_count", 0),
        has_importance=has_importance,
    )


def plan(
    gguf: GGUF,
    mix: str,
    wishes: recipes.Wishes = recipes.NONE,
    *,
    imatrix: ImportanceMatrix | None = None,
    allow_requantize: bool = False,
) -> list[Choice]:
    """What becomes of each tensor. GGUFError and EdgeLLMError say what is wrong with the file or
    with a wish."""
    shapes = {name: tensor.shape for name, tensor in gguf.tensors.items()}
    types = recipes.choose(shapes, mix, facts_of(gguf, imatrix is not None), wishes)
    for pattern, _ in wishes.by_pattern:
        if not any(pattern.search(name) for name in types):
            raise EdgeLLMError(f"--tensor-type {pattern.pattern}: no matrix has such a name.")
    return planned(gguf, types, imatrix=imatrix, allow_requantize=allow_requantize)


def planned(gguf: GGUF, types: Mapping[str, QuantType], *, imatrix: ImportanceMatrix | None = None,
            allow_requantize: bool = False) -> list[Choice]:  # fmt: skip
    """The choices when the format of each matrix is known."""
    found = []
    for name, tensor in gguf.tensors.items():
        choice = Choice(tensor, types.get(name, tensor.type))
        if not choice.is_copied and tensor.type.name not in _FLOATS and not allow_requantize:
            raise GGUFError(
                gguf.path, 0, f"tensor {name}",
                f"is quantized already ({tensor.type}); quantize the F16 model, or accept a second "
                "loss with --allow-requantize",
            )  # fmt: skip
        if choice.is_blocks:
            choice = Choice(tensor, choice.type, importance_of(tensor, imatrix))
        found.append(choice)
    if imatrix is not None and not any(tensor in imatrix.sums for tensor in gguf.tensors):
        raise EdgeLLMError(
            f"The importance matrix names no matrix of {gguf.path}; it was measured on another "
            "model."
        )
    return found


def importance_of(tensor: TensorInfo, imatrix: ImportanceMatrix | None
                  ) -> NDArray[np.float32] | None:  # fmt: skip
    """[matrices, columns], or None; EdgeLLMError where it was measured on another model."""
    if imatrix is None:
        return None
    try:
        return imatrix.importance(tensor.name, tensor.shape[0], math.prod(tensor.shape[2:]))
    except ValueError as error:
        raise EdgeLLMError(f"The importance matrix {error}.") from None


def size_of(choices: Sequence[Choice]) -> int:
    """Bytes of tensor data."""
    return sum(choice.new.n_bytes for choice in choices)


def metadata_of(gguf: GGUF, file_type: int, extra: Mapping[str, bytes]) -> dict[str, bytes]:
    """Of the quantized file: the source's, what its matrices are, and ``extra``."""
    return gguf.encoded_metadata() | {
        "general.file_type": encode(file_type),
        "general.quantization_version": encode(recipes.QUANTIZATION_VERSION),
        **extra,
    }


def quantize(gguf: GGUF, out: str, choices: Sequence[Choice], file_type: int, *,
             extra: Mapping[str, bytes] | None = None, n_threads: int | None = None,
             keep_split: bool = False, force: bool = False, progress: Progress | None = None,
             ) -> list[str]:  # fmt: skip
    """Write the model with the chosen formats; the names of what was written. With keep_split there
    are as many parts as the source has, and `out` is their prefix. GGUFError."""
    metadata = metadata_of(gguf, file_type, extra or {})
    n_parts = len(gguf.parts) if keep_split else 1
    names = part_names(out.removesuffix(".gguf"), n_parts) if n_parts > 1 else [out]
    for name in names:
        refuse_own(gguf, name)
        refuse_existing(name, force)
    counter = Counter(sum(choice.tensor.n_bytes for choice in choices), progress)
    with Converter(n_threads or default_threads()) as converter, ExitStack() as unfinished:
        writers = []
        for number, name in enumerate(names):
            own = [c for c in choices if n_parts == 1 or c.tensor.part == number]
            said = (
                part_metadata(metadata, number, n_parts, len(choices)) if n_parts > 1 else metadata
            )
            writer = Writer(name, said, [c.new for c in own], force=force)
            unfinished.callback(writer.abandon)
            for choice in own:
                if choice.is_copied:
                    copy(gguf, [choice.tensor], writer, counter)
                else:
                    for encoded, n_read in pieces(gguf, choice, converter):
                        writer.write(encoded)
                        counter(n_read)
            writer.finish()
            writers.append(writer)
        name_all(writers)
    return names


def pieces(gguf: GGUF, choice: Choice, converter: Converter) -> Iterator[tuple[Bytes, int]]:
    """The encoded rows of a tensor, uint8 [rows, bytes], some at a time, and how many bytes of the
    source they were. GGUFError for values that the format cannot hold."""
    tensor = choice.tensor
    columns = tensor.shape[0]
    in_matrix = tensor.shape[1] if len(tensor.shape) > 1 else 1
    at_once = max(1, min(in_matrix, PIECE // columns))
    raw = np.empty((at_once, tensor.row_bytes), np.uint8)
    for matrix in range(tensor.rows // in_matrix):
        weights = None if choice.importance is None else choice.importance[matrix]
        for first in range(0, in_matrix, at_once):
            rows = raw[: min(at_once, in_matrix - first)]
            start = (matrix * in_matrix + first) * tensor.row_bytes
            gguf.read_into(tensor, start, rows.reshape(-1))
            try:
                encoded = converter.convert(rows, tensor.type, choice.type, weights)
            except UnencodableError as error:
                raise GGUFError(gguf.path, 0, f"tensor {tensor.name}", str(error)) from None
            yield encoded, rows.size
