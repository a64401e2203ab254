"""Checksums of a model's tensors, as lines of gguf-hash (llama.cpp): they do not change when only
metadata does, or the order in which a model is cut into parts."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from edgellm.errors import EdgeLLMError
from edgellm.quant.gguf import GGUF

ALGORITHMS = ("sha256", "sha1", "uuid")
NAMESPACE = uuid.UUID("ef001206-dadc-5f6d-a15f-3359e577d4e5")  # of UUIDs of GGUF data
_PIECE = 8 << 20


class Line(NamedTuple):
    """A checksum of a tensor, or of all tensors in order."""

    algorithm: str
    digest: str
    file: str
    tensor: str | None = None

    def __str__(self) -> str:
        name = f"{self.file}:{self.tensor}" if self.tensor else self.file
        return f"{self.algorithm:<10}{self.digest}  {name}"


def checksums(path: str, algorithms: Sequence[str], by_tensor: bool = True,
              progress: Callable[[int, int], None] | None = None) -> Iterator[Line]:  # fmt: skip
    """A line for each tensor and algorithm, those of the whole model last. GGUFError."""
    with GGUF(path) as gguf:
        total, done = sum(t.n_bytes for t in gguf.tensors.values()), 0
        whole = {name: _begin(name) for name in algorithms}
        buffer = memoryview(bytearray(_PIECE))
        for tensor in gguf.tensors.values():
            own = {name: _begin(name) for name in algorithms if by_tensor and name != "uuid"}
            for start in range(0, tensor.n_bytes, _PIECE):
                piece = buffer[: min(_PIECE, tensor.n_bytes - start)]
                gguf.read_into(tensor, start, piece)
                for digest in (*whole.values(), *own.values()):
                    digest.update(piece)
                done += len(piece)
                if progress:
                    progress(done, total)
            for name, digest in own.items():
                yield Line(name, digest.hexdigest(), path, tensor.name)
        for name, digest in whole.items():
            yield Line(name, _text(name, digest), path)


def _begin(algorithm: str) -> hashlib._Hash:
    if algorithm == "uuid":  # version 5, RFC 9562: SHA-1 over the namespace and the data
        return hashlib.sha1(NAMESPACE.bytes, usedforsecurity=False)
    return hashlib.new(algorithm, usedforsecurity=False)


def _text(algorithm: str, digest: hashlib._Hash) -> str:
    if algorithm == "uuid":
        return str(uuid.UUID(bytes=digest.digest()[:16], version=5))
    return digest.hexdigest()


def differing(path: str, manifest: str, progress: Callable[[int, int], None] | None = None
              ) -> list[str]:  # fmt: skip
    """What does not agree with the lines of an earlier run: names of tensors, or the file's for
    the whole; tensors that only one side has count. EdgeLLMError for a manifest that is none."""
    try:
        with open(manifest, encoding="utf-8") as file:
            wanted = _parse(file.read(), manifest)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not text"
        raise EdgeLLMError(f"{manifest}: the manifest cannot be read: {reason}.") from None
    algorithms = sorted({algorithm for algorithm, _ in wanted})
    by_tensor = any(tensor for _, tensor in wanted)
    found = {
        (line.algorithm, line.tensor): line.digest
        for line in checksums(path, algorithms, by_tensor, progress)
    }
    names = {key: key[1] or os.path.basename(path) for key in (*wanted, *found)}
    return list(dict.fromkeys(n for key, n in names.items() if wanted.get(key) != found.get(key)))


def _parse(text: str, manifest: str) -> dict[tuple[str, str | None], str]:
    """Digest by algorithm and tensor; the file's own name may be another by now, and need not end
    in .gguf. xxh64, which gguf-hash writes too, is passed over."""
    lines: dict[tuple[str, str | None], str] = {}
    for line in text.splitlines():
        parts = line.split(None, 2)
        if len(parts) == 3 and parts[0] in ALGORITHMS:
            file, colon, tensor = parts[2].rpartition(":")
            is_tensor = bool(file and colon) and not tensor.endswith(".gguf")
            lines[parts[0], tensor if is_tensor else None] = parts[1]
    if not lines:
        raise EdgeLLMError(
            f"{manifest}: no line is a checksum of {', '.join(ALGORITHMS)}; write one with "
            "`edgellm hash MODEL > MANIFEST`."
        )
    return lines
