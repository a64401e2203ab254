"""The instruction sets kernels are written for: one small table of primitives per target.

A target is what a kernel needs to know about the machine: how many 32-bit lanes a vector has, how
wide register tiles may be, and how three or four primitives are spelled. Everything else in a
kernel is plain LLVM vector code, the same for all targets.

One process, one target: Numba compiles for one CPU description, which has to be set before numba
is imported (``configure_numba``). ``EDGELLM_TARGET`` names a target; by default the best one that
this CPU can run is taken.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import llvmlite.binding as llvm

from edgellm.kernels.cpu.arm_features import arm_features

if TYPE_CHECKING:
    from edgellm.kernels.cpu.vector import Emitter, Value


class TargetError(ValueError):
    """The named target does not exist or cannot run on this CPU."""


@dataclass(frozen=True)
class Target:
    """An instruction set: vector width, tile shapes and CPU description for LLVM.

    ``lanes`` is the number of float32 in a vector and of weight rows interleaved in a packed
    group. ``tiles`` are the token widths of the register tiles, widest first, ending in 1.
    """

    name: str
    lanes: int
    needs: tuple[str, ...]  # CPU features that must be present
    cpu: str  # LLVM CPU name; "" = the host itself
    features: tuple[str, ...]  # LLVM features beside the CPU name
    tiles: tuple[int, ...]
    registers: int  # vector registers a tile may count on

    def available(self) -> bool:
        """True where this machine's CPU has every feature the target needs."""
        host = _host_features()
        return all(host.get(f, False) for f in self.needs)

    # ---- primitives that differ between targets -------------------------------------------

    def dot4(self, e: Emitter, acc: Value, codes: Value, x: Value, largest: int = 255) -> Value:
        """acc[i] += sum of 4 products codes[4i..4i+3] * x[4i..4i+3]; codes are unsigned bytes not
        above ``largest``, x signed bytes in -127..127. Exact in int32. Targets with
        ``narrow_sums`` have no such instruction (see sums)."""
        if self.has_vnni:
            bits = 32 * self.lanes
            return e.call(f"llvm.x86.avx512.vpdpbusd.{bits}", acc.type, acc, codes, x)
        if self.name == "neon_i8mm":
            return e.call("llvm.aarch64.neon.usdot.v4i32.v16i8", acc.type, acc, codes, x)
        if self.name == "neon_dotprod":
            sdot = "llvm.aarch64.neon.sdot.v4i32.v16i8"  # of signed bytes: the top bit counts -128
            if largest > 127:
                zero = e.const(0, acc.type.element, self.lanes)
                top = e.call(sdot, acc.type, zero, codes & 128, x)
                return e.call(sdot, acc.type, acc - top, codes & 127, x)
            return e.call(sdot, acc.type, acc, codes, x)
        for i in range(4):
            pick = list(range(i, 4 * self.lanes, 4))
            acc = acc + codes.shuffle(pick).unsigned().i32() * x.shuffle(pick).signed().i32()
        return acc

    def dot2(self, e: Emitter, acc: Value, a: Value, b: Value) -> Value:
        """acc[i] += a[2i] * b[2i] + a[2i+1] * b[2i+1] of int16, in int32."""
        if self.has_vnni:
            bits = 32 * self.lanes
            return e.call(f"llvm.x86.avx512.vpdpwssd.{bits}", acc.type, acc, a, b)
        if self.narrow_sums:
            return acc + e.madd_i16(a, b)
        for i in (0, 1):
            pick = list(range(i, 2 * self.lanes, 2))
            acc = acc + a.shuffle(pick).signed().i32() * b.shuffle(pick).signed().i32()
        return acc

    @property
    def has_vnni(self) -> bool:
        return self.name in ("avx512_vnni", "avx_vnni")

    @property
    def narrow_sums(self) -> bool:
        """Products are added in 16 bits first."""
        return self.name == "avx2"

    @property
    def has_fma(self) -> bool:
        """Without the instruction ``llvm.fma`` becomes a slow library call: multiply, then add."""
        return self.name != "generic" or _IS_ARM

    @property
    def has_f16c(self) -> bool:
        """Without the instruction half <-> float conversion is done on the bits."""
        return self.has_fma


_IS_ARM = platform.machine().lower() in ("aarch64", "arm64")
_V3 = ("avx2", "fma", "f16c", "bmi", "bmi2")
TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        Target(
            name="avx512_vnni",
            lanes=16,
            needs=(*_V3, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni"),
            cpu="",
            features=(),
            tiles=(8, 6, 5, 4, 3, 2, 1),
            registers=32,
        ),
        Target(
            name="avx_vnni",
            lanes=8,
            needs=(*_V3, "avxvnni"),
            cpu="x86-64-v3",
            features=("avxvnni",),
            tiles=(4, 3, 2, 1),
            registers=16,
        ),
        Target(
            name="avx2",
            lanes=8,
            needs=_V3,
            cpu="x86-64-v3",
            features=(),
            tiles=(8, 4, 2, 1),
            registers=16,
        ),
        # i8mm's matrix instructions want rows of two and a layout of their own; its dot product of
        # unsigned with signed bytes takes the layout of all the others
        Target(
            name="neon_i8mm",
            lanes=4,
            needs=("neon", "dotprod", "i8mm"),
            cpu="",
            features=("dotprod", "i8mm"),
            tiles=(8, 4, 2, 1),
            registers=32,
        ),
        Target(
            name="neon_dotprod",
            lanes=4,
            needs=("neon", "dotprod"),
            cpu="",
            features=("dotprod",),
            tiles=(8, 4, 2, 1),
            registers=32,
        ),
        Target(
            name="generic",
            lanes=4,
            needs=(),
            cpu="generic" if _IS_ARM else "x86-64",
            features=(),
            tiles=(4, 1),
            registers=16,
        ),
    )
}


@cache
def _host_features() -> dict[str, bool]:
    try:
        found = dict(llvm.get_host_cpu_features())
    except RuntimeError:  # LLVM cannot tell on this platform: only the generic target is safe
        found = {}
    return found | arm_features() if _IS_ARM else found


@cache
def current() -> Target:
    """The target of this process: ``EDGELLM_TARGET`` or the best this CPU can run."""
    wanted = os.environ.get("EDGELLM_TARGET", "")
    if not wanted:
        return next(t for t in TARGETS.values() if t.available())
    if wanted not in TARGETS:
        raise TargetError(
            f"EDGELLM_TARGET={wanted} is not a target; choose one of {', '.join(TARGETS)}."
        )
    if not TARGETS[wanted].available():
        can = ", ".join(t.name for t in TARGETS.values() if t.available())
        raise TargetError(
            f"EDGELLM_TARGET={wanted} cannot run on this CPU; unset it or choose one of {can}."
        )
    return TARGETS[wanted]


def cpu_description() -> str:
    """What compiled kernels depend on: target, CPU name and its features (part of store keys)."""
    return f"{current().name} {llvm.get_host_cpu_name()} {','.join(cpu_features())}"


def cpu_features() -> list[str]:
    """What this CPU can do, in LLVM's names."""
    return sorted(f for f, present in _host_features().items() if present)


def configure_numba() -> None:
    """Make Numba compile for the current target; call before any kernel is compiled."""
    target = current()
    if not target.cpu and not target.features:
        return
    # of the host, LLVM may not know what the operating system does
    known = target.features if target.cpu else (*cpu_features(), *target.features)
    cpu = target.cpu or llvm.get_host_cpu_name()
    features = ",".join(f"+{f}" for f in dict.fromkeys(known)) or "+" + _baseline()
    if "numba" in sys.modules:
        config: Any = importlib.import_module("numba.core.config")
        if (config.CPU_NAME, config.CPU_FEATURES) != (cpu, features):
            raise TargetError(
                f"numba was imported before edgellm chose the target {target.name}; "
                "import edgellm first or unset EDGELLM_TARGET."
            )
        return
    os.environ["NUMBA_CPU_NAME"] = cpu
    os.environ["NUMBA_CPU_FEATURES"] = features


def _baseline() -> str:
    # an empty feature string would make Numba add the host's features
    return "neon" if _IS_ARM else "sse2"
