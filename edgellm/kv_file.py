"""Keys and values of a token sequence on disk, so that a conversation goes on where it was left.

A file is a line of magic, the length of a header, the header (JSON: the model, the layout, the
tokens), the bytes of the blocks and of the recurrent state, and a checksum over all of it. It is
written whole or not at all and readable by its owner only. One that was made by another model,
another version of the kernels or for another layout is refused: the tokens would not be the same.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from edgellm import private_file
from edgellm.errors import EdgeLLMError
from edgellm.quant.gguf import GGUF

_MAGIC = b"edgellm kv 1\n"
_DIGEST = 32
_MOST_HEADER = 64 << 20
_SAMPLES, _SAMPLE_BYTES = 64, 4096


class KVFileError(EdgeLLMError):
    """A file of keys and values cannot be used."""


@dataclass(frozen=True)
class Saved:
    """``blocks[group]``: place -> the bytes of a block. ``state``: of recurrent layers behind all
    tokens, empty when there are none."""

    tokens: list[int]
    blocks: list[dict[int, bytes]]
    state: bytes


def fingerprint(model: GGUF) -> str:
    """Tells models apart, adapters and their scales included: hash of the size, of the header and
    of samples all over each file."""
    # of the files that were opened: their names may lead to others by now
    digest = hashlib.blake2b(digest_size=16)
    for part in model.parts:
        digest.update(str(part.size).encode())
        samples = [(i * part.size // _SAMPLES, _SAMPLE_BYTES) for i in range(_SAMPLES)]
        for start, length in [(0, 1 << 20), *samples]:
            data = bytearray(min(length, part.size - start))
            part.read_into(memoryview(data), start, "file")
            digest.update(data)
    for pairs in model.low_rank.values():
        digest.update(repr([pair.scale for pair in pairs]).encode())
    return digest.hexdigest()


def write(path: Path, layout: dict[str, Any], saved: Saved) -> int:
    """Save; returns the bytes written. ``layout``: what a reader must have too."""
    parts = [data for group in saved.blocks for data in group.values()]
    header = {
        "layout": layout,
        "tokens": saved.tokens,
        "places": [list(group) for group in saved.blocks],
        "sizes": [len(next(iter(group.values()), b"")) for group in saved.blocks],
        "state": len(saved.state),
    }
    text = json.dumps(header).encode()
    body = [_MAGIC, len(text).to_bytes(8, "little"), text, *parts, saved.state]
    digest = hashlib.blake2b(digest_size=_DIGEST)
    for part in body:
        digest.update(part)
    try:
        return private_file.write(path, [*body, digest.digest()])
    except OSError as error:
        raise KVFileError(f"{path} cannot be written: {error.strerror or error}.") from None


def read(path: Path, layout: dict[str, Any]) -> Saved:
    """What was saved, if it fits the layout and every byte is as it was written."""
    if path.exists() and not path.is_file():
        raise KVFileError(f"{path} is not a regular file.")  # a pipe would be waited for
    try:
        with open(path, "rb") as file:
            return _read(file, path, layout)
    except OSError as error:
        raise KVFileError(f"{path} cannot be read: {error.strerror or error}.") from None


def _read(file: BinaryIO, path: Path, layout: dict[str, Any]) -> Saved:
    digest = hashlib.blake2b(digest_size=_DIGEST)
    left = os.fstat(file.fileno()).st_size - _DIGEST

    def take(n: int) -> bytes:
        nonlocal left
        data = file.read(n) if 0 <= n <= left else b""
        if len(data) != n:
            raise KVFileError(f"{path} is damaged: it ends too early.")
        left -= n
        digest.update(data)
        return data

    if left < len(_MAGIC) or take(len(_MAGIC)) != _MAGIC:
        raise KVFileError(f"{path} is not a file of keys and values.")
    try:
        header = json.loads(take(min(_MOST_HEADER, int.from_bytes(take(8), "little"))))
        if header["layout"] != layout:
            raise KVFileError(
                f"{path} was saved by another model, another version of edgellm, or with other "
                "settings of the cache or of the GPU (--ngl, --strict-bits)."
            )
        tokens, places = header["tokens"], header["places"]
        sizes, n_state = header["sizes"], header["state"]
        blocks = [
            {place: take(size) for place in group}
            for group, size in zip(places, sizes, strict=True)
        ]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, KVFileError):
            raise
        raise KVFileError(f"{path} is damaged.") from None
    state = take(n_state)
    if left or file.read(_DIGEST) != digest.digest():
        raise KVFileError(f"{path} is damaged: its checksum is wrong.")
    return Saved(tokens, blocks, state)
