"""Rows of weights to encode, and how far what comes back is off.

    python tests/weight_rows.py

writes the errors of ggml's encoders for them to tests/data/quant/ggml_errors.json (needs
llama-cpp-python). tests/data/quant/smollm2_embd.q8_0 are the first 64 rows of the token embeddings
of SmolLM2-135M (Apache License 2.0), as they lie in a GGUF file.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgellm.quant import QuantType, by_name

Rows = NDArray[np.float32]
DATA = Path(__file__).parent / "data/quant"
ERRORS = DATA / "ggml_errors.json"
N = 1024  # elements of a row
NAMES = (
    "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k",
    "iq4_nl", "iq4_xs", "mxfp4",
)  # fmt: skip


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Box and Muller's, of uniform numbers: numpy may change how its own are made."""
    size = np.sqrt(-2 * np.log(1 - rng.random(shape)))
    found: NDArray[np.float64] = size * np.cos(2 * np.pi * rng.random(shape))
    return found


def samples() -> dict[str, Rows]:
    """float32 [n_rows, N] by name."""
    rng, shape = np.random.default_rng(11), (64, N)
    student = _normal(rng, shape) / np.sqrt((_normal(rng, (3, *shape)) ** 2).mean(axis=0))
    laplace = np.log(1 - rng.random(shape)) * np.where(rng.random(shape) < 0.5, -1, 1)
    outliers = np.where(rng.random(shape) < 0.002, 20 * laplace, laplace)
    real = by_name("q8_0").dequantize(np.fromfile(DATA / "smollm2_embd.q8_0", np.uint8))
    drawn = {"gaussian": _normal(rng, shape), "student": student, "outliers": outliers}
    found = {name: np.float32(0.02) * values.astype(np.float32) for name, values in drawn.items()}
    return found | {"smollm2": real.reshape(-1, N)}


def importances() -> Rows:
    """float32 [N], of very different sizes."""
    return np.exp(1.5 * _normal(np.random.default_rng(12), (N,))).astype(np.float32)


def error(rows: Rows, kind: QuantType, encoded: NDArray[np.uint8], weights: Rows | None) -> float:
    """Relative root mean square error, each column's weighted."""
    x, y = rows.astype(np.float64), kind.dequantize(encoded).astype(np.float64)
    w = 1.0 if weights is None else weights.astype(np.float64)
    return math.sqrt((w * (x - y) ** 2).sum() / (w * x**2).sum())


def main() -> None:
    import ggml

    weights = importances()
    errors = {
        name: {
            sample: [
                error(rows, by_name(name), ggml.quantize(by_name(name), rows, w), w)
                for w in (None, weights)
            ]
            for sample, rows in samples().items()
        }
        for name in NAMES
    }
    ERRORS.write_text(json.dumps(errors, indent=1) + "\n")


if __name__ == "__main__":
    main()
