"""Killing a command at random moments: what has its final name must be whole, and a rerun works."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path


def digests(folder: Path) -> dict[str, str]:
    """Of the files with a final name."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.suffix == ".gguf"
    }


def check(arguments: Sequence[str], folder: Path, kills: int, seed: int = 0) -> None:
    """`edgellm *arguments` writes into `folder`; it is killed that many times, each followed by a
    look at what is there, and then by a whole run. One run may take a few seconds."""
    command = [sys.executable, "-m", "edgellm", *arguments]
    subprocess.run(command, check=True, capture_output=True)  # kernels are compiled, once
    whole = digests(folder)
    assert whole, "the command writes no .gguf file into the folder"
    rng, killed, longest = random.Random(seed), 0, 5.0  # seconds; corrected by the first runs
    while killed < kills:
        for path in folder.iterdir():
            if path.suffix == ".gguf" or killed % 2:  # every other time a .partial file is left
                path.unlink()
        start = time.monotonic()
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            assert child.wait(rng.uniform(0, longest)) == 0
            longest = min(longest, time.monotonic() - start)
        except subprocess.TimeoutExpired:
            child.kill()
            killed += child.wait() != 0
        for name, digest in digests(folder).items():
            assert digest == whole[name], f"{name} is damaged"
    for path in folder.glob("*.gguf"):
        path.unlink()
    subprocess.run(command, check=True, capture_output=True)
    assert digests(folder) == whole
    assert not list(folder.glob("*.partial"))
