"""edgellm doctor: for people and as JSON."""

import json

import pytest

from edgellm import doctor
from edgellm.cli.main import run

FACTS = {
    "cpu": {"name": "A\x1b[31m CPU", "target": "avx2", "lanes": 8, "features": ["avx2", "fma"],
            "usable_targets": ["avx2", "generic"], "last_level_cache": 32 << 20},
    "threads": {"cpus": 16, "allowed": 16, "performance": 16, "cores": 8, "quota": 4, "default": 4},
    "memory": {"available": 10**10, "huge_pages": "madvise"},
    "measured": [{"threads": 1, "read_bandwidth": 2e10, "dot_peak": 1e11},
                 {"threads": 4, "read_bandwidth": 5e10, "dot_peak": 4e11}],
    "kernel_store": {"place": "/k", "kernels": 3, "bytes": 1000, "all_bytes": 5000,
                     "writable": False},
    "gpu": {"found": [], "usable": [], "used": False, "why": "no GPU was found"},
    "advice": "Do this.",
}  # fmt: skip


@pytest.fixture
def examined(monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda say: FACTS)


def test_text(examined, capsys):
    assert run(["doctor"]) == 0
    out, err = capsys.readouterr()
    for words in (
        "A\\x1b[31m CPU", "avx2, 8 lanes (also generic)", "avx2 fma", "4 by default", "quota 4",
        "1 thread ", "4 threads", "reads 50.0 GB/s, multiplies 400 G/s", "10.0 GB available",
        "/k: 3 kernels, 1.0 kB, 4.0 kB of other versions, not writable", "no GPU was found",
    ):  # fmt: skip
        assert words in out
    assert out.endswith("\nDo this.\n") and err == ""


def test_gpus_are_listed_with_their_memory(examined, capsys, monkeypatch):
    usable = {"place": "cuda0", "name": "GPU X", "free": 10**9, "total": 8 * 10**9,
              "compute_capability": "8.6"}  # fmt: skip
    gpu = {"found": ["GPU X"], "usable": [usable], "used": True, "why": ""}
    monkeypatch.setitem(FACTS, "gpu", gpu)
    assert run(["doctor"]) == 0
    said = "cuda0: GPU X, compute capability 8.6, 1.0 GB of 8.0 GB free"
    assert said in capsys.readouterr().out


def test_json(examined, capsys):
    assert run(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == FACTS
