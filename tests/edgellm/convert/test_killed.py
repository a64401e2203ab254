"""`edgellm convert` killed at random moments: the final name never holds a damaged file."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from edgellm.convert.model import convert_model

from . import directories

SCRIPT = """
import sys
from edgellm.convert.model import convert_model
print("ready", flush=True)
convert_model(sys.argv[1], sys.argv[2], outtype="q8_0", force=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("kills", "seed"), [(3, 1), pytest.param(100, 2, marks=pytest.mark.slow)]
)  # fmt: skip
def test_a_killed_conversion_leaves_a_whole_file_or_none(
    tmp_path: Path, kills: int, seed: int
) -> None:
    rng = random.Random(seed)
    config = directories.base(
        architectures=["Qwen2ForCausalLM"], hidden_size=512, intermediate_size=2048,
        num_attention_heads=8,
    )  # fmt: skip
    folder, target = tmp_path / "hf", tmp_path / "out.gguf"
    directories.write(folder, "qwen2", config=config)
    expected = convert_model(folder, tmp_path / "expected.gguf", outtype="q8_0").read_bytes()
    started = time.monotonic()  # now that kernels are compiled
    convert_model(folder, tmp_path / "expected.gguf", outtype="q8_0", force=True)
    longest = max(0.1, 1.2 * (time.monotonic() - started))
    killed = 0
    while killed < kills:
        target.unlink(missing_ok=True)
        killed += live(folder, target, rng.uniform(0, longest))
        if target.exists():
            assert target.read_bytes() == expected
    assert not live(folder, target, 120)  # over what the killed ones have left
    assert target.read_bytes() == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected.gguf", "hf", "out.gguf"]


def live(folder: Path, target: Path, seconds: float) -> bool:
    """Convert, and kill it after that time; whether it had to be killed."""
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), str(target)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
        error = process.communicate()[1].decode()
    assert process.returncode in (0, -9), error
    return process.returncode == -9


@pytest.mark.slow
def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    """Twice the largest tensor, and pieces of it in float32: far below the whole model."""
    script = """
import sys
from edgellm.convert.model import convert_model
from edgellm.memory import peak_resident_bytes
import sentencepiece, tokenizers, gguf, safetensors
before = peak_resident_bytes()
convert_model(sys.argv[1], sys.argv[2])
print(peak_resident_bytes() - before)
"""
    config = directories.base(
        architectures=["MistralForCausalLM"], hidden_size=1024, intermediate_size=8192,
        num_hidden_layers=8, num_attention_heads=8,
    )  # fmt: skip
    weights = directories.write(tmp_path / "hf", "mistral", dtype="F16", config=config)
    largest = max(values.nbytes // 2 for values in weights.values())
    whole = sum(values.nbytes // 2 for values in weights.values())
    assert np.isclose(largest, 16 << 20, rtol=0.1) and whole > 400 << 20
    found = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "hf"), str(tmp_path / "out.gguf")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert largest < int(found.stdout) < 2 * largest + (200 << 20)
