"""What the operating system says about the processor: cores, their kinds, caches, names."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from pathlib import Path

SYSFS = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")

# What makes a core a performance core, as a share of the strongest. The kernel's capacity counts
# work: middle cores of phones have 0.7 and more, efficiency cores below. Frequencies lie closer:
# efficiency cores reach up to 0.84 of the fastest (Arrow Lake), ordinary performance cores at
# least 0.91 of a favoured one.
_OF_CAPACITY, _OF_FREQUENCY = 0.7, 0.88


class CpuMaskError(ValueError):
    """A mask that names no usable set of CPUs."""


def default_threads(cpus: Iterable[int] | None = None, folder: Path = SYSFS) -> int:
    """Physical performance cores among ``cpus`` (None: those this process may use), within the
    cgroup's quota. Hyper-threads share a core's vector units; a slow core would be waited for."""
    chosen = performance_cpus(allowed_cpus() if cpus is None else cpus, folder)
    n, quota = len(set(cores_of(chosen, folder).values())), cgroup_cores()
    return max(1, min(n, quota) if quota else n)


def allowed_cpus() -> list[int]:
    """Numbers of the CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cores_of(cpus: Iterable[int], folder: Path = SYSFS) -> dict[int, int]:
    """CPU -> its physical core, named by its lowest CPU."""
    cpus = list(cpus)
    cores = {}
    for cpu in cpus:
        siblings = _text(folder / f"cpu{cpu}/topology/thread_siblings_list")
        cores[cpu] = min(_cpu_list(siblings), default=cpu)
    if not folder.is_dir():  # no Linux: the system at least counts its cores
        import psutil

        n = max(1, min(len(cpus), psutil.cpu_count(logical=False) or len(cpus)))
        return {cpu: i % n for i, cpu in enumerate(cpus)}
    return cores


def performance_cpus(cpus: Iterable[int], folder: Path = SYSFS) -> list[int]:
    """The CPUs that are as strong as the strongest, about; all where nothing tells them apart."""
    cpus = sorted(cpus)
    for file, share in (
        ("cpu_capacity", _OF_CAPACITY),
        ("cpufreq/cpuinfo_max_freq", _OF_FREQUENCY),
    ):
        values = [_number(folder / f"cpu{cpu}/{file}") for cpu in cpus]
        if all(values) and len(set(values)) > 1:
            least = share * max(values)
            return [cpu for cpu, value in zip(cpus, values, strict=True) if value >= least]
    return cpus


def parse_mask(mask: str | int, flag: str = "-C") -> list[int]:
    """CPU numbers of a hexadecimal mask (0x3: the first two); CpuMaskError says what is wrong with
    what ``flag`` was given."""
    try:
        bits = mask if isinstance(mask, int) else int(mask, 16)
    except (TypeError, ValueError):
        bits = 0
    if bits <= 0:
        raise CpuMaskError(
            f"The CPU mask {mask!r} is no hexadecimal number above 0, as 0x3 for the first two "
            f"CPUs ({flag})."
        )
    if not hasattr(os, "sched_setaffinity"):
        raise CpuMaskError(
            f"This system cannot bind threads to CPUs; leave the CPU mask out ({flag})."
        )
    cpus = [i for i in range(bits.bit_length()) if bits >> i & 1]
    if absent := sorted(set(cpus) - set(allowed_cpus())):
        raise CpuMaskError(
            f"CPU {absent[0]} of the mask {mask} is not there for this process, which may use "
            f"{', '.join(map(str, allowed_cpus()))} ({flag})."
        )
    return cpus


def cgroup_cores(folder: Path = _CGROUP) -> int:
    """Whole cores of the cgroup's CPU quota, at least 1; 0 where there is none."""
    quota, _, period = _text(folder / "cpu.max").partition(" ")  # version 2
    if not quota:
        quota = _text(folder / "cpu/cpu.cfs_quota_us")
        period = _text(folder / "cpu/cpu.cfs_period_us")
    try:
        return max(1, int(quota) // int(period)) if int(quota) > 0 else 0
    except (ValueError, ZeroDivisionError):  # "max", or no quota at all
        return 0


def last_level_cache(folder: Path = SYSFS) -> int:
    """Bytes of the largest cache of the first core; 32 MiB where nothing says so."""
    units = {"K": 1 << 10, "M": 1 << 20}
    sizes = [_text(path) for path in folder.glob("cpu0/cache/index*/size")]
    known = [int(s[:-1]) * units[s[-1]] for s in sizes if s[-1:] in units and s[:-1].isdecimal()]
    return max(known, default=32 << 20)


def cpu_name() -> str:
    """The processor as its maker calls it."""
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        if key.strip().lower() in ("model name", "hardware", "cpu model"):
            return value.strip()
    return platform.processor() or platform.machine()


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdecimal() else 0


def _cpu_list(text: str) -> list[int]:
    """Numbers of a list as the kernel writes it: 0-3,8."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            found += range(int(first), int(last or first) + 1)
    return found
