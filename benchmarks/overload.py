#!/usr/bin/env python3
"""A server at its capacity and at five times as much: who is admitted is served as usual, the rest
is told at once to come again.

    python benchmarks/overload.py MODEL.gguf [--seconds 60] [--times 5]

Printed: TTFT P95 of admitted requests at capacity and under overload (their ratio has to stay below
2), the time of rejections (P99 below 50 ms), requests without an answer (0), how long after the
load a request is served as at rest (5 s), and how the server's memory grew.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
import time

from served import Served

from edgellm.http_bench import Plan
from edgellm.http_load import Load, Server
from edgellm.serving_records import Record, Run, summary
from edgellm.workloads import Ask, Speed, find

SEATS = 8


def plan(speed: Speed, seconds: float, rate: float | None, seed: int) -> list[Ask]:
    maker = Plan("mix", seed, None, rate, seconds, n_ctx=2048, n_seqs=SEATS).maker(speed, 2048)
    maker.scale = 0.25
    return find("mix").make(maker)


async def throughput(load: Load, speed: Speed, seconds: float) -> float:
    """Requests a second that the server does with all seats and places of the queue taken."""
    run = await load.run(plan(speed, 10 * seconds, math.inf, 1), 2 * SEATS, seconds)
    return sum(r.is_complete for r in run.records) / run.seconds


def shown(name: str, run: Run) -> float:
    found = summary(run.records, run.seconds)
    ttft = {q: 1e3 * (found["ttft"][q] or math.nan) for q in ("p50", "p95")}
    print(f"{name}: {found['requests']} requests, {found['completed']} done, "
          f"{found['rejected']} turned away, {found['failed']} failed; TTFT P50 "
          f"{ttft['p50']:.0f}, P95 {ttft['p95']:.0f} ms; "
          f"{found['generated_tokens_per_second']:.0f} tokens/s")  # fmt: skip
    return ttft["p95"]


async def one(load: Load) -> Record:
    return (await load.run([Ask(0.0, list(range(20)), 4, "probe")])).records[0]


async def measure(server: Served, seconds: float, times: float) -> bool:
    load = Load(Server(f"http://127.0.0.1:{server.port}"))
    await load.count_words()
    speed = await load.speed(SEATS)
    resting = statistics.median([(await one(load)).e2e or 0 for _ in range(5)])
    rate = await throughput(load, speed, seconds / 3)
    print(f"capacity {rate:.2f} requests/s; resting {1e3 * resting:.0f} ms")
    before = server.private_bytes
    calm = shown("at capacity", await load.run(plan(speed, seconds, rate, 2), seconds=seconds))
    run = await load.run(plan(speed, seconds, times * rate, 3), seconds=seconds)
    crowded = shown(f"{times:g} times as much", run)
    began = time.perf_counter()
    while ((await one(load)).e2e or math.inf) > 2 * resting + 0.05:
        await asyncio.sleep(0.1)
    back = time.perf_counter() - began
    refused = sorted(r.e2e or 0 for r in run.records if r.is_rejected)
    half, slow = (refused[int(q * len(refused))] if refused else math.nan for q in (0.5, 0.99))
    unanswered = sum(not (r.is_complete or r.is_rejected) for r in run.records)
    grown = (server.private_bytes - before) / 2**20
    print(f"TTFT P95 ratio {crowded / calm:.2f}; rejections P50 {1e3 * half:.1f}, P99 "
          f"{1e3 * slow:.1f} ms; {unanswered} "
          f"without an answer; back after {back:.1f} s; memory {grown:+.1f} MiB")  # fmt: skip
    for said, n in load.errors.most_common(3):
        print(f"{n}: {said}")
    return crowded <= 2 * calm and slow <= 0.05 and not unanswered and back <= 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--times", type=float, default=5)
    args, more = parser.parse_known_args()
    command = [sys.executable, "-m", "edgellm", "serve", args.model, "--port", "0", "-c", "2048",
               "-np", str(SEATS), *more]  # fmt: skip
    with Served(command) as server:
        good = asyncio.run(measure(server, args.seconds, args.times))
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
