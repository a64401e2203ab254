"""The files of a Hugging Face directory: JSON, and tensors in safetensors files.

The safetensors package opens and checks each file. It gives numpy arrays, which know no bfloat16,
so a tensor's bytes are read from the place that the file's own header states (a JSON object behind
a length of 8 bytes: huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.convert.errors import ConvertError, library
from edgellm.quant.files import fill, open_to_read

DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


@dataclass(frozen=True)
class Source:
    """A tensor of the directory. ``shape`` is numpy's: the last dimension is a row."""

    name: str
    path: Path
    dtype: str  # F32, F16 or BF16; for others reading is refused
    shape: tuple[int, ...]
    offset: int  # of its first byte in its file

    def read(self) -> NDArray[Any]:
        """Its elements: float32, float16, or the uint16 bits of bfloat16 (see as_float32)."""
        if self.dtype not in DTYPES:
            raise ConvertError(
                f"{self.path}: tensor {self.name} is of type {self.dtype}; only F32, F16 and BF16 "
                "can be converted: take the model's unquantized files."
            )
        found = np.empty(self.shape, DTYPES[self.dtype])
        if found.size:
            fd = open_to_read(str(self.path))
            try:
                n = fill(fd, found.reshape(-1).view(np.uint8).data, self.offset)
            finally:
                os.close(fd)
            if n < found.nbytes:
                raise ConvertError(f"{self.path}: has become shorter while it was read.")
        return found


def as_float32(elements: NDArray[Any]) -> NDArray[np.float32]:
    """What Source.read gave, widened; exact for all three types."""
    if elements.dtype == np.uint16:
        return (elements.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return elements.astype(np.float32, copy=False)


class Checkpoint:
    """A directory; raises ConvertError naming the file that is missing or damaged."""

    def __init__(self, folder: str | os.PathLike[str], weights: str = "model.safetensors") -> None:
        """``weights``: the file of tensors, or what its index and parts are called after."""
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ConvertError(f"{self.folder}: is no directory; give that of a model.")
        self.tensors: dict[str, Source] = {}
        for path in self._files(weights):
            for source in _sources(path):
                if source.name in self.tensors:
                    raise ConvertError(f"{path}: tensor {source.name} is in another file as well.")
                self.tensors[source.name] = source

    def _files(self, weights: str) -> list[Path]:
        index = self.folder / f"{weights}.index.json"
        if not index.is_file():
            path = self.folder / weights
            if not path.is_file():
                raise ConvertError(
                    f"{self.folder}: has no {weights} and no {index.name}; other formats of "
                    "weights, as .bin, are not read: save them as safetensors (save_pretrained)."
                )
            return [path]
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(v, str) for v in names.values()):
            raise ConvertError(f"{index}: weight_map must say in which file each tensor is.")
        paths = [self.folder / name for name in sorted(set(names.values()))]
        for path in paths:
            if path.parent != self.folder or not path.is_file():
                raise ConvertError(f"{index}: names {path.name}, which is not in the directory.")
        return paths

    def files(self) -> list[Path]:
        """All that may be read."""
        return [path for path in self.folder.iterdir() if path.suffix != ".gguf"]

    def json(self, name: str) -> dict[str, Any]:
        """A JSON file of the directory, empty where there is none."""
        path = self.folder / name
        return read_json(path) if path.is_file() else {}


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds a JSON object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConvertError(f"{path}: does not exist; it is needed.") from None
    except (ValueError, RecursionError) as error:
        raise ConvertError(f"{path}: is no JSON: {error}.") from None
    if not isinstance(found, dict):
        raise ConvertError(f"{path}: must hold a JSON object.")
    return found


def _sources(path: Path) -> list[Source]:
    safetensors = library("safetensors")
    try:  # the library checks that offsets are in order, fit types and shapes, and fill the file
        with safetensors.safe_open(path, framework="numpy") as file:
            names = list(file.offset_keys())
    except (safetensors.SafetensorError, OSError) as error:
        raise ConvertError(f"{path}: cannot be read as safetensors: {error}.") from None
    with open(path, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        head = json.loads(stream.read(length))
    return [
        Source(
            name,
            path,
            head[name]["dtype"],
            tuple(head[name]["shape"]),
            8 + length + head[name]["data_offsets"][0],
        )
        for name in names
    ]
