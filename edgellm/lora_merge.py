"""Adapters merged into a copy of their base: W + sum of scale * B A, in the type that W has."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from edgellm.gguf_files import Counter, Progress, as_new, copy, refuse_own
from edgellm.kernels.cpu.convert import Converter
from edgellm.kernels.cpu.cores import default_threads
from edgellm.lora import Given, LoRAError, parse, read_pairs, values
from edgellm.quant import by_name
from edgellm.quant.block import UnencodableError
from edgellm.quant.gguf import GGUF, TensorInfo
from edgellm.quant.writer import Writer

Array = NDArray[np.float32]
_PIECE = 1 << 22  # elements that are merged at a time


def merge(
    base_path: str, adapters: Iterable[Given], out: str, *, n_threads: int | None = None,
    force: bool = False, progress: Progress | None = None,
) -> dict[str, int]:  # fmt: skip
    """Write the base with the adapters added; how many matrices of each type changed. Memory holds
    the adapters and one matrix at a time. LoRAError and GGUFError."""
    with ExitStack() as opened:
        base = opened.enter_context(GGUF(base_path))
        refuse_own(base, out)
        added: dict[str, list[tuple[Array, Array]]] = {}
        for adapter in map(parse, adapters):
            file = opened.enter_context(GGUF(adapter.path))
            refuse_own(file, out)
            for pair in read_pairs(file, base):
                with np.errstate(over="ignore"):  # of the sum, which is checked
                    b = pair.factor(adapter) * values(file, pair.b)
                added.setdefault(pair.name, []).append((values(file, pair.a), b))
        tensors = list(base.tensors.values())
        _refuse_without_encoder(base, [info for info in tensors if info.name in added])
        tell = Counter(sum(info.n_bytes for info in tensors), progress)
        converter = opened.enter_context(Converter(n_threads or default_threads()))
        metadata, new = base.encoded_metadata(), [as_new(info) for info in tensors]
        with Writer(out, metadata, new, force=force) as writer:
            for info in tensors:
                if info.name not in added:
                    copy(base, [info], writer, tell)
                    continue
                for piece in _merged(base, info, added[info.name], converter):
                    writer.write(piece)
                    tell(piece.nbytes)
    return collections.Counter(str(base.tensors[name].type) for name in added)


def _merged(
    base: GGUF, info: TensorInfo, added: list[tuple[Array, Array]], converter: Converter
) -> Iterator[NDArray[np.uint8]]:  # fmt: skip
    """The matrix after merging in its own type, some rows at a time. LoRAError for sums that the
    type cannot hold."""
    f32, step = by_name("f32"), max(1, _PIECE // info.shape[0])
    for first in range(0, info.rows, step):
        end = min(info.rows, first + step)
        raw = np.empty((end - first, info.row_bytes), np.uint8)
        base.read_into(info, first * info.row_bytes, raw.reshape(-1))
        rows = converter.convert(raw, info.type, f32).view(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # checked below
            for a, b in added:
                rows += b[first:end] @ a
        if not np.isfinite(rows).all():  # float32 would keep them
            raise LoRAError(f"{base.path}: {info.name} after merging has numbers out of range.")
        try:
            yield converter.convert(rows.view(np.uint8), f32, info.type)
        except UnencodableError as error:
            reason = str(error).partition(" in row")[0]  # of the piece
            raise LoRAError(f"{base.path}: {info.name} after merging: {reason}.") from None


def _refuse_without_encoder(base: GGUF, tensors: list[TensorInfo]) -> None:
    for info in tensors:
        try:
            info.type.quantize(np.zeros((1, info.type.block), np.float32))
        except TypeError:
            raise LoRAError(
                f"{base.path}: {info.name} is {info.type}, which cannot be written again after "
                "merging; merge into a file of another type, or use --lora at run time."
            ) from None
