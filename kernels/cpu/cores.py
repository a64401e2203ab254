"""How many cores a process may use."""

from __future__ import annotations

import os


def default_threads() -> int:
    """Physical cores this process may use: affinity, hyper-threads and cgroup quota considered."""
    import psutil

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    physical = psutil.cpu_count(logical=False) or allowed or 1
    logical = psutil.cpu_count() or 1
    n = allowed or 1
    if physical < logical:  # hyper-threads share one core's vector units
        n = max(1, min(physical, -(-n * physical // logical)))
    quota = _cgroup_cores()
    return max(1, min(n, quota) if quota else n)


def _cgroup_cores() -> int:
    """Whole cores of the cgroup's CPU quota, at least 1; 0 where there is none."""
    try:
        with open("/sys/fs/cgroup/cpu.max") as f:
            quota, period = f.read().split()
    except (OSError, ValueError):
        return 0
    return 0 if quota == "max" else max(1, int(quota) // int(period))
