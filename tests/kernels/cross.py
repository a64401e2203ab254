"""Kernels for AArch64 compiled and run on another machine: LLVM makes objects, Debian's cross
compiler links them with harness.c, qemu's user mode runs the program.

Numba is not in between: it would hand AArch64's intrinsics to the host's back end, which aborts.
The Emitter only needs a builder, so kernels are traced into a module of their own.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from edgellm.kernels.cpu.store import EmitKernel
from edgellm.kernels.cpu.targets import Target
from edgellm.kernels.cpu.vector import I64, Emitter, Value

TRIPLE = "aarch64-unknown-linux-gnu"
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
HARNESS = Path(__file__).with_name("harness.c")
Argument = int | NDArray[Any] | tuple[NDArray[Any], int]  # a number; an address (and an offset)


def missing() -> str:
    """Why nothing can be run here, or ""."""
    absent = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
    how = "apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"
    return f"{' and '.join(absent)} not found ({how})" if absent else ""


@dataclass(frozen=True)
class Call:
    name: str
    emit: EmitKernel
    args: list[Argument]
    lo: int
    hi: int


class Machine:
    """An AArch64 CPU with a target's features. Objects are kept in ``folder`` by kernel name."""

    def __init__(self, target: Target, folder: Path) -> None:
        self.target, self.folder = target, folder
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        features = ",".join(f"+{name}" for name in target.needs or ("neon",))
        self._machine = llvm.Target.from_triple(TRIPLE).create_target_machine(
            cpu="generic", features=features, opt=3, reloc="pic"
        )

    def assembly(self, emit: EmitKernel) -> str:
        return str(self._machine.emit_assembly(self._module("kernel", emit)))

    def run(self, *calls: Call) -> None:
        """Run the calls one after the other; arrays change in place."""
        names = list(dict.fromkeys(call.name for call in calls))
        emits = {call.name: call.emit for call in calls}
        objects = [self._object(name, emits[name]) for name in names]
        program = self._link(names, objects)
        buffers, job = _describe(calls, names)
        (self.folder / "job").write_bytes(job)
        result = self.folder / "result"
        subprocess.run(
            [EMULATOR, "-cpu", "max", program, self.folder / "job", result],
            check=True, timeout=300, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        data, at = result.read_bytes(), 0
        for buffer in buffers:
            flat = buffer.reshape(-1).view(np.uint8)
            flat[:] = np.frombuffer(data, np.uint8, flat.size, at)
            at += flat.size

    def _object(self, name: str, emit: EmitKernel) -> Path:
        path = self.folder / f"{name}.o"
        if not path.exists():
            path.write_bytes(self._machine.emit_object(self._module(name, emit)))
        return path

    def _module(self, name: str, emit: EmitKernel) -> llvm.ModuleRef:
        module = ir.Module(name)
        module.triple, module.data_layout = TRIPLE, str(self._machine.target_data)
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 4), name)
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        # Numba leaves the entry block to variables; so does this
        body = function.append_basic_block("body")
        builder.branch(body)
        builder.position_at_end(body)
        e = Emitter(builder, self.target)
        emit(e, *(Value(e, argument) for argument in function.args))
        builder.ret_void()
        parsed = llvm.parse_assembly(str(module))
        parsed.verify()
        passes = llvm.create_pass_builder(
            self._machine, llvm.create_pipeline_tuning_options(speed_level=3)
        )
        passes.getModulePassManager().run(parsed, passes)
        return parsed

    def _link(self, names: list[str], objects: list[Path]) -> Path:
        (self.folder / "kernels.h").write_text("".join(f"K({name})\n" for name in names))
        program = self.folder / "program"
        subprocess.run(
            [COMPILER, "-static", "-O1", "-Wall", "-Werror", "-I", self.folder, HARNESS, *objects,
             "-lm", "-o", program],
            check=True, timeout=120,
        )  # fmt: skip
        return program


def _describe(calls: tuple[Call, ...], names: list[str]) -> tuple[list[NDArray[Any]], bytes]:
    """The distinct arrays of the calls, and the harness's job."""
    buffers: dict[int, NDArray[Any]] = {}
    text = [struct.pack("<q", len(calls))]
    for call in calls:
        text.append(struct.pack("<4q", names.index(call.name), call.lo, call.hi, len(call.args)))
        for argument in call.args:
            if isinstance(argument, int):
                text.append(struct.pack("<2q", -1, argument))
                continue
            array, offset = argument if isinstance(argument, tuple) else (argument, 0)
            assert array.flags.c_contiguous
            buffers.setdefault(id(array), array)
            text.append(struct.pack("<2q", list(buffers).index(id(array)), offset))
    head = [struct.pack("<q", len(buffers))]
    for array in buffers.values():
        head += [struct.pack("<q", array.nbytes), array.tobytes()]
    return list(buffers.values()), b"".join(head + text)
