"""GGUF files rewritten as they are: in parts, in one file again, with other metadata.

Parts are named and numbered as by gguf-split of llama.cpp: PREFIX-00001-of-00003.gguf ..., the
metadata in the first, split.no, split.count and split.tensors.count in all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from edgellm.errors import EdgeLLMError
from edgellm.quant.gguf import GGUF, MAX_PARTS, GGUFError, Part, TensorInfo
from edgellm.quant.values import KINDS, Value, encode
from edgellm.quant.writer import NewTensor, Writer, refuse_existing

Progress = Callable[[int, int], None]  # bytes done, bytes in all
MAX_TENSORS = 128  # of a part, as gguf-split has it
_PIECE = 8 << 20  # bytes copied at a time
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
_LAYOUT = re.compile(r"general\.alignment|split\..*")


def n_bytes_of(text: str, flag: str) -> int:
    """ "2G", "4.2G", "300M" or bytes; decimal units as in gguf-split. EdgeLLMError."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)([KMG]?)B?", text.strip().upper())
    if not match or not (found := int(float(match[1]) * _UNITS[match[2]])):
        raise EdgeLLMError(f"{flag} takes a size such as 2G or 300M, not {text!r}.")
    return found


def as_new(tensor: TensorInfo) -> NewTensor:
    return NewTensor(tensor.name, tensor.shape, tensor.type)


def copy(gguf: GGUF, tensors: Iterable[TensorInfo], out: Writer, done: Callable[[int], None]
         ) -> None:  # fmt: skip
    """Write the tensors' bytes; done is told how many there were."""
    buffer = memoryview(bytearray(_PIECE))
    for tensor in tensors:
        for start in range(0, tensor.n_bytes, _PIECE):
            piece = buffer[: min(_PIECE, tensor.n_bytes - start)]
            gguf.read_into(tensor, start, piece)
            out.write(piece)
            done(len(piece))


class Counter:
    """Bytes done so far, told on."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.done, self.total, self.progress = 0, total, progress

    def __call__(self, n: int) -> None:
        self.done += n
        if self.progress:
            self.progress(self.done, self.total)


# Parts


def part_names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}-{i + 1:05}-of-{count:05}.gguf" for i in range(count)]


def plan_parts(tensors: Sequence[NewTensor], max_tensors: int | None, max_bytes: int | None,
               is_first_empty: bool = False) -> list[list[NewTensor]]:  # fmt: skip
    """The tensors of each part, in order: no more than max_tensors, or max_bytes of data (a single
    larger tensor has a part of its own)."""
    parts: list[list[NewTensor]] = [[]] if is_first_empty or not tensors else []
    size = 0
    for tensor in tensors:
        is_full = not parts or (is_first_empty and len(parts) == 1)
        if max_tensors and parts:
            is_full |= len(parts[-1]) >= max_tensors
        if max_bytes and parts and parts[-1]:
            is_full |= size + tensor.n_bytes > max_bytes
        if is_full:
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += tensor.n_bytes
    return parts


def part_metadata(metadata: Mapping[str, bytes], number: int, count: int, n_tensors: int
                  ) -> dict[str, bytes]:  # fmt: skip
    """What the part of that number says, from 0 on."""
    shown = dict(metadata) if number == 0 else _alignment_of(metadata)
    return shown | {
        "split.no": encode(number, "uint16"),
        "split.tensors.count": encode(n_tensors, "int32"),
        "split.count": encode(count, "uint16"),
    }


def _alignment_of(metadata: Mapping[str, bytes]) -> dict[str, bytes]:
    key = "general.alignment"
    return {key: metadata[key]} if key in metadata else {}


def split(path: str, prefix: str, *, max_tensors: int | None = MAX_TENSORS,
          max_bytes: int | None = None, is_first_empty: bool = False, force: bool = False,
          dry_run: bool = False, progress: Progress | None = None
          ) -> list[tuple[str, list[NewTensor]]]:  # fmt: skip
    """Write a model in parts; their names and tensors. No part has its name before all are
    written. GGUFError."""
    with GGUF(path) as gguf, ExitStack() as open_parts:
        planned = plan_parts(
            [as_new(t) for t in gguf.tensors.values()], max_tensors, max_bytes, is_first_empty
        )
        if len(planned) > MAX_PARTS:
            raise EdgeLLMError(
                f"{path} would have {len(planned)} parts, and models have at most {MAX_PARTS}; "
                "allow larger ones with --split-max-tensors or --split-max-size."
            )
        names = part_names(prefix, len(planned))
        for name in names:
            refuse_own(gguf, name)
            refuse_existing(name, force)
        found = list(zip(names, planned, strict=True))
        if dry_run:
            return found
        counter = Counter(sum(t.n_bytes for t in gguf.tensors.values()), progress)
        metadata, writers = gguf.encoded_metadata(), []
        for number, (name, tensors) in enumerate(found):
            said = part_metadata(metadata, number, len(names), len(gguf.tensors))
            writer = Writer(name, said, tensors, force=force)
            open_parts.callback(writer.abandon)
            copy(gguf, [gguf.tensors[t.name] for t in tensors], writer, counter)
            writer.finish()
            writers.append(writer)
        name_all(writers)
        return found


def name_all(writers: Sequence[Writer]) -> None:
    """Name the finished parts of a model, the first one last: by it a model is opened."""
    for writer in reversed(writers):
        writer.rename()


def merge(path: str, out: str, *, force: bool = False, progress: Progress | None = None) -> int:
    """Write a model of several parts, any of which `path` is, as one file; the number of parts."""
    with GGUF(path) as gguf:
        refuse_own(gguf, out)
        if "split.count" not in gguf.metadata:
            raise GGUFError(path, 0, "file", "is in one piece already")
        tensors = list(gguf.tensors.values())
        counter = Counter(sum(t.n_bytes for t in tensors), progress)
        metadata = gguf.encoded_metadata()
        with Writer(out, metadata, [as_new(t) for t in tensors], force=force) as writer:
            copy(gguf, tensors, writer, counter)
        return len(gguf.parts)


def refuse_own(gguf: GGUF, out: str) -> None:
    """A file that is being read cannot be replaced, with whatever flag."""
    refuse_read((part.path for part in gguf.parts), out)


def refuse_read(paths: Iterable[str | os.PathLike[str]], out: str) -> None:
    """The same of any files."""
    if os.path.exists(out) and any(os.path.samefile(path, out) for path in paths):
        raise GGUFError(out, 0, "file", "is what is read; write to another name")


# Metadata


def set_metadata(path: str, out: str, values: Mapping[str, Value], removed: Sequence[str] = (), *,
                 force: bool = False, progress: Progress | None = None) -> None:  # fmt: skip
    """Write the file with other values; a key that is there keeps its type. Of a model in parts
    the first one is written, which has them. `out` may be `path`, with `force`. GGUFError."""
    with GGUF(path) as gguf:
        part = _described(gguf, out)
        metadata = part.encoded_metadata()
        for key in removed:
            _refuse_layout(path, key)
            if metadata.pop(key, None) is None:
                raise GGUFError(path, 0, f"metadata key {key}", "does not exist")
        for key, value in values.items():
            _refuse_layout(path, key)
            metadata[key] = _like(path, key, value, metadata.get(key))
        tensors = [t for t in gguf.tensors.values() if gguf.parts[t.part] is part]
        counter = Counter(sum(t.n_bytes for t in tensors), progress)
        writer = Writer(out, metadata, [as_new(t) for t in tensors], force=force)
        try:
            copy(gguf, tensors, writer, counter)
            writer.finish()
            # What could not be read any more is refused while the old file is still there.
            (GGUF if len(gguf.parts) == 1 else Part)(writer.partial).close()
            writer.rename()
        except GGUFError as error:
            raise GGUFError(out, 0, error.field, error.reason) from None
        finally:
            writer.abandon()


def _described(gguf: GGUF, out: str) -> Part:
    """The part that has the metadata, if that is what was opened and `out` can take its place."""
    first, n = gguf.parts[0], len(gguf.parts)
    if first.path != gguf.path:
        reason = f"does not describe the model; what does is {first.path}"
        raise GGUFError(gguf.path, 0, "file", reason)
    if n > 1 and not out.endswith(end := part_names("", n)[0]):
        reason = f"is to be part 1 of {n}: its name must end in {end}, or merge the parts first"
        raise GGUFError(out, 0, "file", reason)
    return first


def _refuse_layout(path: str, key: str) -> None:
    if _LAYOUT.fullmatch(key):
        raise GGUFError(path, 0, f"metadata key {key}", "describes where data lies; it must stay")


def _like(path: str, key: str, value: Value, old: bytes | None) -> bytes:
    """The value encoded, of the same type as the old one."""
    kind = None
    if old is not None:
        kind = next((name for name, number in KINDS.items() if number == old[0]), "array")
    fits: dict[str, Any] = {
        "string": str,
        "bool": bool,
        "float32": int | float,
        "float64": int | float,
    }
    if kind is not None and (
        kind == "array"
        or not isinstance(value, fits.get(kind, int))
        or isinstance(value, bool) != (kind == "bool")
    ):
        raise GGUFError(path, 0, f"metadata key {key}", f"is of type {kind}; {value!r} is not")
    try:
        key.encode()  # words of a command line may be no UTF-8
        return encode(value, kind)
    except UnicodeEncodeError:
        raise GGUFError(path, 0, f"metadata key {key}", "cannot be set: no UTF-8") from None
    except ValueError as error:
        raise GGUFError(path, 0, f"metadata key {key}", f"cannot be set: {error}") from None
