"""The number format of each tensor of a converted file, and its bytes in pieces."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from edgellm.convert.checkpoint import as_float32
from edgellm.convert.errors import ConvertError
from edgellm.convert.tensors import Planned
from edgellm.kernels.cpu.convert import Converter
from edgellm.quant import by_name
from edgellm.quant.block import QuantType, UnencodableError
from edgellm.quant.writer import NewTensor

OUTTYPES = ("auto", "f32", "f16", "bf16", "q8_0")
_PIECE = 1 << 22  # elements encoded at a time
_SOURCES = {"<f4": "f32", "<f2": "f16", "<u2": "bf16"}  # as Planned.read gives them
# Small, and read as they are by every runner: routers of experts, learned positions.
_FLOATS = (
    "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "position_embd.weight",
    "token_types.weight", "shortconv.conv.weight",
)  # fmt: skip


def resolve(outtype: str, tensors: list[Planned]) -> str:
    """What "auto" means: bf16 where the matrices are bf16, else f16."""
    if outtype != "auto":
        return outtype
    matrices = [t for t in tensors if len(t.shape) > 1]
    return "bf16" if matrices and matrices[0].sources[0].dtype == "BF16" else "f16"


def new_tensor(tensor: Planned, outtype: str) -> NewTensor:
    """Vectors, norms and factors are F32; rows that are no whole blocks fall back to F16."""
    shape = tensor.shape[::-1]  # GGUF order
    kind = by_name(outtype)
    is_float = tensor.name.endswith(_FLOATS) or "norm" in tensor.name
    if len(shape) == 1 or is_float or not tensor.name.endswith(".weight"):
        kind = by_name("f32")
    elif shape[0] % kind.block:
        kind = by_name("f16")
    return NewTensor(tensor.name, shape, kind)


def adapter_tensor(tensor: Planned, outtype: str) -> NewTensor:
    """Half of an adapter's pair."""
    return NewTensor(tensor.name, tensor.shape[::-1], by_name(outtype))


def data(tensor: Planned, kind: QuantType, converter: Converter) -> Iterator[NDArray[np.uint8]]:
    """The tensor's bytes, by pieces of whole rows. ConvertError for what the type cannot hold."""
    for elements in tensor.read():
        source = by_name(_SOURCES[elements.dtype.str])
        rows = np.ascontiguousarray(elements).reshape(math.prod(elements.shape[:-1]), -1)
        codes = rows.view(np.uint8)
        step = max(1, _PIECE // max(1, rows.shape[1]))
        for start in range(0, len(rows), step):
            at, part = tensor.sources[0], slice(start, start + step)
            if not np.isfinite(as_float32(rows[part])).all():  # copies of rows would keep them
                raise ConvertError(
                    f"{at.path}: tensor {at.name} has numbers that are not finite (NaN or "
                    "infinity); take an undamaged file."
                )
            try:
                yield converter.convert(codes[part], source, kind)
            except UnencodableError as error:
                reason = str(error).partition(" in row")[0]  # of the piece
                raise ConvertError(
                    f"{at.path}: tensor {at.name}: {reason}; bf16 and f32 (--outtype) hold any "
                    "finite number."
                ) from None
