"""Weights for the specification, as a file has them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.graph import Weight
from edgellm.kernels.reference import Load
from edgellm.quant.gguf import GGUF


def loader(file: GGUF) -> Load:
    """What `reference.run` reads weights by, while the file is open."""

    def load(weight: Weight) -> NDArray[np.float32]:
        info = file.tensors[weight.name]
        raw = np.empty(info.n_bytes, np.uint8)
        file.read_into(info, 0, raw)
        values = info.type.dequantize(raw.reshape(-1, info.row_bytes))
        return values.reshape(weight.shape[::-1])

    return load
