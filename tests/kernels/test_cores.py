"""Which cores a team gets, read from made-up machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgellm.kernels.cpu import cores
from edgellm.kernels.cpu.cores import CpuMaskError, parse_mask


def machine(
    folder: Path, capacities: list[int] | None = None, frequencies: list[int] | None = None,
    siblings: list[str] | None = None, n: int = 0,
) -> Path:  # fmt: skip
    """A /sys/devices/system/cpu with the given values by CPU."""
    folder.mkdir(exist_ok=True)
    n = n or len(capacities or frequencies or siblings or [])
    for cpu in range(n):
        (folder / f"cpu{cpu}/topology").mkdir(parents=True)
        (folder / f"cpu{cpu}/cpufreq").mkdir()
        if capacities:
            (folder / f"cpu{cpu}/cpu_capacity").write_text(f"{capacities[cpu]}\n")
        if frequencies:
            (folder / f"cpu{cpu}/cpufreq/cpuinfo_max_freq").write_text(f"{frequencies[cpu]}\n")
        if siblings:
            (folder / f"cpu{cpu}/topology/thread_siblings_list").write_text(f"{siblings[cpu]}\n")
    return folder


@pytest.fixture(autouse=True)
def no_quota(monkeypatch):
    monkeypatch.setattr(cores, "cgroup_cores", lambda: 0)


PAIRS = [f"{i - i % 2}-{i - i % 2 + 1}" for i in range(16)]  # two hyper-threads a core


@pytest.mark.parametrize(
    ("what", "n_cores"),
    [
        # Arrow Lake, 8 + 12 without hyper-threads: kHz, two favoured cores
        ({"frequencies": [5_500_000] * 2 + [5_400_000] * 6 + [4_600_000] * 12}, 8),
        # Raptor Lake, 8 cores of two hyper-threads and 16 small ones
        ({"frequencies": [5_500_000] * 16 + [4_300_000] * 16,
          "siblings": PAIRS + [str(i) for i in range(16, 32)]}, 8),
        # the same through the kernel's capacities, which win over frequencies
        ({"capacities": [1024] * 16 + [700] * 16, "frequencies": [5_500_000] * 32,
          "siblings": PAIRS + [str(i) for i in range(16, 32)]}, 8),
        # a phone: one prime core, three middle ones, four small ones
        ({"capacities": [280] * 4 + [850] * 3 + [1024]}, 4),
        # a server: all alike, two hyper-threads numbered apart
        ({"frequencies": [3_700_000] * 8, "siblings": [f"{i % 4},{i % 4 + 4}" for i in range(8)]},
         4),
        # two dies of one desktop processor, one of them with the larger cache and less clock
        ({"frequencies": [5_250_000] * 8 + [5_760_000] * 8}, 16),
        # nothing but a topology, and not even that
        ({"siblings": ["0-1", "0-1", "2-3", "2-3"]}, 2),
        ({"n": 3}, 3),
    ],
)  # fmt: skip
def test_threads_are_physical_performance_cores(tmp_path, what, n_cores):
    folder = machine(tmp_path / "cpu", **what)
    n = len(list(folder.glob("cpu*")))
    assert cores.default_threads(range(n), folder) == n_cores


def test_only_cpus_of_the_process_count(tmp_path):
    folder = machine(tmp_path, frequencies=[5_500_000] * 8 + [4_600_000] * 8)
    assert cores.default_threads([6, 7, 8, 9], folder) == 2
    assert cores.default_threads([10, 11, 12], folder) == 3  # nothing stronger is allowed
    assert cores.default_threads([6], folder) == 1


def test_a_quota_bounds_the_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(cores, "cgroup_cores", lambda: 3)
    assert cores.default_threads(range(8), machine(tmp_path, n=8)) == 3


def test_without_sysfs_the_system_counts(tmp_path):
    assert 1 <= cores.default_threads(range(4), tmp_path / "absent") <= 4


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "max 100000"}, 0),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 0),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
        ({}, 0),
        ({"cpu.max": "rubbish"}, 0),
    ],
)
def test_quotas_of_both_versions(tmp_path, monkeypatch, files, expected):
    monkeypatch.undo()
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    assert cores.cgroup_cores(tmp_path) == expected


def test_the_last_cache(tmp_path):
    for i, size in enumerate(("32K", "1024K", "32768K", "x")):
        (tmp_path / f"cpu0/cache/index{i}").mkdir(parents=True)
        (tmp_path / f"cpu0/cache/index{i}/size").write_text(size + "\n")
    assert cores.last_level_cache(tmp_path) == 32 << 20
    assert cores.last_level_cache(tmp_path / "absent") == 32 << 20


def test_masks(monkeypatch):
    monkeypatch.setattr(cores, "allowed_cpus", lambda: [0, 1, 4])
    monkeypatch.setattr(os, "sched_setaffinity", lambda *a: None, raising=False)
    assert parse_mask("0x3") == parse_mask("3") == [0, 1]
    assert parse_mask("0x13") == [0, 1, 4]
    with pytest.raises(CpuMaskError, match=r"CPU 2 of the mask 0x7 is not there.*0, 1, 4 \(-C\)"):
        parse_mask("0x7")
    for bad in ("", "0", "0xg", "-1", "all"):
        with pytest.raises(CpuMaskError, match="no hexadecimal number"):
            parse_mask(bad)


def test_masks_need_a_system_that_binds(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    with pytest.raises(CpuMaskError, match="cannot bind"):
        parse_mask("0x1")
