"""The cache folder and what keeps it sound: locks between processes, durable renames, safe paths.

Every path that is made from a name, a digest or a file list of somebody else goes through `inside`.
"""

import hashlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edgellm.errors import EdgeLLMError

SPARE = 16 << 20  # bytes a disk keeps free


class HubError(EdgeLLMError):
    """A model could not be found or fetched."""


@dataclass(frozen=True)
class Item:
    """What is being fetched, for whoever shows progress."""

    title: str
    size: int | None  # bytes
    licence: str | None


Progress = Callable[[Item, int], None]  # (what is fetched, bytes so far)


def cache_dir() -> Path:
    """The folder for everything that can be fetched or made again."""
    if own := os.environ.get("EDGELLM_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "edgellm"


def models_dir() -> Path:
    """Where fetched models lie, but for those in the cache of Hugging Face."""
    return cache_dir() / "models"


# Windows refuses the characters and names below, and drops dots and spaces at the end.
_PART = re.compile(r"[^\x00-\x1f\x7f<>:\"/\\|?*]+")
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


def safe_part(part: str) -> bool:
    """Whether ``part`` can name one file or folder, on every system."""
    return (
        0 < len(os.fsencode(part)) <= 255
        and _PART.fullmatch(part) is not None
        and part[-1] not in ". "
        and _DEVICES.fullmatch(part) is None
    )


def inside(root: Path, relative: str) -> Path:
    """``root / relative`` for a path with forward slashes that cannot lead out of ``root``.

    HubError for anything else: absolute paths, `..`, drive letters, control characters.
    """
    try:
        safe = all(safe_part(part) for part in relative.split("/"))
    except UnicodeEncodeError:  # half a surrogate pair
        safe = False
    if not safe:
        raise HubError(f"{relative[:100]!r} is refused as the name of a file; rename it there.")
    return root.joinpath(*relative.split("/"))


def sha256_digest(text: object) -> str | None:
    """The 64 hex digits of a digest, with or without `sha256:` before; None if it is not one."""
    if not isinstance(text, str):
        return None
    found = re.fullmatch(r"(?:sha256[:-])?([0-9a-f]{64})", text)
    return found[1] if found else None


def short_hash(text: str) -> str:
    """A name for a file or folder that stands for any text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def require_space(folder: Path, needed: int, what: str) -> None:
    """HubError if ``folder`` cannot take ``needed`` more bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed + SPARE:
        raise HubError(
            f"Fetching {what} needs {(needed + SPARE) / 1e6:.0f} MB in {folder}, which has "
            f"{free / 1e6:.0f} MB free; EDGELLM_CACHE (HF_HUB_CACHE for Hugging Face) names "
            "another folder."
        )


@contextmanager
def storing(what: str, folder: Path) -> Iterator[None]:
    """Turn what the file system refuses into a sentence."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise HubError(
            f"{what} could not be stored in {folder}: {error.strerror or error}; "
            "EDGELLM_CACHE (HF_HUB_CACHE for Hugging Face) names another folder."
        ) from error


def write_durably(path: Path, data: bytes) -> None:
    """Replace a small file at once: readers see the old content or the new one."""
    new = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(new, "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    os.replace(new, path)


@contextmanager
def locked(target: Path, folder: Path | None = None) -> Iterator[None]:
    """Hold the lock of ``target`` between processes; waits for whoever has it.

    The lock file stays: removing it would let a third process lock a name that a second one waits
    for. The system drops the lock of a process that dies.
    """
    folder = folder or cache_dir() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{short_hash(os.path.realpath(target))}.lock", "ab") as handle:
        if sys.platform == "win32":
            import msvcrt

            while True:
                try:
                    msvcrt.locking(handle.fileno(), msvcrt.LK_LOCK, 1)
                    break
                except OSError:  # it gives up after ten seconds
                    continue
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
