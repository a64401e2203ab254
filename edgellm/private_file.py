"""Files that are whole or not there, and readable by their owner only."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path


def write(path: Path, parts: Iterable[bytes]) -> int:
    """Replace a file by these bytes once all of them are on the disk; how many they are. OSError,
    and the old file stays."""
    n_bytes = 0
    # mkstemp makes files that only their owner can read
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            for part in parts:
                n_bytes += file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise
    return n_bytes
