"""What a model file says of itself, in short."""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm.hub.names import quant_of
from edgellm.quant.gguf import GGUF, GGUFError
from edgellm.quant.recipes import MIXES

# general.file_type, as llama.cpp numbers it: of mixes that we write, and of others
FILE_TYPES = {mix.file_type: name for name, mix in MIXES.items()}
FILE_TYPES |= {19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S"}
FILE_TYPES |= {26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 31: "IQ1_M", 36: "TQ1_0"}
FILE_TYPES |= {37: "TQ2_0", 38: "MXFP4"}


@dataclass(frozen=True)
class Brief:
    """A line of a list."""

    n_bytes: int
    quant: str | None
    architecture: str | None
    error: str | None = None  # why the file cannot be read


def brief(path: Path) -> Brief:
    """The facts of a list; a file that cannot be read gives its size and the reason."""
    try:
        with GGUF(path) as file:
            return Brief(file.n_bytes, _quant(file), file.string("general.architecture", None))
    except GGUFError as error:
        try:
            n_bytes = path.stat().st_size
        except OSError:
            n_bytes = 0
        return Brief(n_bytes, quant_of(path.name), None, str(error))


def full(path: Path) -> dict[str, Any]:
    """What `edgellm show` tells. GGUFError if the file cannot be read."""
    with GGUF(path) as file:
        arch = file.architecture
        return {
            "title": file.string("general.name", None),
            "architecture": arch,
            "parameters": sum(math.prod(tensor.shape) for tensor in file.tensors.values()),
            "quant": _quant(file),
            "bytes": file.n_bytes,
            "parts": len(file.parts),
            "context": file.integer(f"{arch}.context_length", None),
            "embedding": file.integer(f"{arch}.embedding_length", None),
            "layers": file.integer(f"{arch}.block_count", None),
            "vocabulary": len(file.strings("tokenizer.ggml.tokens", [])),
            "licence": _licence(file),
            "template": file.string("tokenizer.chat_template", None),
            "path": str(path),
        }


def _licence(file: GGUF) -> str | None:
    for key in ("general.license.name", "general.license"):
        value = file.metadata.get(key)
        if isinstance(value, str) and value.strip():
            return value.strip()
    return None


def _quant(file: GGUF) -> str:
    """By the file's name, which is the finest; else as the file says; else the commonest type."""
    if named := quant_of(Path(file.path).name):
        return named
    number = file.metadata.get("general.file_type")
    if isinstance(number, int) and number in FILE_TYPES:
        return FILE_TYPES[number]
    weights: Counter[str] = Counter()
    for tensor in file.tensors.values():
        weights[tensor.type.name] += tensor.n_bytes
    return weights.most_common(1)[0][0].upper() if weights else "?"
