"""Kernels as machine code: compiled once by Numba, kept as objects, loaded at the next start.

Numba's own cache watches only the file of the jitted function and misses for kernels made by a
factory, so compiled objects are stored here under a key of everything they depend on: the sources
of this package, the versions of numba and llvmlite, the target and the CPU. A stored object is
loaded through llvmlite alone, in about a millisecond, without importing numba.

Files hold no pickle: a magic line, the symbol, a digest and the object code. The folder is private
(0700) and refused when somebody else owns it or can write to it.
"""

from __future__ import annotations

import hashlib
import os
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import llvmlite.binding as llvm

from edgellm.kernels.cpu import targets
from edgellm.kernels.cpu.vector import Emitter, Value

EmitKernel = Callable[[Emitter, Value, Value, Value, Value], None]
_MAGIC = b"edgellm kernel 1\n"


class StoreError(ValueError):
    """The kernel store cannot be trusted or used."""


class KernelStore:
    """Compiles and loads kernels ``void(args, lo, hi, tid)``, all arguments 64-bit integers.

    ``args`` is the address of the kernel's argument block, ``lo``/``hi`` the range of its work,
    ``tid`` the calling thread. ``get`` returns the address of the machine code, which lives as
    long as the process. ``progress`` is told each kernel's name before it is compiled.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._addresses: dict[str, int] = {}
        self._keep: list[Any] = []
        self._engine: Any = None
        self._lock = threading.Lock()
        self.compiled = 0
        self.loaded = 0
        self.seconds = 0.0
        self.progress: Callable[[str], None] | None = None

    def get(self, name: str, emit: EmitKernel) -> int:
        """The address of a kernel; ``name`` must say every parameter ``emit`` closes over."""
        with self._lock:
            if name not in self._addresses:
                started = time.perf_counter()
                self._addresses[name] = self._load(name) or self._compile(name, emit)
                self.seconds += time.perf_counter() - started
        return self._addresses[name]

    # ---- loading ----------------------------------------------------------------------------

    @property
    def place(self) -> Path | None:
        """The folder of this version's kernels for this CPU; None: they are not kept."""
        folder = self._folder or default_folder()
        return folder / version_key() if folder else None

    def _path(self, name: str) -> Path | None:
        return self.place / f"{name}.obj" if self.place else None

    def _load(self, name: str) -> int:
        path = self._path(name)
        if path is None or not path.is_file():
            return 0
        check_private(path.parent)
        data = path.read_bytes()
        header, _, rest = data.removeprefix(_MAGIC).partition(b"\n")
        symbol, _, digest = header.partition(b" ")
        if not data.startswith(_MAGIC) or _digest(name, symbol, rest) != digest:
            path.unlink(missing_ok=True)  # damaged: compile it again
            return 0
        if self._engine is None:
            llvm.initialize_native_target()
            llvm.initialize_native_asmprinter()
            machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
            self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(rest))
        self._engine.finalize_object()
        self.loaded += 1
        return int(self._engine.get_function_address(symbol.decode()))

    # ---- compiling --------------------------------------------------------------------------

    def _compile(self, name: str, emit: EmitKernel) -> int:
        if self.progress is not None:
            self.progress(name)
        targets.configure_numba()
        from numba import cfunc, types
        from numba.extending import intrinsic

        target = targets.current()
        signature = types.void(types.int64, types.int64, types.int64, types.int64)

        @intrinsic
        def body(typing: Any, args: Any, lo: Any, hi: Any, tid: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                e = Emitter(builder, target)
                emit(e, *(Value(e, v) for v in values))
                return context.get_dummy_value()

            return signature, generate

        call: Any = body  # numba passes the typing context itself

        def kernel(args: Any, lo: Any, hi: Any, tid: Any) -> None:
            call(args, lo, hi, tid)

        # the symbol in the object comes from this name and has to be unique in the process
        kernel.__name__ = kernel.__qualname__ = name
        with interruption_deferred():
            compiled: Any = cfunc(signature, error_model="numpy")(kernel)
            self._keep.append(compiled)
            self.compiled += 1
            path = self._path(name)
            if path is not None:
                code = compiled._library.serialize_using_object_code()[2][0]
                symbol = compiled._wrapper_name.encode()
                _write(path, _MAGIC + symbol + b" " + _digest(name, symbol, code) + b"\n" + code)
            return int(compiled.address)


@contextmanager
def interruption_deferred() -> Iterator[None]:
    """Ctrl-C takes effect at the end: LLVM calls Python back, and an exception that is raised there
    is lost with the object code that it was to take."""
    if threading.current_thread() is not threading.main_thread():  # signals go to the main one
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda *signalled: caught.append(signalled))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if caught and callable(before):
            before(*caught[0])


def _digest(name: str, symbol: bytes, code: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + symbol + b"\0" + code).hexdigest().encode()


def default_folder() -> Path | None:
    """Where kernels are kept: ``EDGELLM_KERNEL_STORE`` (``off`` keeps none) or the cache folder."""
    named = os.environ.get("EDGELLM_KERNEL_STORE", "")
    if named == "off":
        return None
    if named:
        return Path(named)
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("EDGELLM_CACHE") or Path(cache_home) / "edgellm") / "kernels"


@cache
def version_key() -> str:
    """Everything machine code depends on, as a folder name."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    for source in sorted((Path(__file__).parents[2] / "quant").glob("*.py")):
        digest.update(source.read_bytes())  # decode kernels are traced from the number formats
    described = f"{version('numba')} {version('llvmlite')} {targets.cpu_description()}"
    digest.update(described.encode())
    return f"{targets.current().name}-{digest.hexdigest()[:16]}"


def check_private(folder: Path) -> None:
    """Refuse machine code that somebody else could have written."""
    if os.name != "posix":
        return
    status = folder.stat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise StoreError(
            f"The kernel store {folder} is owned by or writable for somebody else; "
            "remove it, or name another folder in EDGELLM_KERNEL_STORE."
        )


def _write(path: Path, data: bytes) -> None:
    """Atomically; a store that cannot be written (read-only home) only costs the next start."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return
    check_private(path.parent)
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        os.replace(temporary, path)
    except OSError:
        return
