"""What doctor finds, and what it advises."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgellm import doctor
from edgellm.gpus import nvidia_names

GOOD = {
    "cpu": {"target": "avx2", "usable_targets": ["avx2", "generic"]},
    "threads": {"quota": None, "cores": 8},
    "memory": {"huge_pages": "madvise"},
    "measured": [
        {"threads": 1, "read_bandwidth": 20e9, "dot_peak": 1e11},
        {"threads": 8, "read_bandwidth": 50e9, "dot_peak": 8e11},
    ],
    "kernel_store": {"place": "/home/me/kernels", "writable": True},
}


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("cpu", {"target": "generic"}, "unset it, this CPU can run avx2"),
        ("kernel_store", {"place": None}, "EDGELLM_KERNEL_STORE=off"),
        ("kernel_store", {"writable": False}, "another folder in EDGELLM_KERNEL_STORE"),
        ("threads", {"quota": 2}, "2 of 8 cores"),
        ("memory", {"huge_pages": "never"}, "madvise"),
        ("cpu", {"target": "generic", "usable_targets": ["generic"]}, "small models"),
        ("cpu", {}, "at most 50 tokens/s for each GB"),
    ],
)
def test_advice(part, change, words):
    facts = copy.deepcopy(GOOD)
    facts[part].update(change)
    said = doctor.advice(facts)
    assert words in said and "\n" not in said
    assert "One thread reads" not in said


def test_one_thread_may_be_enough():
    facts = copy.deepcopy(GOOD)
    facts["measured"][0]["read_bandwidth"] = 49e9
    assert "One thread reads about as fast" in doctor.advice(facts)


def test_gpus_are_named_and_said_why_they_are_not_used(tmp_path, monkeypatch):
    assert nvidia_names(tmp_path) == []
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0/information").write_text("Model: \t NVIDIA GeForce\nIRQ: 1\n")
    assert nvidia_names(tmp_path) == ["NVIDIA GeForce"]
    monkeypatch.setenv("EDGELLM_DEVICE", "cpu")
    found = doctor.gpu()
    assert not found["used"] and found["why"] == "No GPU is used: EDGELLM_DEVICE is cpu."
    monkeypatch.setenv("EDGELLM_DEVICE", "emulated:512M,64M")
    found = doctor.gpu()
    assert found["used"] and [g["place"] for g in found["usable"]] == ["cuda0", "cuda1"]
    assert [g["total"] for g in found["usable"]] == [512 << 20, 64 << 20]


def test_huge_pages(tmp_path):
    setting = tmp_path / "enabled"
    setting.write_text("always [madvise] never\n")
    assert doctor.memory(setting)["huge_pages"] == "madvise"
    assert doctor.memory(tmp_path / "absent")["huge_pages"] is None


def test_the_store(tmp_path):
    place = tmp_path / "kernels" / "avx2-1"
    assert doctor.kernel_store(place)["writable"]  # it can be made
    for name, n in (("avx2-1/a", 10), ("avx2-1/b", 5), ("avx2-0/a", 7)):
        (tmp_path / f"kernels/{name}").parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"kernels/{name}.obj").write_bytes(bytes(n))
    found = doctor.kernel_store(place)
    assert (found["kernels"], found["bytes"], found["all_bytes"]) == (2, 15, 22)
    assert found["place"] == str(tmp_path / "kernels")
    assert doctor.kernel_store(None)["place"] is None
    assert not doctor.kernel_store(Path("/proc/kernels"))["writable"]  # whatever root may do
    if os.geteuid() != 0:
        place.chmod(0o500)
        assert not doctor.kernel_store(place)["writable"]


def test_this_machine_is_examined(monkeypatch):
    monkeypatch.setattr("edgellm.kernels.cpu.peaks.last_level_cache", lambda: 1)
    monkeypatch.setattr("edgellm.kernels.cpu.peaks._LEAST_BYTES", 1 << 20)
    monkeypatch.setattr("edgellm.kernels.cpu.peaks._TURNS", 10)
    facts = doctor.examine()
    assert facts["measured"][0]["threads"] == 1
    assert all(m["read_bandwidth"] > 0 and m["dot_peak"] > 0 for m in facts["measured"])
    assert facts["cpu"]["target"] in facts["cpu"]["usable_targets"]
    assert facts["threads"]["default"] >= 1 and facts["advice"]


@pytest.mark.parametrize(
    "raised, words",
    [
        ("RuntimeError('no toolkit')", "CuPy cannot be imported (no toolkit)"),
        ("ImportError('libcudart.so.13')", "CuPy cannot be imported (libcudart.so.13)"),
    ],
)
def test_a_cupy_that_does_not_work_is_a_reason(tmp_path, raised, words):
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy/__init__.py").write_text(f"raise {raised}")
    code = "from edgellm.kernels.cuda.device import open_devices; print(open_devices())"
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path},
                          capture_output=True, text=True)  # fmt: skip
    assert words in done.stdout, done.stderr
