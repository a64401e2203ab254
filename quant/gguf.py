"""GGUF files: metadata by key with the type one expects, tensors by name, weights by pread.

A model may lie in several files (`name-00001-of-00003.gguf` ...); they are opened together and look
like one. The head of each is checked whole when it is opened (header.py, vocabulary.py). Weights
are never mapped: a file cut short later gives GGUFError from `read_into`, not a signal.
"""

import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import EllipsisType, TracebackType
from typing import Any, NamedTuple, NoReturn, Self, TypeVar, cast, overload

import numpy as np
from numpy.typing import NDArray

from edgellm.quant.block import QuantType
from edgellm.quant.files import fill, open_to_read
from edgellm.quant.header import Entry, GGUFError, Head, read_head, shown
from edgellm.quant.vocabulary import check_vocabulary

__all__ = ["GGUF", "GGUFError", "TensorInfo"]

D = TypeVar("D")
SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
MAX_PARTS = 1024
_VALUE_TYPES = {int: 11, float: 12, bool: 7, str: 8}  # of a value that is given, not read


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and what it is."""

    name: str
    shape: tuple[int, ...]  # GGUF order: shape[0] is the row length (K)
    type: QuantType
    offset: int  # of its first byte in its file
    part: int  # index of its file

    @property
    def rows(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def row_bytes(self) -> int:
        return self.type.row_bytes(self.shape[0])

    @property
    def n_bytes(self) -> int:
        return self.rows * self.row_bytes


class LowRank(NamedTuple):
    """Names of two tensors, and the factor of what their product adds to a matrix."""

    a: str  # shape [K, rank]
    b: str  # shape [rank, rows]
    scale: float


class Part:
    """One open file with its parsed head. Raises GGUFError."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.fd = _open(path)
        try:
            info = os.fstat(self.fd)
            if not stat.S_ISREG(info.st_mode):
                kind = "a directory" if stat.S_ISDIR(info.st_mode) else "not a regular file"
                raise GGUFError(path, 0, "file", f"is {kind}; give the path of a .gguf file")
            self.size = info.st_size
            self.head: Head = read_head(self.fd, path, self.size)
            self._check_extents()
            if os.fstat(self.fd).st_size != self.size:
                raise GGUFError(path, 0, "file", "changed its size while it was read")
        except OSError as error:
            self.close()
            raise GGUFError(path, 0, "file", f"cannot be read: {error.strerror}") from None
        except BaseException:
            self.close()
            raise

    def _check_extents(self) -> None:
        end = self.head.data_offset
        for tensor in self.head.tensors:
            stop = self.head.data_offset + tensor.offset + tensor.n_bytes
            if stop > self.size:
                reason = f"ends at byte {stop}, but the file has {self.size}"
                reason += "; it is cut short: download or copy it again"
                raise GGUFError(self.path, tensor.at, f"tensor {shown(tensor.name)}", reason)
            end = max(end, stop)
        self.trailing = max(0, self.size - end)

    def read_into(self, out: memoryview, offset: int, field: str) -> None:
        """Fill `out` (bytes) from that offset of the file."""
        try:
            n = fill(self.fd, out, offset)
        except OSError as error:
            reason = f"cannot be read: {error.strerror}"
            raise GGUFError(self.path, offset, field, reason) from None
        if n < len(out):
            reason = "cannot be read: the file has become shorter since it was opened"
            raise GGUFError(self.path, offset + n, field, reason)

    def encoded_metadata(self) -> dict[str, bytes]:
        """The metadata's values as the file has them, type first."""
        found = {}
        for key, entry in self.head.entries.items():
            value = bytearray(entry.end - entry.offset)
            self.read_into(memoryview(value), entry.offset, f"metadata key {shown(key)}")
            found[key] = bytes(value)
        return found

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _open(path: str) -> int:
    try:
        return open_to_read(path)
    except FileNotFoundError:
        raise GGUFError(path, 0, "file", "does not exist") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise GGUFError(path, 0, "file", f"cannot be opened: {reason}") from None


class GGUF:
    """An open model. Use as a context manager, or close(); reading is safe from many threads.

    metadata: key -> int, float, bool, str, numpy array, or list[bytes] for an array of strings.
    tensors: name -> TensorInfo, in the order of the files.
    entries: key -> value types as written in the file (for writing it again).
    low_rank: name of a tensor -> what adapters add to it; see `attach`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open and check a file and, if it is one of several parts, its siblings in the same
        directory. GGUFError names the file, the field and the reason of any refusal."""
        self.path = os.fspath(path)
        self.parts: list[Part] = []
        self.low_rank: dict[str, list[LowRank]] = {}
        self._replaced: dict[str, memoryview] = {}
        try:
            self._open_parts()
            first = self.parts[0]
            self.version: int = first.head.version
            self.metadata: Mapping[str, Any] = first.head.metadata
            self.entries: Mapping[str, Entry] = first.head.entries
            check_vocabulary(first.path, first.head.metadata, first.head.entries)
            self.tensors: dict[str, TensorInfo] = {}
            for index, part in enumerate(self.parts):
                self._add_tensors(index, part)
            self._check_split_total()
        except BaseException:
            self.close()
            raise

    def _open_parts(self) -> None:
        opened = Part(self.path)
        self.parts = [opened]
        count, number = _split_of(opened)
        if count <= 1:
            return
        match = SPLIT_NAME.fullmatch(os.path.basename(self.path))
        if not match or (int(match[2]), int(match[3])) != (number + 1, count):
            reason = f"says it is part {number + 1} of {count}, but its name does not end in"
            _refuse_split(opened, f"{reason} -{number + 1:05}-of-{count:05}.gguf; rename it back")
        folder = os.path.dirname(self.path)
        for index in range(count):
            if index == number:
                continue
            name = f"{match[1]}-{index + 1:05}-of-{count:05}.gguf"
            part = Part(os.path.join(folder, name))
            self.parts.insert(index, part)  # ascending, so `opened` ends up at its own number
            if _split_of(part) != (count, index):
                _refuse_split(part, f"does not say that it is part {index + 1} of {count}")

    def _add_tensors(self, index: int, part: Part) -> None:
        for head in part.head.tensors:
            if head.name in self.tensors:
                other = self.parts[self.tensors[head.name].part].path
                reason = f"appears in {other} as well"
                raise GGUFError(part.path, head.at, f"tensor {shown(head.name)}", reason)
            offset = part.head.data_offset + head.offset
            self.tensors[head.name] = TensorInfo(head.name, head.shape, head.type, offset, index)

    def _check_split_total(self) -> None:
        total = self.integer("split.tensors.count", None)
        if total is not None and len(self.parts) > 1 and total != len(self.tensors):
            self._refuse("split.tensors.count", f"is {total}; the parts hold {len(self.tensors)}")

    def override(self, values: Mapping[str, int | float | bool | str]) -> None:
        """Take other metadata values than the file's, in memory; GGUFError where a key has a value
        of another kind."""
        entries = dict(self.entries)
        for key, value in values.items():
            old = self.metadata.get(key, value)
            numbers = [isinstance(v, int | float) and not isinstance(v, bool) for v in (old, value)]
            if type(old) is not type(value) and not all(numbers):
                self._refuse(key, f"cannot become {value!r}: it is of another kind")
            entries[key] = entries.get(key, Entry(_VALUE_TYPES[type(value)], None, 0))
        self.metadata, self.entries = {**self.metadata, **values}, entries

    def replace(self, info: TensorInfo, data: NDArray[np.uint8] | None) -> None:
        """Read these bytes in place of the tensor's, or its own again; ValueError unless there are
        as many."""
        if data is None:
            self._replaced.pop(info.name, None)
            return
        if data.shape != (info.n_bytes,):
            raise ValueError(f"tensor {info.name} has {info.n_bytes} bytes, not {data.shape}")
        self._replaced[info.name] = memoryview(cast(Any, data))

    def attach(self, other: "GGUF", names: Mapping[str, str]) -> None:
        """Take tensors of another open file too, under new names (old -> new, none of them here
        yet); that file is closed with this one."""
        for old, new in names.items():
            info = other.tensors[old]
            self.tensors[new] = replace(info, name=new, part=info.part + len(self.parts))
        self.parts += other.parts
        other.parts = []

    def encoded_metadata(self) -> dict[str, bytes]:
        """The metadata's values as the file has them, for `Writer`, without the keys that say how
        a model is cut into parts."""
        encoded = self.parts[0].encoded_metadata()
        return {k: value for k, value in encoded.items() if not k.startswith("split.")}

    @property
    def n_bytes(self) -> int:
        """Size of all parts together."""
        return sum(part.size for part in self.parts)

    @property
    def trailing_bytes(self) -> int:
        """Bytes after the last tensor, padding included; legal, but worth a word if many."""
        return sum(part.trailing for part in self.parts)

    @property
    def architecture(self) -> str:
        return self.string("general.architecture")

    def read_into(
        self, info: TensorInfo, start_byte: int, out: memoryview | NDArray[np.uint8]
    ) -> None:
        """Fill `out` (contiguous, writable bytes) with the tensor's bytes from `start_byte` on.

        ValueError if that is not within the tensor; GGUFError if the file no longer holds it.
        """
        view = memoryview(cast(Any, out)).cast("B")  # ndarray is a Buffer to mypy from 3.12 on
        if start_byte < 0 or start_byte + len(view) > info.n_bytes:
            raise ValueError(
                f"bytes {start_byte} to {start_byte + len(view)} are not within "
                f"tensor {info.name} of {info.n_bytes} bytes"
            )
        if not self.parts:
            raise ValueError(f"{self.path} is closed")
        if info.name in self._replaced:
            view[:] = self._replaced[info.name][start_byte : start_byte + len(view)]
            return
        part = self.parts[info.part]
        part.read_into(view, info.offset + start_byte, f"tensor {shown(info.name)}")

    # Metadata with an expected type. Without a default a missing key is refused.

    @overload
    def string(self, key: str) -> str: ...
    @overload
    def string(self, key: str, default: D) -> str | D: ...
    def string(self, key: str, default: Any = ...) -> Any:
        """A text."""
        return self._get(key, default, str, "text")

    @overload
    def boolean(self, key: str) -> bool: ...
    @overload
    def boolean(self, key: str, default: D) -> bool | D: ...
    def boolean(self, key: str, default: Any = ...) -> Any:
        """A truth value."""
        return self._get(key, default, bool, "a boolean")

    @overload
    def integer(self, key: str, *, low: int | None = ..., high: int | None = ...) -> int: ...
    @overload
    def integer(
        self, key: str, default: D, *, low: int | None = ..., high: int | None = ...
    ) -> int | D: ...
    def integer(
        self, key: str, default: Any = ..., *, low: int | None = None, high: int | None = None
    ) -> Any:
        """A whole number from low to high; the default is not compared with them."""
        return self._in_range(key, self._get(key, default, int, "an integer"), low, high)

    @overload
    def number(self, key: str, *, low: float | None = ..., high: float | None = ...) -> float: ...
    @overload
    def number(
        self, key: str, default: D, *, low: float | None = ..., high: float | None = ...
    ) -> float | D: ...
    def number(
        self, key: str, default: Any = ..., *, low: float | None = None, high: float | None = None
    ) -> Any:
        """A finite number (an integer will do) from low to high."""
        value = self._get(key, default, (int, float), "a number")
        if key not in self.metadata:
            return value
        if not math.isfinite(value):
            self._refuse(key, f"is {value}; a finite number is needed")
        return self._in_range(key, float(value), low, high)

    @overload
    def strings(self, key: str) -> list[bytes]: ...
    @overload
    def strings(self, key: str, default: D) -> list[bytes] | D: ...
    def strings(self, key: str, default: Any = ...) -> Any:
        """An array of strings, as bytes."""
        return self._get(key, default, list, "an array of strings")

    @overload
    def integers(self, key: str) -> NDArray[np.int64]: ...
    @overload
    def integers(self, key: str, default: D) -> NDArray[np.int64] | D: ...
    def integers(self, key: str, default: Any = ...) -> Any:
        """An array of whole numbers or flags, int64. A single number counts as an array of one:
        per-layer values are written either way."""
        return self._numeric(key, default, "iub", np.int64, "an array of integers")

    @overload
    def numbers(self, key: str) -> NDArray[np.float64]: ...
    @overload
    def numbers(self, key: str, default: D) -> NDArray[np.float64] | D: ...
    def numbers(self, key: str, default: Any = ...) -> Any:
        """An array of numbers, float64; a single one counts as an array of one."""
        return self._numeric(key, default, "iuf", np.float64, "an array of numbers")

    def _get(self, key: str, default: Any, kind: Any, what: str) -> Any:
        if key not in self.metadata:
            if isinstance(default, EllipsisType):
                raise GGUFError(self.path, 0, f"metadata key {key}", "is missing")
            return default
        value = self.metadata[key]
        # bool is an int to Python, not to us.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self._refuse(key, f"must be {what}")
        return value

    def _in_range(self, key: str, value: Any, low: float | None, high: float | None) -> Any:
        if key in self.metadata:
            if (low is not None and value < low) or (high is not None and value > high):
                least = "no lower limit" if low is None else f"at least {low}"
                most = "no upper limit" if high is None else f"at most {high}"
                self._refuse(key, f"is {value}; allowed: {least}, {most}")
        return value

    def _numeric(self, key: str, default: Any, kinds: str, dtype: Any, what: str) -> Any:
        value = self._get(key, default, (np.ndarray, int, float), what)
        if key not in self.metadata:
            return value
        array = np.atleast_1d(np.asarray(value))
        if array.dtype.kind not in kinds:
            self._refuse(key, f"must be {what}")
        # Only uint64 can exceed what int64 holds; numpy would wrap without a word.
        if dtype is np.int64 and array.size and int(array.max()) >= 1 << 63:
            self._refuse(key, "has a value beyond 2^63")
        return array.astype(dtype)

    def _refuse(self, key: str, reason: str) -> NoReturn:
        raise GGUFError(self.path, self.entries[key].offset, f"metadata key {key}", reason)

    def close(self) -> None:
        for part in self.parts:
            part.close()
        self.parts = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _split_of(part: Part) -> tuple[int, int]:
    """(number of parts, index of this one) as the file says; (1, 0) when it says nothing."""
    metadata, values = part.head.metadata, []
    for key, default in (("split.count", 1), ("split.no", 0)):
        value = metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_PARTS:
            entry = part.head.entries[key]
            reason = f"must be an integer from 0 to {MAX_PARTS}"
            raise GGUFError(part.path, entry.offset, f"metadata key {key}", reason)
        values.append(value)
    count, number = values
    if count > 1 and number >= count:
        _refuse_split(part, f"says it is part {number + 1} of {count}")
    return count, number


def _refuse_split(part: Part, reason: str) -> NoReturn:
    raise GGUFError(part.path, 0, "file", reason)
