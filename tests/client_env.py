"""A server of its own process, and environments with clients."""

from __future__ import annotations

import subprocess
import sys
import time
import tomllib
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

PINS = tomllib.loads((Path(__file__).parent / "clients/requirements.toml").read_text())


@contextmanager
def serving(model: Path, *flags: str) -> Iterator[str]:
    """The address of a server of the model, which is called smol."""
    run = [sys.executable, "-m", "edgellm", "serve", str(model), "--port", "0", "-a", "smol",
           *flags]  # fmt: skip
    with subprocess.Popen(run, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        line = next(line for line in server.stderr if "http://" in line)
        address = "http://" + line.split("http://")[1].split()[0]
        for _ in range(100):
            try:
                httpx.get(address.removesuffix("/v1") + "/health").raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        yield address
        server.terminate()
        server.stderr.close()


def python_of(name: str, folder: Path) -> Path:
    """An interpreter with the client; skips where no package index can be reached."""
    target = folder / name
    venv.create(target, with_pip=True)
    python = target / "bin" / "python"
    done = subprocess.run(
        [python, "-m", "pip", "install", "-q", *PINS["python"][name]],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"{name} cannot be installed: {done.stderr[-200:]}")
    return python
