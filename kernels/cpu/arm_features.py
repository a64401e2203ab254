"""What an AArch64 CPU can do, from the operating system: LLVM's own detection does not know all."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

_LINUX = {"asimd": "neon", "asimddp": "dotprod", "i8mm": "i8mm"}  # /proc/cpuinfo -> LLVM
_MACOS = {"FEAT_DotProd": "dotprod", "FEAT_I8MM": "i8mm"}  # hw.optional.arm.* -> LLVM


def arm_features() -> dict[str, bool]:
    """Features that targets ask for, in LLVM's names; only those that are there."""
    if sys.platform == "darwin":
        found = [llvm for name, llvm in _MACOS.items() if _sysctl(f"hw.optional.arm.{name}")]
        return dict.fromkeys(["neon", *found], True)
    try:
        return features_of(Path("/proc/cpuinfo").read_text())
    except OSError:
        return {}


def features_of(cpuinfo: str) -> dict[str, bool]:
    """Those that every core of /proc/cpuinfo has: a thread may run on any."""
    cores = [
        set(value.split())
        for key, _, value in (line.partition(":") for line in cpuinfo.splitlines())
        if key.strip() == "Features"
    ]
    common = set.intersection(*cores) if cores else set()
    return {llvm: True for name, llvm in _LINUX.items() if name in common}


def _sysctl(name: str) -> int:
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    call = ctypes.CDLL(None).sysctlbyname
    failed = call(name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return 0 if failed else value.value
