"""What a model file says of itself, in short."""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm.hub.names import quant_of
from edgellm.quant.gguf import GGUF, GGUFError

# general.file_type, as llama.cpp numbers it
FILE_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1"}
FILE_TYPES |= {10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M"}
FILE_TYPES |= {16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S"}
FILE_TYPES |= {22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M"}
FILE_TYPES |= {28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0"}
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
