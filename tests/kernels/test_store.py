"""The kernel store: compiled once, loaded without numba, private, and honest about damage."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edgellm.kernels.cpu.store import KernelStore, StoreError
from edgellm.kernels.cpu.vector import I64, Emitter, Value

KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
    e.store(e.load(I64, args) + hi, args)


def call(address: int) -> int:
    cell = np.array([40], np.int64)
    KERNEL(address)(cell.ctypes.data, 0, 2, 0)
    return int(cell[0])


def objects(folder: Path) -> list[Path]:
    return list(folder.glob("*/*.obj"))


def test_a_second_store_loads_what_the_first_compiled(tmp_path: Path) -> None:
    first = KernelStore(tmp_path / "k")
    assert call(first.get("test_first", emit)) == 42
    assert (first.compiled, first.loaded) == (1, 0)
    second = KernelStore(tmp_path / "k")
    assert call(second.get("test_first", emit)) == 42
    assert (second.compiled, second.loaded) == (0, 1)
    assert second.get("test_first", emit) and second.loaded == 1  # once a process
    (path,) = objects(tmp_path / "k")
    assert path.read_bytes().startswith(b"edgellm kernel 1\n")
    assert path.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("damage", ["cut", "turned", "empty"])
def test_a_damaged_object_is_compiled_again(tmp_path: Path, damage: str) -> None:
    KernelStore(tmp_path / "k").get("test_damage", emit)
    (path,) = objects(tmp_path / "k")
    data = bytearray(path.read_bytes())
    data = {"cut": data[:-9], "turned": data[:-1] + bytes([data[-1] ^ 1]), "empty": b""}[damage]
    path.write_bytes(data)
    store = KernelStore(tmp_path / "k")
    assert call(store.get("test_damage", emit)) == 42 and store.compiled == 1


@pytest.mark.skipif(os.name != "posix", reason="owners and modes")
def test_a_store_somebody_else_can_write_is_refused(tmp_path: Path) -> None:
    KernelStore(tmp_path / "k").get("test_open", emit)
    (path,) = objects(tmp_path / "k")
    path.parent.chmod(0o777)
    with pytest.raises(StoreError, match="somebody else.*EDGELLM_KERNEL_STORE"):
        KernelStore(tmp_path / "k").get("test_open", emit)


def test_an_interrupted_compiler_finishes_first(tmp_path: Path) -> None:
    def interrupted(*arguments: object) -> None:
        signal.raise_signal(signal.SIGINT)
        emit(*arguments)  # type: ignore[arg-type]

    store = KernelStore(tmp_path / "k")
    with pytest.raises(KeyboardInterrupt):
        store.get("test_interrupted", interrupted)
    assert len(objects(tmp_path / "k")) == 1
    assert call(store.get("test_interrupted", emit)) == 42 and store.compiled == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_unwritable_place_costs_only_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert call(KernelStore(tmp_path / "file" / "k").get("test_nowhere", emit)) == 42


def test_a_second_start_of_a_model_compiles_nothing_and_imports_no_numba(
    tmp_path: Path, tiny_model
) -> None:  # type: ignore[no-untyped-def]
    script = (
        "import sys; from edgellm import LLM, SamplingParams\n"
        "with LLM(sys.argv[1], n_threads=1) as llm:\n"
        "    llm.generate('a', SamplingParams(max_tokens=2))\n"
        "    print(llm.kernel_stats['compiled'], 'numba' in sys.modules)"
    )
    run = [sys.executable, "-c", script, str(tiny_model("llama"))]
    env = os.environ | {"EDGELLM_KERNEL_STORE": str(tmp_path / "k")}
    out = [
        subprocess.run(run, env=env, capture_output=True, text=True, check=True).stdout.split()
        for _ in range(2)
    ]
    assert int(out[0][0]) > 5 and out[1] == ["0", "False"]
