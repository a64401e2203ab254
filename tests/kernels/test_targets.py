"""The kernel tests for every target that this CPU can run: one process, one target."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgellm.kernels.cpu.targets import TARGETS


@pytest.mark.timeout(1200)  # a new machine compiles every kernel first
@pytest.mark.parametrize("name", TARGETS)
def test_kernels_on(name: str) -> None:
    if not TARGETS[name].available():
        pytest.skip(f"this CPU cannot run {name}")
    suite = Path(__file__).with_name("on_target.py")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(suite)],
        env=os.environ | {"EDGELLM_TARGET": name}, capture_output=True, text=True, timeout=1100,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


def test_an_unknown_target_is_refused_in_a_sentence() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "from edgellm.kernels.cpu import targets; targets.current()"],
        env=os.environ | {"EDGELLM_TARGET": "sse9"}, capture_output=True, text=True,
    )  # fmt: skip
    assert "EDGELLM_TARGET=sse9 is not a target; choose one of avx512_vnni" in result.stderr
