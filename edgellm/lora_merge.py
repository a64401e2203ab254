"""Adapters merged into a copy of their base: W + sum of scale * B A, in the type that W has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgellm.gguf_files import as_new, copy, refuse_own
from edgellm.kernels.cpu.cores import default_threads
from edgellm.lora import Adapter, LoRAError, parse, read_pairs, values
from edgellm.quant.gguf import GGUF, TensorInfo
from edgellm.quant.writer import Writer

Progress = Callable[[int, int], None]  # bytes written, bytes in all
Array = NDArray[np.float32]
_PIECE = 1 << 20  # elements that are merged at a time, by each thread


def merge(
    base_path: str, adapters: Iterable[str | Adapter], out: str, *, n_threads: int = 1,
    force: bool = False, progress: Progress | None = None,
) -> Counter[str]:  # fmt: skip
    """Write the base with the adapters added; how many matrices of each type changed. Memory holds
    the adapters and one matrix at a time. LoRAError and GGUFError."""
    with ExitStack() as opened:
        base = opened.enter_context(GGUF(base_path))
        refuse_own(base, out)
        added: dict[str, list[tuple[Array, Array]]] = {}
        for adapter in map(parse, adapters):
            file = opened.enter_context(GGUF(adapter.path))
            for pair in read_pairs(file, base):
                factor = np.float32(pair.scale * adapter.scale)
                b = factor * values(file, pair.b)
                added.setdefault(pair.name, []).append((values(file, pair.a), b))
        tensors = list(base.tensors.values())
        _refuse_without_encoder(base, [info for info in tensors if info.name in added])
        total, done = sum(info.n_bytes for info in tensors), 0

        def tell(n: int) -> None:
            nonlocal done
            done += n
            if progress is not None:
                progress(done, total)

        pool = opened.enter_context(ThreadPoolExecutor(n_threads))
        metadata, new = base.encoded_metadata(), [as_new(info) for info in tensors]
        with Writer(out, metadata, new, force=force) as writer:
            for info in tensors:
                if info.name not in added:
                    copy(base, [info], writer, tell)
                    continue
                work = partial(_merged, base, info, added[info.name])
                for piece in pool.map(work, *zip(*_pieces(info), strict=True)):
                    writer.write(piece)
                    tell(piece.nbytes)
    return Counter(str(base.tensors[name].type) for name in added)


def usable_threads(asked: int) -> int:
    """-1: as many as there are cores."""
    return default_threads() if asked == -1 else asked


def _pieces(info: TensorInfo) -> Iterator[tuple[int, int]]:
    """(first row, row behind the last)."""
    step = max(1, _PIECE // info.shape[0])
    for start in range(0, info.rows, step):
        yield start, min(info.rows, start + step)


def _merged(
    base: GGUF, info: TensorInfo, added: list[tuple[Array, Array]], first: int, end: int
) -> NDArray[np.uint8]:
    """Rows of the base as they are stored after merging."""
    raw = np.empty((end - first, info.row_bytes), np.uint8)
    base.read_into(info, first * info.row_bytes, raw.reshape(-1))
    rows = info.type.dequantize(raw)
    for a, b in added:
        rows = rows + b[first:end] @ a
    return info.type.quantize(rows)


def _refuse_without_encoder(base: GGUF, tensors: list[TensorInfo]) -> None:
    for info in tensors:
        try:
            info.type.quantize(np.zeros((1, info.type.block), np.float32))
        except TypeError:
            raise LoRAError(
                f"{base.path}: {info.name} is {info.type}, which cannot be written again after "
                "merging; merge into a file of another type, or use --lora at run time."
            ) from None
