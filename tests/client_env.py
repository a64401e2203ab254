"""A server of its own process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx


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
        # what it logs has to go somewhere
        rest = server.stderr
        reading = threading.Thread(target=lambda: [None for _ in rest])
        reading.start()
        yield address
        server.terminate()
        reading.join()
        server.stderr.close()
