"""The kernel tests for every target that this CPU can run: one process, one target."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgellm.kernels.cpu.targets import TARGETS

SUITES = ("on_target", "on_target_kv", "on_target_encode")
BEST = next(name for name, target in TARGETS.items() if target.available())
# Minutes each: the one that this CPU runs by itself is a fast test, the others are slow ones.
NAMES = [pytest.param(name, marks=() if name == BEST else pytest.mark.slow) for name in TARGETS]


@pytest.mark.timeout(1200)  # a new machine compiles every kernel first
@pytest.mark.parametrize("name", NAMES)
def test_kernels_on(name: str) -> None:
    if not TARGETS[name].available():
        pytest.skip(f"this CPU cannot run {name}")
    suites = [str(Path(__file__).with_name(f"{name}.py")) for name in SUITES]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *suites],
        env=os.environ | {"EDGELLM_TARGET": name}, capture_output=True, text=True, timeout=1100,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


def test_an_unknown_target_is_refused_in_a_sentence() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "from edgellm.kernels.cpu import targets; targets.current()"],
        env=os.environ | {"EDGELLM_TARGET": "sse9"}, capture_output=True, text=True,
    )  # fmt: skip
    assert "EDGELLM_TARGET=sse9 is not a target; choose one of avx512_vnni" in result.stderr


def test_avx_vnni_compiles_to_its_instruction_without_the_cpu() -> None:
    """No test machine has it: the kernel is compiled, not run."""
    script = """
from edgellm.kernels.cpu import targets
object.__setattr__(targets.TARGETS["avx_vnni"], "needs", ())
from edgellm.kernels.cpu.linear import make_linear
from edgellm.kernels.cpu.store import KernelStore
from edgellm.kernels.cpu.weights import linear_kernel
from edgellm.quant import by_name
store = KernelStore()
kernel = linear_kernel(by_name("q4_k"), targets.current())
store.get("test_avx_vnni", make_linear(kernel.tile))
print(store._keep[0]._library.get_asm_str())
"""
    if not TARGETS["avx2"].available():
        pytest.skip("not an x86 CPU with AVX2")
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"EDGELLM_TARGET": "avx_vnni", "EDGELLM_KERNEL_STORE": "off"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert "vpdpbusd" in result.stdout, result.stderr[-2000:]
    assert "zmm" not in result.stdout
