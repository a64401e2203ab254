#!/usr/bin/env python3
"""What metrics and the log cost: the same load on one server with both and without.

    python benchmarks/serving_cost.py MODEL.gguf [--pairs 60] [--clients 8] [--tokens 64]

The server's process is told before each load whether to count and to log; two processes would
differ by more than this costs, by where their memory lies. While it counts it is scraped, once in
each load. Printed: tokens per second of both, the median of the ratios without / with of all pairs
(below 1.02 it has to stay) with its standard error, and the ratio of processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from served import Served

import edgellm.llm
from edgellm.metrics import Metrics

LIMIT = 1.02


class Switched(Metrics):
    """Counts while ``is_on``."""

    is_on = True

    def began(self, *given: Any) -> None:
        if self.is_on:
            super().began(*given)

    def token(self, *given: Any) -> None:
        if self.is_on:
            super().token(*given)

    def ended(self, *given: Any) -> None:
        if self.is_on:
            super().ended(*given)

    def step(self, *given: Any) -> None:
        if self.is_on:
            super().step(*given)


def serve(model: str, clients: int) -> None:
    """What the child process does; lines of its input switch it."""
    from edgellm.engine import AsyncLLM
    from edgellm.server.logs import start_logging
    from edgellm.server.models import Models
    from edgellm.server.run import Settings
    from edgellm.server.run import serve as run
    from edgellm.server.service import Service

    def switch() -> None:
        for line in sys.stdin:
            Switched.is_on = line == "with\n"
            logging.disable(logging.NOTSET if Switched.is_on else logging.CRITICAL)

    edgellm.llm.Metrics = Switched  # type: ignore[misc]
    threading.Thread(target=switch, daemon=True).start()
    start_logging(as_json=False)

    def made(name: str, path: Path) -> Service:
        llm = edgellm.llm.LLM(path, n_ctx=1024, max_num_seqs=clients)
        return Service(AsyncLLM(llm), name, None)

    models = Models(made, lambda path: 0)
    models.add("model", Path(model))
    run(models, Settings(("127.0.0.1", 0)),
        lambda text: print(text, file=sys.stderr, flush=True))  # fmt: skip


async def load(server: Served, clients: int, tokens: int, seed: int, is_on: bool) -> float:
    """Tokens per second of clients that ask once each."""

    async def client(number: int) -> int:
        prompt = f"Number {seed}, {number}: tell me about the sea and its ships."
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "seed": number}
        return len(await server.token_times(body)) - 1

    async def scrape() -> int:
        async for _ in server.lines("/metrics", None):
            pass
        return 0

    server.say("with\n" if is_on else "without\n")
    await asyncio.sleep(0.05)
    begun = time.perf_counter()
    asking = [client(i) for i in range(clients)]
    if is_on:
        asking.append(scrape())
    n = sum(await asyncio.gather(*asking))
    return n / (time.perf_counter() - begun)


def shown(ratios: list[float]) -> str:
    """The median with its standard error."""
    error = 1.2533 * statistics.stdev(ratios) / len(ratios) ** 0.5
    return f"{statistics.median(ratios):.4f} +- {error:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        serve(args.model, args.clients)
        return
    rates: dict[str, list[float]] = {"with": [], "without": []}
    cpu: dict[str, list[float]] = {"with": [], "without": []}
    command = [sys.executable, __file__, args.model, "--clients", str(args.clients), "--child"]
    with Served(command) as server:
        for pair in range(-2, args.pairs):  # the first steps teach the scheduler their time
            for name in sorted(rates, reverse=pair % 2 > 0):
                before = server.cpu_seconds
                rate = asyncio.run(load(server, args.clients, args.tokens, pair, name == "with"))
                if pair >= 0:
                    rates[name].append(rate)
                    cpu[name].append(server.cpu_seconds - before)
    ratios = [b / a for a, b in zip(rates["with"], rates["without"], strict=True)]
    costs = [a / b for a, b in zip(cpu["with"], cpu["without"], strict=True)]
    for name, found in rates.items():
        print(f"{name}: {statistics.median(found):.1f} tokens/s, "
              f"{1e3 * statistics.median(cpu[name]):.0f} ms of processor time")  # fmt: skip
    print(f"throughput without / with: {shown(ratios)} (limit {LIMIT}); processor time with / "
          f"without: {shown(costs)}; {args.pairs} pairs")  # fmt: skip
    sys.exit(statistics.median(ratios) > LIMIT)


if __name__ == "__main__":
    main()
