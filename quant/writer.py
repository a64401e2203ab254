"""Writing a GGUF file that is whole or not there.

Everything goes to NAME.partial. When its last byte is written the file is brought to the disk, read
back and compared with what was written by checksum, and only then takes its name. A process killed
at any moment leaves the old file, or none, and a .partial file that the next run replaces.
Layout: quant/header.py.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from edgellm.quant import files
from edgellm.quant.block import QuantType
from edgellm.quant.header import GGUFError
from edgellm.quant.values import encode

ALIGNMENT = 32  # of tensor data, unless the metadata says otherwise
_COPY = 8 << 20  # bytes read back at a time


class NewTensor(NamedTuple):
    """A tensor that is to be written."""

    name: str
    shape: tuple[int, ...]  # GGUF order: shape[0] is the row length
    type: QuantType

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.type.row_bytes(self.shape[0])


def head(metadata: Mapping[str, bytes], tensors: Sequence[NewTensor], alignment: int) -> bytes:
    """Everything before the tensor data, padding included. metadata: values as `encode` gives."""
    parts = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_string(key), value]
    offset = 0
    for tensor in tensors:
        parts += [_string(tensor.name), struct.pack("<I", len(tensor.shape))]
        parts.append(struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape))
        parts.append(struct.pack("<IQ", tensor.type.id, offset))
        offset += _padded(tensor.n_bytes, alignment)
    data = b"".join(parts)
    return data.ljust(_padded(len(data), alignment), b"\0")


def _padded(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


class Writer:
    """A file in the making; a context manager whose clean end gives the file its name.

    write() takes the data of all tensors in their order, in pieces of any size; pieces of one
    tensor end where it ends. Errors are GGUFError: the target exists and `force` is not given, a
    second process writes it, the disk is full or gave back something else.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        metadata: Mapping[str, bytes],
        tensors: Sequence[NewTensor],
        *,
        force: bool = False,
    ) -> None:
        self.path = os.fspath(path)
        self.partial = f"{self.path}.partial"
        self._tensors = tensors
        self._alignment = _alignment(metadata)
        self._next = 0  # of _tensors: the one that is being written
        self._written = 0  # bytes of it
        self._digest = hashlib.sha256()
        self.n_bytes = 0  # of the file so far
        refuse_existing(self.path, force)
        self._fd = self._open()
        try:
            self._put(head(metadata, tensors, self._alignment))
        except BaseException:
            self.abandon()
            raise

    def _open(self) -> int:
        """The partial file, empty and ours."""
        while True:
            try:
                fd = files.open_to_write(self.partial)
            except OSError as error:
                raise self._error(f"cannot be written: {error.strerror}") from None
            if not files.lock(fd):
                os.close(fd)
                raise self._error("is being written by another process; wait for it to end")
            # Between the two calls its owner may have finished: what is open has its name by now.
            if files.is_at(fd, self.partial):
                os.ftruncate(fd, 0)
                return fd
            os.close(fd)

    def write(self, data: bytes | memoryview | NDArray[Any]) -> None:
        """The next bytes of the tensors; an array gives its own, in C order."""
        if isinstance(data, np.ndarray):
            data = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        view = memoryview(data).cast("B")
        while len(view):
            if self._next == len(self._tensors):
                raise ValueError(f"{self.path}: {len(view)} bytes more than its tensors hold")
            tensor = self._tensors[self._next]
            piece = view[: tensor.n_bytes - self._written]
            self._put(piece)
            view = view[len(piece) :]
            self._written += len(piece)
            if self._written == tensor.n_bytes:
                self._put(bytes(_padded(self._written, self._alignment) - self._written))
                self._next, self._written = self._next + 1, 0

    def _put(self, data: bytes | memoryview) -> None:
        self._digest.update(data)
        view = memoryview(data)
        try:
            while len(view):
                n = os.write(self._fd, view)
                view = view[n:]
                self.n_bytes += n
        except OSError as error:
            raise self._error(f"cannot be written: {error.strerror}") from None

    def finish(self) -> None:
        """Bring the partial file to the disk and compare it with what was written."""
        if self._next < len(self._tensors):
            name = self._tensors[self._next].name
            raise ValueError(f"{self.path}: tensor {name} was not written whole")
        try:
            os.fsync(self._fd)
            files.forget(self._fd)
            found, offset = hashlib.sha256(), 0
            buffer = memoryview(bytearray(_COPY))
            while n := files.fill(self._fd, buffer, offset):
                found.update(buffer[:n])
                offset += n
        except OSError as error:
            raise self._error(f"cannot be written: {error.strerror}") from None
        if found.digest() != self._digest.digest():
            raise self._error("was read back otherwise than it was written; check the disk")

    def rename(self) -> None:
        """Give the finished file its name."""
        try:
            os.replace(self.partial, self.path)
            files.sync_folder(os.path.dirname(self.path) or ".")
        except OSError as error:
            raise self._error(f"cannot be written: {error.strerror}") from None
        self._close()

    def abandon(self) -> None:
        """Leave nothing of it. The folder is as it was before."""
        if self._fd >= 0:
            os.unlink(self.partial)  # while the lock is held: it is ours
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _error(self, reason: str) -> GGUFError:
        return GGUFError(self.path, 0, "file", reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.finish()
                self.rename()
        finally:
            self.abandon()  # nothing, once it is renamed


def refuse_existing(path: str, force: bool) -> None:
    """GGUFError if the target exists and is not to be replaced, or cannot be a file."""
    if os.path.isdir(path):
        raise GGUFError(path, 0, "file", "is a directory; give the path of the file to write")
    if os.path.exists(path) and not os.path.isfile(path):  # renaming would take a device's place
        raise GGUFError(path, 0, "file", "is a device or pipe; give the path of a file to write")
    if not force and os.path.lexists(path):
        raise GGUFError(path, 0, "file", "exists; use --force to replace it, or another name")


def _alignment(metadata: Mapping[str, bytes]) -> int:
    value = metadata.get("general.alignment", encode(ALIGNMENT))
    return int(struct.unpack("<I", value[4:8])[0])
