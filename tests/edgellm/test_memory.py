"""The memory bill of the model files that golden values exist for."""

import os
from pathlib import Path

import pytest

from edgellm.memory import STEP_TOKENS, bill
from edgellm.quant.gguf import GGUF

FOLDER = Path(os.environ.get("EDGELLM_VECTORS", "")) / "golden" / "arch"


@pytest.mark.skipif("EDGELLM_VECTORS" not in os.environ, reason="EDGELLM_VECTORS is not set")
def test_a_window_bounds_the_cache_of_its_layers():
    with GGUF(FOLDER / "gemma3-dense.gguf") as model:
        window = model.integer("gemma3.attention.sliding_window")
        inside, beyond = window, 100 * (window + STEP_TOKENS)
        short, long = bill(model, inside), bill(model, beyond)
    assert short.kv == short.kv_per_token * inside
    assert long.kv < 0.9 * long.kv_per_token * beyond
    assert long.total == long.weights + long.kv + long.arena
    assert long.arena == short.arena > 0
