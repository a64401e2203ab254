#!/usr/bin/env python3
"""A server under load for long: what it holds must not grow.

    python benchmarks/soak.py MODEL.gguf [--minutes 10] [--clients 8]

Clients ask one request after another: a tenth leaves before the answer is complete, a twentieth
sends what cannot be served. After a warm-up, in which the worst requests also meet, and a minute,
memory of its own (RssAnon and VmSwap), open files and threads are noted, and again at the end, when
nothing runs any more: memory may have grown by 8 MiB, the rest and the cache's blocks must be as
before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter

import httpx2
import psutil
from served import Served

from edgellm.http_load import WORDS

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
MALFORMED: list[tuple[str, bytes, str]] = [
    (CHAT, b"", "application/json"),
    (CHAT, b'{"messages": [', "application/json"),
    (CHAT, b"[1, 2]", "application/json"),
    (CHAT, b"hello", "text/plain"),
    (CHAT, json.dumps({"messages": HI, "temperature": 1e9}).encode(), "application/json"),
    (CHAT, json.dumps({"messages": HI, "model": "nobody"}).encode(), "application/json"),
    (CHAT, json.dumps({"messages": [{"role": "judge"}]}).encode(), "application/json"),
    (CHAT, b"[" * 50_000, "application/json"),
    ("/v1/completions", json.dumps({"prompt": [-1, 1 << 63]}).encode(), "application/json"),
    ("/v1/completions", json.dumps({"prompt": "a " * 100_000}).encode(), "application/json"),
    ("/v1/messages", json.dumps({"messages": []}).encode(), "application/json"),
    ("/nowhere", b"{}", "application/json"),
]


class Soak:
    def __init__(self, server: Served, seed: int) -> None:
        self.server, self.random = server, random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.http = httpx2.AsyncClient(
            base_url=f"http://127.0.0.1:{server.port}", timeout=120, trust_env=False,
            limits=httpx2.Limits(max_connections=None),
        )  # fmt: skip

    async def client(self, until: float) -> None:
        while time.monotonic() < until:
            chance = self.random.random()
            if chance < 0.05:
                await self.malformed(*self.random.choice(MALFORMED))
            else:
                await self.ask(leaves=chance < 0.15)

    async def malformed(self, path: str, content: bytes, kind: str) -> None:
        answer = await self.http.post(path, content=content, headers={"content-type": kind})
        self.seen[f"malformed {answer.status_code // 100}xx"] += 1

    async def ask(self, leaves: bool) -> None:
        words = self.random.choices(WORDS, k=self.random.choice((5, 20, 100, 300)))
        stream = self.random.random() < 0.7
        body = {
            "messages": [{"role": "user", "content": " ".join(words)}], "stream": stream,
            "max_tokens": self.random.choice((4, 16, 64)), "ignore_eos": True,
            "temperature": self.random.choice((0, 0.8)), "n": self.random.choice((1, 1, 1, 2)),
        }  # fmt: skip
        try:
            async with asyncio.timeout(self.random.uniform(0.01, 0.5) if leaves else 120):
                answer = await self.http.post(CHAT, json=body)
        except TimeoutError:
            self.seen["left" if leaves else "stuck"] += 1
            return
        whole = answer.text.rstrip().endswith("data: [DONE]") if stream else bool(answer.json())
        self.seen[f"answered {answer.status_code}" if whole else "cut"] += 1

    async def wake_workers(self) -> None:
        """Every thread of the server's pool has worked once."""
        body = {"content": "a b c d " * 2000}
        await asyncio.gather(*(self.http.post("/tokenize", json=body) for _ in range(64)))

    async def meet(self, clients: int) -> None:
        """The worst that can coincide: every client sends the same kind of bad request at once."""
        for what in MALFORMED:
            await asyncio.gather(*(self.malformed(*what) for _ in range(clients)))

    async def resting(self) -> dict[str, float]:
        """What the server holds when nothing runs."""
        for _ in range(200):
            [model] = (await self.http.get("/status")).json()["models"]
            if not model["running"] and not model["waiting"]:
                break
            await asyncio.sleep(0.05)
        process = psutil.Process(self.server.pid)
        return {
            "memory MiB": self.server.private_bytes / 2**20, "files": process.num_fds(),
            "threads": process.num_threads(), "running": model["running"],
            "waiting": model["waiting"], "blocks held": model["kv_cache_usage"],
        }  # fmt: skip

    async def run(self, seconds: float, clients: int) -> None:
        until = time.monotonic() + seconds
        await asyncio.gather(*(self.client(until) for _ in range(clients)))
        await self.http.aclose()
        self.http = httpx2.AsyncClient(base_url=self.http.base_url, timeout=120, trust_env=False)
        await asyncio.sleep(20)  # what is free goes back to the system now and then


async def measure(server: Served, minutes: float, clients: int) -> bool:
    soak = Soak(server, 0)
    await soak.wake_workers()
    await soak.meet(clients)
    await soak.run(60, clients)
    before = await soak.resting()
    print("warm:", before, flush=True)
    await soak.run(60 * minutes, clients)
    after = await soak.resting()
    print("then:", after)
    print(dict(sorted(soak.seen.items())))
    grown = after["memory MiB"] - before["memory MiB"]
    same = all(after[name] == before[name] for name in after if name != "memory MiB")
    odd = [what for what in soak.seen if what in ("cut", "stuck", "malformed 5xx")]
    odd += [what for what in soak.seen if what.startswith("answered 5")]
    print(f"memory {grown:+.1f} MiB, the rest {'as before' if same else 'NOT as before'}")
    return grown < 8 and same and not odd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=8)
    args, more = parser.parse_known_args()
    command = [sys.executable, "-m", "edgellm", "serve", args.model, "--port", "0", "-c", "2048",
               *more]  # fmt: skip
    with Served(command) as server:
        good = asyncio.run(measure(server, args.minutes, args.clients))
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
