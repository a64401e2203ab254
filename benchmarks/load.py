#!/usr/bin/env python3
"""The same load on two servers: clients that ask one request after another, the 40/40/20 mix.

    pip install 'llama-cpp-python[server]'
    python benchmarks/load.py MODEL.gguf [--clients 32] [--seconds 180]

llama-cpp-python's server answers one request at a time, with all threads; requests are not
interrupted by others. Both get the same requests, in the same order for each client's turn, and
answers of the same lengths: the tokens that end a text are banned. Printed: output tokens per
second of each server while the load lasted, their ratio, what failed, and the tails of latencies.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import socket
import sys

from served import Served

from edgellm.http_bench import Plan
from edgellm.http_load import Load, Server
from edgellm.serving_records import Record, Run, summary
from edgellm.tokenizer import Tokenizer
from edgellm.workloads import Speed, find

CONTEXT, SPEED = 2048, Speed(240, 150)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def rate(run: Run, seconds: float) -> float:
    """Output tokens a second within the time of the load; what came later is not counted."""

    def tokens(record: Record) -> float:
        within = sum(at <= seconds for at in record.tokens)
        return record.n_output * within / max(1, len(record.tokens))

    return sum(map(tokens, run.records)) / seconds


async def measure(server: Served, args: argparse.Namespace, ends: dict[str, float]) -> float:
    target = Server(f"http://127.0.0.1:{server.port}", body={"logit_bias": ends}, timeout=1800)
    load = Load(target)
    await load.count_words()
    plan = Plan("mix", 0, None, None, args.seconds, args.clients, CONTEXT, 8)
    asks = find("mix").make(plan.maker(SPEED, CONTEXT))
    run = await load.run(asks, args.clients, args.seconds)
    found, per_second = summary(run.records, run.seconds), rate(run, args.seconds)
    ttft, e2e = (found[name] for name in ("ttft", "e2e"))
    print(f"  {per_second:.1f} output tokens/s; {found['completed']} requests done, "
          f"{found['rejected']} turned away, {found['failed']} failed; TTFT P50 {ttft['p50']:.1f}, "
          f"P99 {ttft['p99']:.1f} s; whole P50 {e2e['p50']:.1f}, P99 {e2e['p99']:.1f} s; "
          f"the last answer came after {run.seconds:.0f} s", flush=True)  # fmt: skip
    for said, n in load.errors.most_common(3):
        print(f"  {n}: {said}")
    return per_second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=180)
    args = parser.parse_args()
    ends = {str(token): -100.0 for token in Tokenizer.from_gguf(args.model).eog}
    threads = str(os.cpu_count() or 1)
    ours = [sys.executable, "-m", "edgellm", "serve", args.model, "--port", "0",
            "-c", str(CONTEXT)]  # fmt: skip
    theirs = [sys.executable, "-m", "llama_cpp.server", "--model", args.model,
              "--port", str(free_port()), "--n_ctx", str(CONTEXT), "--n_threads", threads,
              "--n_threads_batch", threads, "--interrupt_requests", "False"]  # fmt: skip
    rates = {}
    for name, command in (("edgellm", ours), ("llama-cpp-python", theirs)):
        print(name, flush=True)
        with Served(command) as server:
            rates[name] = asyncio.run(measure(server, args, ends))
    ratio = rates["edgellm"] / (rates["llama-cpp-python"] or math.nan)
    print(f"ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
