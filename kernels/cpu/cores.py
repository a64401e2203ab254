"""What the operating system says about the processor: cores, caches, names."""

from __future__ import annotations

import os
import platform
from pathlib import Path

SYSFS = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")


def default_threads() -> int:
    """Physical cores this process may use: affinity, hyper-threads and cgroup quota considered."""
    import psutil

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    physical = psutil.cpu_count(logical=False) or allowed or 1
    logical = psutil.cpu_count() or 1
    n = allowed or 1
    if physical < logical:  # hyper-threads share one core's vector units
        n = max(1, min(physical, -(-n * physical // logical)))
    quota = cgroup_cores()
    return max(1, min(n, quota) if quota else n)


def cgroup_cores(folder: Path = _CGROUP) -> int:
    """Whole cores of the cgroup's CPU quota, at least 1; 0 where there is none."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return 0
    return 0 if quota == "max" else max(1, int(quota) // int(period))


def last_level_cache(folder: Path = SYSFS) -> int:
    """Bytes of the largest cache of the first core; 32 MiB where nothing says so."""
    sizes = []
    for path in folder.glob("cpu0/cache/index*/size"):
        try:
            text = path.read_text().strip()
            sizes.append(int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1:]])
        except (OSError, ValueError, KeyError):
            continue
    return max(sizes, default=32 << 20)


def cpu_name() -> str:
    """The processor as its maker calls it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip().lower() in ("model name", "hardware", "cpu model"):
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
