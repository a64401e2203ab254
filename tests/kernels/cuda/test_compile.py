"""Every kernel compiles for every GPU, without a GPU, a driver or a CUDA toolkit.

NVRTC and the headers come from wheels (the extra `test` names them); text and options are those
CuPy gives it on a machine with a GPU. What ptxas says of registers and spills is held to what a
launch needs.
"""

from __future__ import annotations

import importlib.util
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edgellm.kernels.cuda import pack
from edgellm.kernels.cuda.source import module

nvrtc = pytest.importorskip("cupy.cuda", reason="needs the wheels of the extra `test`").nvrtc

ARCHITECTURES = (75, 80, 86, 89, 90, 120)
REGISTERS = 65536  # of a multiprocessor: a block must fit
# Bytes of a thread that may be spilled. ptxas keeps some kernels at 40, 72 or 168 registers, though
# more are free, so that more blocks fit beside each other, and puts a few words aside for it: 12
# of attention_whole on sm_120, which holds two states of 64 sums; up to 4 elsewhere.
SPILLED = 48
STACK = 64  # bytes of a thread's frame: cos and sin of large doubles keep a few words there
SHARED = 48 << 10  # bytes of static shared memory

ATTENTION = [
    *(f"attention/f16-f16-{d}" for d in ("64-64", "80-80", "128-128")),
    *(f"attention/f16-f16-{d}" for d in ("192-128", "256-256", "576-512")),
    *(f"attention/{kind}-{kind}-128-128" for kind in ("f32", "q8_0", "q4_0")),
    "attention/q8_0-q4_0-64-64",
]
MODULES = [
    "rows", "elementwise", "quantize", "route", "sample",
    *(f"linear/{kind}" for kind in pack.LAYOUTS), *(f"linear_float/{k}" for k in pack.FLOATS),
    *ATTENTION,
]  # fmt: skip
QUICK = ["rows", "quantize", "linear/q4_k", "attention/f16-f16-128-128"]


def headers() -> list[Path]:
    """The folders of the wheels' headers: CUDA's own, and those CuPy brings."""
    nvidia = importlib.util.find_spec("nvidia")
    assert nvidia is not None and nvidia.submodule_search_locations
    found = [h for at in nvidia.submodule_search_locations for h in Path(at).rglob("cuda_fp16.h")]
    assert found, "the wheel nvidia-cuda-runtime is missing"
    cupy = importlib.util.find_spec("cupy")
    assert cupy is not None and cupy.origin is not None
    include = Path(cupy.origin).parent / "_core/include"
    cccl = [p.parent for p in include.rglob("nv") if (p / "target").exists()]
    return [found[0].parent, include, *cccl]


def test_nvrtc_is_that_of_the_wheel():
    pathfinder = pytest.importorskip("cuda.pathfinder")
    library = Path(pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path)
    nvidia = importlib.util.find_spec("nvidia")
    assert nvidia is not None
    assert any(library.is_relative_to(at) for at in nvidia.submodule_search_locations or ())


def compiled(name: str, architecture: int) -> dict[str, dict[str, int]]:
    """What ptxas says of each kernel: registers, stack, spilled bytes, shared memory."""
    source = module(name)
    options = (
        *(f"-I{path}" for path in headers()), "--std=c++17", "-ftz=true",
        "--device-as-default-execution-space", *source.options, f"-arch=sm_{architecture}",
        "--ptxas-options=-v",
    )  # fmt: skip
    program = nvrtc.createProgram(source.text, f"{name}.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError:
        pytest.fail(f"{name} for sm_{architecture}:\n{nvrtc.getProgramLog(program)[:3000]}")
    log = nvrtc.getProgramLog(program)
    nvrtc.destroyProgram(program)
    found = {}
    for kernel, text in re.findall(
        r"Compiling entry function '(\w+)'(.*?)(?=Compiling entry|\Z)", log, re.DOTALL
    ):
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", text)
        registers = re.search(r"Used (\d+) registers", text)
        shared = re.search(r"(\d+) bytes smem", text)
        assert frame and registers
        found[kernel] = {
            "registers": int(registers[1]), "stack": int(frame[1]), "spilled": int(frame[2]),
            "shared": int(shared[1]) if shared else 0,
        }  # fmt: skip
    return found


def check(name: str, architecture: int) -> None:
    bounds, found = module(name).kernels, compiled(name, architecture)
    assert found.keys() == bounds.keys()
    for kernel, figures in found.items():
        what = f"{name}/{kernel} for sm_{architecture}: {figures}"
        assert figures["spilled"] <= SPILLED and figures["stack"] <= STACK, what
        # registers are given out to a warp in units of 8 for each lane
        assert -(-figures["registers"] // 8) * 8 * bounds[kernel] <= REGISTERS, what
        assert figures["shared"] <= SHARED, what


@pytest.mark.parametrize("architecture", [ARCHITECTURES[0], ARCHITECTURES[-1]])
@pytest.mark.parametrize("name", QUICK)
def test_kernels_compile(name, architecture):
    check(name, architecture)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_every_kernel_compiles_for_every_architecture(name):
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC lets go of the interpreter
        list(pool.map(lambda architecture: check(name, architecture), ARCHITECTURES))
