"""The head of a GGUF file: metadata and tensor descriptions, read without trusting a byte of it.

Layout (all little-endian): magic "GGUF", u32 version, u64 n_tensors, u64 n_kv; n_kv times key,
u32 value type, value; n_tensors times name, u32 n_dims, u64 dims, u32 type, u64 offset; padding to
the alignment; tensor data. A string is a u64 length and its bytes.
Source: ggml/docs/gguf.md of the ggml project.

The head is read with pread into memory, in growing pieces, never mapped: a file that shrinks while
we read gives a short read and an error, where a mapping would give SIGBUS. No count or length is
believed before it is compared with the bytes left, so memory stays in proportion to the file.
"""

import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from edgellm.quant import TYPES, QuantType, supported
from edgellm.quant.files import fill

MAX_ENTRIES = 65_536  # of metadata keys, and of tensors
MAX_STRINGS = 1 << 22  # in all string arrays together; the largest real vocabularies need 0.8 M
MAX_METADATA = 512 << 20  # bytes; the largest real ones are 16 MiB
MAX_KEY = 65_535
MAX_TENSOR_NAME = 64
MAX_DIM = 1 << 40
FIRST_READ = 1 << 20

STRING, ARRAY, BOOL, UINT32 = 8, 9, 7, 4
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q"}
SCALARS |= {11: "<q", 12: "<d"}
_SCALAR = {value_type: struct.Struct(code) for value_type, code in SCALARS.items()}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

# Types of ggml that we name but do not run; those in brackets ggml itself removed.
UNSUPPORTED = {
    4: "Q4_2 (removed from ggml)",
    5: "Q4_3 (removed from ggml)",
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    31: "Q4_0_4_4 (removed from ggml)",
    32: "Q4_0_4_8 (removed from ggml)",
    33: "Q4_0_8_8 (removed from ggml)",
    36: "IQ4_NL_4_4 (removed from ggml)",
    37: "IQ4_NL_4_8 (removed from ggml)",
    38: "IQ4_NL_8_8 (removed from ggml)",
    40: "NVFP4",
    41: "Q1_0",
}

# What people hand over instead of a GGUF file, by its first bytes.
NOT_GGUF = {
    b"version https://git-lfs": "is a Git LFS pointer, not the model itself; run git lfs pull",
    b"<": "is a web page or XML, not a model; download the file itself",
    b"PK\x03\x04": "is a ZIP or PyTorch file; convert the model to GGUF first",
    b"lmgg": "is a GGML file from before GGUF; convert the model again",
    b"tjgg": "is a GGML file from before GGUF; convert the model again",
}


class GGUFError(ValueError):
    """The one refusal of a file: which file, where in it, which field, and why."""

    def __init__(self, path: str, offset: int, field: str, reason: str) -> None:
        self.path, self.offset, self.field, self.reason = path, offset, field, reason
        where = f" (byte {offset})" if offset else ""
        super().__init__(f"{path}: {field} {reason}{where}")


class Entry(NamedTuple):
    """Where a metadata value came from, for messages and for writing it again unchanged."""

    value_type: int
    element_type: int | None  # of an array
    offset: int  # of its type
    end: int = 0  # of its bytes


@dataclass(frozen=True)
class TensorHead:
    """A tensor as its file describes it."""

    name: str
    shape: tuple[int, ...]  # GGUF order: shape[0] is the row length
    type: QuantType
    offset: int  # from the start of the data section
    at: int  # byte of the description, for messages

    @property
    def n_bytes(self) -> int:
        rows = 1
        for dim in self.shape[1:]:
            rows *= dim
        return rows * self.type.row_bytes(self.shape[0])


def shown(name: str) -> str:
    """A name from a file, safe to print on a terminal and of bounded length."""
    short = name if len(name) <= 100 else name[:97] + "..."
    return short if short.isprintable() else repr(short)


def read_exactly(fd: int, size: int, offset: int) -> bytes:
    """size bytes at offset; fewer only where the file ends (it may have shrunk)."""
    out = bytearray(size)
    return bytes(out[: fill(fd, memoryview(out), offset)])


class Cursor:
    """A position in the head of an open file. Raises GGUFError, nothing else."""

    def __init__(self, fd: int, path: str, size: int) -> None:
        self.fd, self.path, self.size = fd, path, size
        self.data = b""
        self.pos = 0
        self.n_strings = 0
        # The tensor descriptions follow the metadata; with every cap reached they take 9 MiB.
        self.limit = min(size, MAX_METADATA + (16 << 20))

    def error(self, field: str, reason: str, offset: int | None = None) -> GGUFError:
        return GGUFError(self.path, self.pos if offset is None else offset, field, reason)

    @property
    def left(self) -> int:
        return self.limit - self.pos

    def need(self, n: int, field: str) -> None:
        """Make n bytes at the position available in `data`."""
        end = self.pos + n
        if end <= len(self.data):
            return
        if end > self.limit:
            if self.limit < self.size:
                raise self.error(field, f"takes the metadata beyond {MAX_METADATA >> 20} MiB")
            reason = f"needs {n} bytes, but only {self.size - self.pos} are left"
            raise self.error(field, f"{reason}; the file is cut short or damaged")
        have = len(self.data)
        want = min(self.limit, max(end, 2 * have, FIRST_READ))
        self.data += read_exactly(self.fd, want - have, have)
        if len(self.data) < want:
            raise self.error("file", "shrank while it was read; download or copy it again")

    def take(self, n: int, field: str) -> bytes:
        self.need(n, field)
        start, self.pos = self.pos, self.pos + n
        return self.data[start : self.pos]

    def u32(self, field: str) -> int:
        return int(_U32.unpack(self.take(4, field))[0])

    def u64(self, field: str) -> int:
        return int(_U64.unpack(self.take(8, field))[0])

    def string(self, field: str) -> bytes:
        return self.take(self.u64(field), field)

    def name(self, field: str, longest: int) -> str:
        """A key or tensor name: 1..longest bytes of UTF-8 without NUL."""
        start = self.pos
        n = self.u64(field)
        if not 1 <= n <= longest:
            raise self.error(field, f"has {n} bytes; 1 to {longest} are allowed", start)
        raw = self.take(n, field)
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            raise self.error(field, "is not valid UTF-8", start) from None
        if "\0" in text:
            raise self.error(field, "contains a NUL character", start)
        return text

    def value(self, key: str) -> tuple[Any, Entry]:
        """A metadata value: int, float, bool, str, numpy array (copied) or list of bytes.

        Text that is not UTF-8 gets replacement characters: a damaged description should not keep
        anyone from running a model.
        """
        field = f"metadata key {shown(key)}"
        offset = self.pos
        value_type = self.u32(field)
        if value_type == STRING:
            return self.string(field).decode(errors="replace"), Entry(value_type, None, offset)
        if value_type == ARRAY:
            element_type = self.u32(field)
            return self._array(field, element_type), Entry(value_type, element_type, offset)
        if value_type not in _SCALAR:
            raise self.error(field, f"has unknown value type {value_type}", offset)
        code = _SCALAR[value_type]
        value = code.unpack(self.take(code.size, field))[0]
        if value_type == BOOL:
            if value > 1:
                raise self.error(field, f"is a boolean with byte {value}; 0 or 1 expected", offset)
            value = bool(value)
        return value, Entry(value_type, None, offset)

    def _array(self, field: str, element_type: int) -> Any:
        if element_type == ARRAY:
            raise self.error(field, "is an array of arrays, which is not supported")
        if element_type != STRING and element_type not in _SCALAR:
            raise self.error(field, f"has unknown element type {element_type}")
        count = self.u64(field)
        # A string takes at least its length, eight bytes.
        size = 8 if element_type == STRING else _SCALAR[element_type].size
        if count * size > self.left:
            reason = f"claims {count} elements, more than the file can hold"
            raise self.error(field, f"{reason}; it is cut short or damaged")
        if element_type == STRING:
            return self._strings(field, count)
        dtype = np.dtype(SCALARS[element_type])
        # A copy: `take` gives bytes, which numpy could only view read-only.
        array = np.frombuffer(self.take(count * size, field), dtype).copy()
        if element_type != BOOL:
            return array
        if array.size and array.max() > 1:
            raise self.error(field, "is a boolean array with bytes other than 0 and 1")
        return array.view(np.bool_)

    def _strings(self, field: str, count: int) -> list[bytes]:
        """The one hot loop: vocabularies have 300,000 strings, so it works on local names."""
        self.n_strings += count
        if self.n_strings > MAX_STRINGS:
            raise self.error(field, f"takes the file beyond {MAX_STRINGS} strings")
        out: list[bytes] = []
        append, unpack = out.append, _U64.unpack_from
        data, pos, have = self.data, self.pos, len(self.data)
        for _ in range(count):
            start = pos + 8
            if start <= have:
                pos = start + unpack(data, pos)[0]
                if pos <= have:
                    append(data[start:pos])
                    continue
                pos = start - 8
            self.pos = pos  # beyond what is in memory: the careful way reads on or refuses
            append(self.string(field))
            data, pos, have = self.data, self.pos, len(self.data)
        self.pos = pos
        return out


@dataclass(frozen=True)
class Head:
    """Everything before the tensor data, with each part checked by itself."""

    version: int
    metadata: dict[str, Any]
    entries: dict[str, Entry]
    tensors: list[TensorHead]
    data_offset: int


def read_head(fd: int, path: str, size: int) -> Head:
    """Parse the head of an open regular file of that size. GGUFError on anything unexpected."""
    cursor = Cursor(fd, path, size)
    version = _read_version(cursor)
    n_tensors, n_kv = cursor.u64("tensor count"), cursor.u64("metadata count")
    for count, what in ((n_kv, "metadata keys"), (n_tensors, "tensors")):
        if count > MAX_ENTRIES:
            raise cursor.error("header", f"claims {count} {what}; at most {MAX_ENTRIES} may be")
    # The least a key takes: length, one letter, type, one byte. A tensor: + n_dims, dim, offset.
    if n_kv * 14 + n_tensors * 33 > cursor.left:
        claim = f"claims {n_kv} metadata keys and {n_tensors} tensors"
        raise cursor.error("header", f"{claim}, more than the file can hold; it is cut short")

    metadata: dict[str, Any] = {}
    entries: dict[str, Entry] = {}
    for index in range(n_kv):
        start = cursor.pos
        key = cursor.name(f"metadata key {index}", MAX_KEY)
        if key in metadata:
            raise cursor.error(f"metadata key {shown(key)}", "appears twice", start)
        metadata[key], entry = cursor.value(key)
        entries[key] = entry._replace(end=cursor.pos)
    alignment = _alignment(cursor, metadata, entries)

    tensors = [_read_tensor(cursor, index, alignment) for index in range(n_tensors)]
    _check_distinct(cursor, tensors)
    return Head(version, metadata, entries, tensors, -(-cursor.pos // alignment) * alignment)


def _read_version(cursor: Cursor) -> int:
    if cursor.size == 0:
        raise cursor.error("file", "is empty")
    start = read_exactly(cursor.fd, min(cursor.size, 64), 0)
    if start[:4] == b"FUGG":
        raise cursor.error("file", "is byte-swapped GGUF; convert it to little-endian")
    if start[:4] != b"GGUF"[: cursor.size]:
        for prefix, reason in NOT_GGUF.items():
            if start.startswith(prefix):
                raise cursor.error("file", reason)
        if start[8:9] == b"{":
            raise cursor.error("file", "is a safetensors file; convert the model to GGUF first")
        raise cursor.error("file", "is no GGUF file: it does not begin with GGUF")
    if cursor.size < 24:
        reason = f"has {cursor.size} bytes, less than the 24 of a header; it is cut short"
        raise cursor.error("file", reason)
    cursor.take(4, "magic")
    version = cursor.u32("version")
    if version not in (2, 3):
        if version & 0xFFFF == 0:  # 3 read with the other byte order is 0x03000000
            reason = "is big-endian, which is not supported; convert it to little-endian"
        else:
            reason = f"has GGUF version {version}; versions 2 and 3 are supported"
            if version == 1:
                reason += "; convert the model again"
        raise cursor.error("file", reason, 4)
    return version


def _alignment(cursor: Cursor, metadata: dict[str, Any], entries: dict[str, Entry]) -> int:
    key = "general.alignment"
    if key not in metadata:
        return 32
    value, entry = metadata[key], entries[key]
    ok = entry.value_type == UINT32 and 8 <= value <= 1 << 20 and value & (value - 1) == 0
    if not ok:
        reason = "must be a uint32 and a power of two from 8 to 1048576"
        raise cursor.error(f"metadata key {key}", reason, entry.offset)
    return int(value)


def _check_distinct(cursor: Cursor, tensors: list[TensorHead]) -> None:
    """Names must differ and data must not overlap."""
    names: set[str] = set()
    for tensor in tensors:
        if tensor.name in names:
            raise cursor.error(f"tensor {shown(tensor.name)}", "appears twice", tensor.at)
        names.add(tensor.name)
    by_offset = sorted(tensors, key=lambda tensor: tensor.offset)
    for before, after in zip(by_offset, by_offset[1:], strict=False):
        if before.offset + before.n_bytes > after.offset:
            reason = f"overlaps the data of tensor {shown(before.name)}"
            raise cursor.error(f"tensor {shown(after.name)}", reason, after.at)


def _read_tensor(cursor: Cursor, index: int, alignment: int) -> TensorHead:
    at = cursor.pos
    name = cursor.name(f"name of tensor {index}", MAX_TENSOR_NAME)
    field = f"tensor {shown(name)}"
    n_dims = cursor.u32(field)
    if not 1 <= n_dims <= 4:
        raise cursor.error(field, f"has {n_dims} dimensions; 1 to 4 are allowed", at)
    shape = tuple(cursor.u64(field) for _ in range(n_dims))
    if not all(1 <= dim <= MAX_DIM for dim in shape):
        raise cursor.error(field, f"has shape {list(shape)}; each must be 1 to 2^40", at)
    type_id = cursor.u32(field)
    quant_type = TYPES.get(type_id)
    if quant_type is None:
        called = UNSUPPORTED.get(type_id, f"number {type_id}, unknown to edgellm")
        reason = f"has type {called}, which is not supported; supported: {supported()}"
        raise cursor.error(field, reason, at)
    if shape[0] % quant_type.block:
        reason = f"has rows of {shape[0]} elements, not a multiple of the {quant_type.block} that"
        raise cursor.error(field, f"{reason} a block of {quant_type} holds", at)
    offset = cursor.u64(field)
    if offset % alignment:
        reason = f"starts at {offset}, not at a multiple of the alignment {alignment}"
        raise cursor.error(field, reason, at)
    return TensorHead(name, shape, quant_type, offset, at)
