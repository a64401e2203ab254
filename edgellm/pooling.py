"""From a row for each token to one vector for a text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import EdgeLLMError
from edgellm.models.config import Config

# pooling_type in the file; 0 and a missing key leave the choice to us
_KINDS = {0: "mean", 1: "mean", 2: "first", 3: "last"}


def pooling_of(config: Config) -> str:
    """How the model's embeddings are made of its rows: "mean", "first" or "last"."""
    kind = config.integer("pooling_type", 0, 4, 0)
    if kind not in _KINDS:
        raise EdgeLLMError(f"{config.gguf.path} ranks pairs of texts; it makes no embeddings.")
    return _KINDS[kind]


def pool(rows: NDArray[np.float32], kind: str) -> NDArray[np.float32]:
    """[n_tokens, n_embd] -> [n_embd] of length 1."""
    if kind == "mean":
        vector = rows.mean(axis=0, dtype=np.float64)
    else:
        vector = rows[0 if kind == "first" else -1].astype(np.float64)
    length = float(np.linalg.norm(vector))
    unit: NDArray[np.float32] = (vector / length if length else vector).astype(np.float32)
    return unit
