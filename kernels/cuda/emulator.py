"""Kernels on the CPU: g++ compiles their text with the headers in emulator/, ctypes calls them.

See emulator/threads.h for how threads run. Compiled modules are kept in a folder of the user's and
found by a hash of everything that goes into them.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.kernels.cuda.device import Argument, Buffer, DeviceError
from edgellm.kernels.cuda.source import Source

ORDERS = ("ascending", "descending", "random")  # of the threads of a block
MAX_SHARED = 48 << 10  # bytes of dynamic shared memory without asking for more
HEADERS = Path(__file__).parent / "emulator"
FLAGS = (
    "-O1 -std=c++20 -fPIC -shared -w -g0 -fno-strict-aliasing -fno-stack-protector -fno-exceptions "
    "-fno-rtti -fvisibility=hidden -ffp-contract=fast "  # nvcc fuses multiply and add too
    "-fsanitize=alignment,bounds,shift-exponent -fsanitize-undefined-trap-on-error"
).split()
_DYNAMIC = re.compile(
    r"extern\s+__shared__\s+(?:__align__\s*\(\s*\d+\s*\)\s*)?((?:unsigned\s+)?\w+)\s+(\w+)\s*\[\s*\]\s*;"
)


class EmulatorError(DeviceError):
    """A kernel does not compile, was called wrongly, or did what a GPU would not stand."""


class Module:
    """A compiled module. Launches of a process are one at a time: modules share their stacks."""

    _stacks: int | None = None

    def __init__(self, source: Source) -> None:
        self.source = source
        self.functions = list(source.kernels)
        self._library = ctypes.CDLL(str(_compiled(source, self.functions)))
        self._launch = self._library.emu_launch
        self._launch.argtypes = [
            ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t,
            ctypes.c_int, ctypes.c_ulonglong, ctypes.c_int,
        ]  # fmt: skip
        use_stacks = self._library.emu_stacks
        use_stacks.argtypes, use_stacks.restype = [ctypes.c_void_p], ctypes.c_void_p
        Module._stacks = use_stacks(Module._stacks)
        if Module._stacks is None:
            raise EmulatorError("There is no memory for the stacks of a block's threads.")
        self._library.emu_parameters.restype = self._library.emu_message.restype = ctypes.c_char_p

    def parameters(self, function: str) -> list[str]:
        """Types of a kernel's parameters: "p" for a pointer, else as numpy writes them."""
        text: bytes = self._library.emu_parameters(self.functions.index(function))
        return text.decode().split()

    def launch(
        self, function: str, grid: Any, block: Any, pointers: Any, shared: int, order: int,
        seed: int,
    ) -> None:  # fmt: skip
        number = self.functions.index(function)
        if self._launch(number, pointers, grid, block, shared, order, seed, 1):
            message = self._library.emu_message().decode()
            raise EmulatorError(f"{self.source.name}/{function}: {message}")


class EmulatedKernel:
    """One kernel. Arguments are checked where a GPU would read garbage."""

    def __init__(self, module: Module, function: str) -> None:
        self.module, self.function = module, function
        self.parameters = module.parameters(function)
        self.name = f"{module.source.name}/{function}"

    def bound(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Argument], shared: int,
        order: int, seed: int,
    ) -> Any:  # fmt: skip
        """A function without arguments that does the launch; raises EmulatorError at once for
        arguments that do not fit."""
        if len(args) != len(self.parameters):
            raise EmulatorError(
                f"{self.name}: {len(args)} arguments for {len(self.parameters)} parameters"
            )
        if shared > MAX_SHARED:
            raise EmulatorError(f"{self.name}: {shared} bytes of dynamic shared memory")
        values = [self._value(i, x) for i, x in enumerate(args)]
        pointers = (ctypes.c_void_p * len(values))(*(v.ctypes.data for v in values))
        grid_size, block_size = ((ctypes.c_uint * 3)(*(*n, 1, 1)[:3]) for n in (grid, block))

        def launch(keep: tuple[Any, ...] = (values, args)) -> None:
            self.module.launch(self.function, grid_size, block_size, pointers, shared, order, seed)

        return launch

    def _value(self, i: int, x: Argument) -> np.ndarray[Any, Any]:
        wanted = self.parameters[i]
        if wanted == "p":
            if x is None:
                return np.array(0, np.uint64)
            if not isinstance(x, Buffer):
                raise EmulatorError(
                    f"{self.name}: argument {i} must be a Buffer, not {type(x).__name__}"
                )
            return np.array(x.address, np.uint64)
        if not isinstance(x, np.generic) or x.dtype != np.dtype(wanted):
            raise EmulatorError(
                f"{self.name}: argument {i} must be numpy.{np.dtype(wanted).name}, not "
                f"{type(x).__name__}"
            )
        return np.array(x)


def compiler() -> str:
    return os.environ.get("EDGELLM_CXX", "g++")


def has_compiler() -> bool:
    """Whether the emulator can be used here."""
    try:
        return subprocess.run([compiler(), "--version"], capture_output=True).returncode == 0
    except OSError:
        return False


def _compiled(source: Source, functions: list[str]) -> Path:
    """The shared library of a module."""
    text = wrapped(source, functions)
    flags = [*FLAGS, *_cpu_flags(), *source.options]
    key = hashlib.sha256(repr((text, flags, compiler(), _headers())).encode()).hexdigest()[:24]
    folder = _folder()
    library = folder / f"{key}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=folder) as work:
        cpp, made = Path(work) / "kernel.cpp", Path(work) / "kernel.so"
        cpp.write_text(text, encoding="utf-8")
        command = [compiler(), *flags, "-I", str(HEADERS), "-o", str(made), str(cpp)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            raise EmulatorError(f"The emulator needs g++: {error}") from None
        if done.returncode:
            raise EmulatorError(f"{source.name} does not compile:\n{done.stderr[:6000]}")
        os.replace(made, library)
    return library


def wrapped(source: Source, functions: list[str]) -> str:
    """The module as C++: in a namespace without name, so that its static shared memory may share a
    section, with a table of its kernels behind it."""
    text = _DYNAMIC.sub(r"\1* \2 = (\1*)emu::dynamic_shared();", source.text)
    text = text.replace('extern "C" __global__', "__global__")
    calls = "".join(
        f"case {i}: kernel = [](void** a) {{ emu::call(&{name}, a); }}; break;\n"
        for i, name in enumerate(functions)
    )
    types = "".join(
        f"case {i}: return emu::parameters(&{name});\n" for i, name in enumerate(functions)
    )
    return (
        f'#include "cuda_fp16.h"\nnamespace {{\n{text}\n}}\n'
        '#line 1 "table"\n#pragma GCC visibility push(default)\nextern "C" {\n'
        "int emu_launch(int i, void** args, const unsigned* grid, const unsigned* block,\n"
        "               size_t shared, int order, unsigned long long seed, int poison) {\n"
        f"  void (*kernel)(void**) = nullptr;\n  switch (i) {{\n{calls}  }}\n"
        "  return emu::launch(kernel, args, grid, block, shared, order, seed, poison);\n}\n"
        f'const char* emu_parameters(int i) {{\n  switch (i) {{\n{types}  }}\n  return "";\n}}\n'
        "char* emu_stacks(char* given) { return emu::use_stacks(given); }\n"
        "const char* emu_message() { return emu::block.message; }\n}\n"
    )


@cache
def _headers() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(HEADERS.glob("*.h")))


@cache
def _cpu_flags() -> tuple[str, ...]:
    """Half and fused instructions where the CPU has them: the same numbers, faster."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    try:
        features = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return ()
    wanted = ("avx2", "fma", "f16c")
    return tuple(f"-m{x}" for x in wanted) if all(x in features for x in wanted) else ()


def _folder() -> Path:
    """Where compiled modules are kept: nobody else may write there, since they are executed."""
    default = Path(tempfile.gettempdir()) / f"edgellm-emulator-{os.getuid()}"
    folder = Path(os.environ.get("EDGELLM_EMULATOR_CACHE", default))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise EmulatorError(f"{folder} belongs to somebody else.")
    return folder
