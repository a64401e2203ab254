#!/usr/bin/env python3
"""Encoders of number formats beside ggml's, interleaved, on the same number of threads.

    pip install llama-cpp-python
    python benchmarks/encode.py [TYPE ...] [--source f16] [--threads 2] [--rounds 5] [--weighted]

Ours begin with the rows of a file in ``--source``, which they decode, as `edgellm quantize` does;
ggml's (ggml_quantize_chunk, rows shared out evenly) begin with float32. MB/s are of the float32
values. Printed are the best of the rounds, and the median of the ratios of neighbouring rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from edgellm.kernels.cpu.convert import Converter
from edgellm.quant import by_name

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import ggml
from weight_rows import NAMES


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", default=NAMES)
    parser.add_argument("--source", default="f16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--weighted", action="store_true", help="with importance of columns")
    args = parser.parse_args()
    rng, n = np.random.default_rng(0), args.columns
    source = by_name(args.source)
    data = source.quantize(rng.standard_normal((args.rows, n)).astype(np.float32) * 0.02)
    rows = source.dequantize(data)
    weights = rng.lognormal(0, 1, n).astype(np.float32) if args.weighted else None
    parts = np.array_split(rows, args.threads)
    megabytes = rows.nbytes / 1e6
    print(f"{'type':8} {'ours MB/s':>10} {'ggml MB/s':>10} {'ratio':>6}")
    with Converter(args.threads) as converter, ThreadPoolExecutor(args.threads) as pool:
        for name in args.types:
            kind = by_name(name)
            out = np.empty((len(rows), kind.row_bytes(n)), np.uint8)

            def ours() -> None:
                converter.convert(data, source, kind, weights, out)  # noqa: B023

            def theirs() -> None:
                list(pool.map(lambda part: ggml.quantize(kind, part, weights), parts))  # noqa: B023

            ours()  # compiles
            times = [(seconds(ours), seconds(theirs)) for _ in range(args.rounds)]
            best = [megabytes / min(column) for column in zip(*times, strict=True)]
            ratio = statistics.median(b / a for a, b in times)
            print(f"{name:8} {best[0]:10.0f} {best[1]:10.0f} {ratio:6.2f}", flush=True)


if __name__ == "__main__":
    main()
