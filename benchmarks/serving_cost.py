#!/usr/bin/env python3
"""What metrics and the log cost: the same load on a server with both and on one without.

    python benchmarks/serving_cost.py MODEL.gguf [--pairs 6] [--clients 8] [--tokens 64]

Two servers run the same model; they get the same requests in turns, and only one of them works at a
time. The one with metrics is scraped every second. Printed: tokens per second of each pair, the
ratio without / with of each, and their median, which has to stay below 1.02.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import sys
import time
from typing import Any

from served import Served

import edgellm.llm
from edgellm.metrics import Metrics

LIMIT = 1.02


class Silent(Metrics):
    """Counts nothing."""

    def began(self, *given: Any) -> None: ...
    def preempted(self, *given: Any) -> None: ...
    def token(self, *given: Any) -> None: ...
    def ended(self, *given: Any) -> None: ...
    def step(self, *given: Any) -> None: ...


def serve(model: str, clients: int, is_silent: bool) -> None:
    """What a child process does."""
    from edgellm.server.run import serve as run

    if is_silent:
        edgellm.llm.Metrics = Silent  # type: ignore[misc]
        logging.disable(logging.CRITICAL)
    with edgellm.llm.LLM(model, n_ctx=1024, max_num_seqs=clients) as llm:
        run(llm, model="model", template=None, address=("127.0.0.1", 0),
            say=lambda text: print(text, file=sys.stderr, flush=True))  # fmt: skip


async def load(server: Served, clients: int, tokens: int, seed: int, is_scraped: bool) -> float:
    """Tokens per second of the clients together, of which each asks three times."""

    async def client(number: int) -> int:
        n = 0
        for turn in range(3):
            prompt = f"Number {seed}, {number}, {turn}: tell me about the sea and its ships."
            body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "seed": number}
            n += len(await server.token_times(body)) - 1
        return n

    async def scrape() -> None:
        while True:
            async for _ in server.lines("/metrics", None):
                pass
            await asyncio.sleep(1.0)

    scraping = asyncio.create_task(scrape()) if is_scraped else None
    begun = time.perf_counter()
    n = sum(await asyncio.gather(*(client(i) for i in range(clients))))
    seconds = time.perf_counter() - begun
    if scraping is not None:
        scraping.cancel()
    return n / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--child", choices=("with", "without"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        serve(args.model, args.clients, args.child == "without")
        return
    command = [sys.executable, __file__, args.model, "--clients", str(args.clients), "--child"]
    with Served([*command, "with"]) as full, Served([*command, "without"]) as silent:
        servers = {"with": full, "without": silent}
        for name, server in servers.items():  # the first steps teach the scheduler their time
            asyncio.run(load(server, args.clients, 16, -1, name == "with"))
        ratios = []
        for pair in range(args.pairs):
            found = {}
            for name in sorted(servers, reverse=pair % 2 > 0):
                found[name] = asyncio.run(
                    load(servers[name], args.clients, args.tokens, pair, name == "with")
                )
            ratios.append(found["without"] / found["with"])
            print(f"pair {pair}: {found['with']:.1f} tokens/s with, {found['without']:.1f} "
                  f"without, ratio {ratios[-1]:.4f}", flush=True)  # fmt: skip
    middle = statistics.median(ratios)
    print(f"median {middle:.4f} (limit {LIMIT}), from {min(ratios):.4f} to {max(ratios):.4f}")
    sys.exit(middle > LIMIT)


if __name__ == "__main__":
    main()
