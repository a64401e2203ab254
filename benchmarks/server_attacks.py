#!/usr/bin/env python3
"""What clients that mean no good cost the others.

    python benchmarks/server_attacks.py headers MODEL.gguf [--connections 100]
    python benchmarks/server_attacks.py readers MODEL.gguf [--stalled 4]

"headers": connections that send their heads a byte a second. The time to the first token of other
requests may become 1.5 times as long at most, /livez has to answer within 100 ms (P99), and each
connection has to be closed within 12 s.

"readers": clients that ask for long streams and read nothing of them. The server's memory may grow
by 8 MiB, and the gaps between tokens of other streams (P99) by 10 %, each compared with as many
clients that do read; the stalled ones are to be given up.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
import time
from collections.abc import Coroutine
from typing import Any

import numpy as np
from served import Served

TTFT_LIMIT, LIVEZ_LIMIT, CLOSED_LIMIT = 1.5, 0.1, 12.0
MEMORY_LIMIT, GAP_LIMIT = 8 << 20, 1.1
ASK = {"max_tokens": 16, "ignore_eos": True}
LONG = {"prompt": "Tell me a very long story.", "ignore_eos": True, "stream": True,
        "logprobs": 20, "max_tokens": 6000}  # fmt: skip


def percentile(values: list[float], q: float) -> float:
    return float(np.percentile(values, q))


# ---- slow heads ---------------------------------------------------------------------------------


async def ttfts(server: Served, n: int, label: str) -> list[float]:
    """Seconds to the first token of requests one after the other, each with a prompt of its own."""
    found = []
    for i in range(n):
        prompt = f"{label} {i}: " + "all that can be said of ships and the sea, " * 8
        times = await server.token_times({"prompt": prompt, **ASK})
        found.append(times[1] - times[0])
    return found


async def livez(server: Served, found: list[float]) -> None:
    """Ask again and again, and note how long each answer takes."""
    while True:
        begun = time.perf_counter()
        async for _ in server.lines("/livez", None):
            pass
        found.append(time.perf_counter() - begun)
        await asyncio.sleep(0.05)


async def slow_head(server: Served) -> float:
    """Seconds until the server closes a connection whose head never ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    begun = time.perf_counter()

    async def drip() -> None:
        writer.write(b"GET /livez HTTP/1.1\r\nhost: localhost\r\nx: ")
        while True:
            writer.write(b"a")
            await asyncio.sleep(1.0)

    dripping = asyncio.create_task(drip())
    try:
        while await reader.read(1000):
            pass
    except ConnectionResetError:
        pass
    dripping.cancel()
    writer.close()
    return time.perf_counter() - begun


async def headers(server: Served, connections: int) -> bool:
    await ttfts(server, 5, "warm")
    quiet, attacked, lives = [], [], []
    closed: list[float] = []
    for turn in range(2):
        quiet += await ttfts(server, 30, f"quiet {turn}")
        attack = [asyncio.create_task(slow_head(server)) for _ in range(connections)]
        asking = asyncio.create_task(livez(server, lives))
        await asyncio.sleep(0.5)
        while not all(task.done() for task in attack):
            attacked += await ttfts(server, 5, f"attacked {turn} {len(attacked)}")
        asking.cancel()
        closed += [task.result() for task in attack]
    ratios = {q: percentile(attacked, q) / percentile(quiet, q) for q in (50, 95)}
    live = percentile(lives, 99)
    print(f"first token P50 / P95: {1e3 * percentile(quiet, 50):.1f} / "
          f"{1e3 * percentile(quiet, 95):.1f} ms quiet, {1e3 * percentile(attacked, 50):.1f} / "
          f"{1e3 * percentile(attacked, 95):.1f} ms beside {connections} slow heads: "
          f"ratio {ratios[50]:.2f} / {ratios[95]:.2f} (limit {TTFT_LIMIT})")  # fmt: skip
    print(
        f"/livez P99 {1e3 * live:.1f} ms of {len(lives)} (limit {1e3 * LIVEZ_LIMIT:.0f}); "
        f"connections closed after {max(closed):.1f} s at most (limit {CLOSED_LIMIT:.0f})"
    )
    return max(ratios.values()) <= TTFT_LIMIT and live < LIVEZ_LIMIT and max(closed) <= CLOSED_LIMIT


# ---- stalled readers ----------------------------------------------------------------------------


async def gaps(server: Served, seconds: float, number: int) -> list[float]:
    """Between the tokens of one stream after the other."""
    found: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        body = {"prompt": f"Story number {number}.", "max_tokens": 200, "ignore_eos": True}
        times = await server.token_times(body)
        found += np.diff(times[2:]).tolist()
    return found


async def read_all(server: Served) -> None:
    async for _ in server.lines("/v1/completions", LONG):
        pass


async def stall(server: Served) -> None:
    """Ask for much, and read nothing of it."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(raw, ("127.0.0.1", server.port))
    await loop.sock_sendall(raw, server.head("/v1/completions", LONG))
    try:
        await asyncio.sleep(3600)
    finally:
        raw.close()


async def aborted(server: Served) -> int:
    """How many requests the server has given up so far."""
    async for line in server.lines("/metrics", None):
        if line.startswith(b"edgellm:request_success_total") and b'"abort"' in line:
            return int(float(line.split()[-1]))
    return 0


async def beside(
    server: Served, others: list[Coroutine[Any, Any, Any]], seconds: float
) -> tuple[list[float], int, list[float]]:
    """(gaps of four streams, most memory that was added, after how many seconds others were given
    up)."""
    await asyncio.sleep(1.0)  # what came before is over
    before, most, begun = server.private_bytes, 0, time.perf_counter()
    n_before, given_up = await aborted(server), list[float]()
    tasks = [asyncio.create_task(other) for other in others]

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, server.private_bytes - before)
            new = await aborted(server) - n_before - len(given_up)
            given_up.extend([time.perf_counter() - begun] * new)
            await asyncio.sleep(0.5)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(1.0)
    measured = await asyncio.gather(*(gaps(server, seconds, i) for i in range(4)))
    watching.cancel()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return [gap for found in measured for gap in found], most, given_up


async def readers(server: Served, n: int) -> bool:
    await beside(server, [read_all(server) for _ in range(n)], 20.0)  # buffers and pools grow
    read, read_bytes, _ = await beside(server, [read_all(server) for _ in range(n)], 20.0)
    stalled, stalled_bytes, given_up = await beside(server, [stall(server) for _ in range(n)], 90.0)
    ratio = percentile(stalled, 99) / percentile(read, 99)
    more = max(0, stalled_bytes - read_bytes)
    print(f"gaps P50 / P99: {1e3 * percentile(read, 50):.1f} / {1e3 * percentile(read, 99):.1f} ms "
          f"beside {n} readers, {1e3 * percentile(stalled, 50):.1f} / "
          f"{1e3 * percentile(stalled, 99):.1f} ms beside {n} that stall: ratio {ratio:.2f} "
          f"(limit {GAP_LIMIT})")  # fmt: skip
    print(f"memory grew by {read_bytes / 2**20:.1f} MiB and {stalled_bytes / 2**20:.1f} MiB: "
          f"{more / 2**20:.1f} more (limit {MEMORY_LIMIT >> 20}); {len(given_up)} given up, after "
          f"{max(given_up, default=0):.0f} s at most")  # fmt: skip
    return ratio <= GAP_LIMIT and more <= MEMORY_LIMIT and len(given_up) == n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("attack", choices=("headers", "readers"))
    parser.add_argument("model")
    parser.add_argument("--connections", type=int, default=100)
    parser.add_argument("--stalled", type=int, default=4)
    args = parser.parse_args()
    command = [sys.executable, "-m", "edgellm", "serve", args.model, "--port", "0",
               "-np", str(args.stalled + 4), "-c", "8192"]  # fmt: skip
    with Served(command) as server:
        attack = (headers(server, args.connections) if args.attack == "headers"
                  else readers(server, args.stalled))  # fmt: skip
        sys.exit(not asyncio.run(attack))


if __name__ == "__main__":
    main()
