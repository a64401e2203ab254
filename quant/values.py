"""Metadata values as their bytes in a GGUF file: u32 type and the value, an array with its element
type and count before it. Source: ggml/docs/gguf.md of the ggml project."""

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.quant.header import ARRAY, BOOL, SCALARS, STRING

# Names of the value types as the format document has them.
KINDS = {
    "uint8": 0, "int8": 1, "uint16": 2, "int16": 3, "uint32": 4, "int32": 5, "float32": 6,
    "bool": BOOL, "string": STRING, "uint64": 10, "int64": 11, "float64": 12,
}  # fmt: skip
_BY_DTYPE = {np.dtype(SCALARS[number]): number for number in KINDS.values() if number in SCALARS}
_BY_DTYPE[np.dtype(np.bool_)] = BOOL

Value = (
    bool | int | float | str | bytes | list[str | bytes] | list[str] | list[bytes] | NDArray[Any]
)


def encode(value: Value, kind: str | None = None) -> bytes:
    """The bytes of a value. Without a kind an int is uint32, int32 below 0 and 64 bits wide where
    it must be; a float is float32; an array of numbers has the type of its dtype.

    ValueError when the value is not of the kind or outside its range.
    """
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, str | bytes):
        return struct.pack("<I", STRING) + _string(value)
    if isinstance(value, list | tuple):
        head = struct.pack("<IIQ", ARRAY, STRING, len(value))
        return head + b"".join([_string(text) for text in value])
    number = KINDS[kind or _kind(value)]
    try:
        return struct.pack("<I", number) + struct.pack(SCALARS[number], value)
    except (struct.error, OverflowError):
        raise ValueError(f"{value} is no {kind or _kind(value)}") from None


def _kind(value: bool | int | float) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, float):
        return "float32"
    if value < 0:
        return "int32" if value >= -(1 << 31) else "int64"
    return "uint32" if value < 1 << 32 else "uint64"


def _string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def _array(values: NDArray[Any]) -> bytes:
    try:
        number = _BY_DTYPE[values.dtype.newbyteorder("<")]
    except KeyError:
        raise ValueError(f"GGUF has no arrays of {values.dtype}") from None
    return struct.pack("<IIQ", ARRAY, number, values.size) + np.ascontiguousarray(values).tobytes()
