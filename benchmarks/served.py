"""A server in a process of its own, and a client that costs little beside it."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import threading
import time
from collections.abc import AsyncIterator
from typing import Any, Self

import psutil


class Served:
    """Runs ``command`` until the block is left. ``port`` is where it listens."""

    def __init__(self, command: list[str]) -> None:
        pipe = subprocess.PIPE
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=pipe, stdout=quiet, stderr=pipe, text=True)
        assert self._process.stderr is not None
        lines = self._process.stderr
        for line in lines:
            if found := re.search(r"http://[^/\s]*:(\d+)", line):
                self.port = int(found[1])
                break
        else:
            raise SystemExit("The server has not started.")
        # what it logs has to go somewhere
        threading.Thread(target=lambda: [None for _ in lines], daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait()

    def say(self, text: str) -> None:
        """Into the process's input."""
        assert self._process.stdin is not None
        self._process.stdin.write(text)
        self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def private_bytes(self) -> int:
        """Memory of its own, also where it is swapped out."""
        with open(f"/proc/{self._process.pid}/status", encoding="utf-8") as file:
            fields = dict(line.split(":", 1) for line in file)
        return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "VmSwap"))

    @property
    def cpu_seconds(self) -> float:
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def head(self, path: str, body: dict[str, Any] | None) -> bytes:
        """A request as it goes over the wire."""
        data = b"" if body is None else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        lines = [f"{method} {path} HTTP/1.1", "host: localhost", "connection: close"]
        lines += ["content-type: application/json", f"content-length: {len(data)}", "", ""]
        return "\r\n".join(lines).encode() + data

    async def lines(self, path: str, body: dict[str, Any] | None) -> AsyncIterator[bytes]:
        """The lines of an answer, heads and all, as they come."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
        try:
            writer.write(self.head(path, body))
            while line := await reader.readline():
                yield line
        finally:
            writer.close()

    async def token_times(self, body: dict[str, Any]) -> list[float]:
        """When the request was sent, and when each chunk of its stream came."""
        times = [time.perf_counter()]
        async for line in self.lines("/v1/completions", {**body, "stream": True}):
            if line.startswith(b'data: {"id"'):
                times.append(time.perf_counter())
            elif line.startswith(b'data: {"error"'):
                raise SystemExit(line.decode())
        return times
