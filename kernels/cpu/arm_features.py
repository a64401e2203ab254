"""What an AArch64 CPU can do, from the operating system: LLVM's own detection does not know all."""

from __future__ import annotations

import ctypes
import sys

_MACOS = {"FEAT_DotProd": "dotprod", "FEAT_I8MM": "i8mm"}  # hw.optional.arm.* -> LLVM
# Linux tells by bits what every core has (arch/arm64/include/uapi/asm/hwcap.h).
_AT_HWCAP, _AT_HWCAP2 = 16, 26
_HWCAP = {1: "neon", 20: "dotprod"}
_HWCAP2 = {13: "i8mm"}


def arm_features() -> dict[str, bool]:
    """Features that targets ask for, in LLVM's names; only those that are there."""
    if sys.platform == "darwin":
        found = [llvm for name, llvm in _MACOS.items() if _sysctl(f"hw.optional.arm.{name}")]
        return dict.fromkeys(["neon", *found], True)
    if sys.platform != "linux":
        return {}
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.restype, getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    return features_of(getauxval(_AT_HWCAP), getauxval(_AT_HWCAP2))


def features_of(hwcap: int, hwcap2: int) -> dict[str, bool]:
    """LLVM's names for bits of the auxiliary vector."""
    tables = ((hwcap, _HWCAP), (hwcap2, _HWCAP2))
    return {name: True for bits, names in tables for at, name in names.items() if bits >> at & 1}


def _sysctl(name: str) -> int:
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    call = ctypes.CDLL(None).sysctlbyname
    failed = call(name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return 0 if failed else value.value
