#!/usr/bin/env python3
"""What running streams feel of a long prompt that arrives beside them.

    python benchmarks/gaps.py MODEL.gguf [--streams 1 8] [--prompt 4000] [--threads 2]

For each number of streams: the gaps between their tokens while nobody else is there, and while the
prompt is computed, as percentiles in milliseconds with their ratio; and how long the prompt takes
to its first token, beside them and alone.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from edgellm import LLM, SamplingParams
from edgellm.sequence import Sequence
from edgellm.steps import arbitrary_tokens

GAPS = 100  # of each stream that are measured in quiet
PERCENTILES = (50, 95, 99)


def gaps(llm: LLM, streams: list[Sequence], until: object) -> list[float]:
    """Seconds between tokens of the streams, stepping until ``until()`` is true."""
    last, found = {s: time.perf_counter() for s in streams}, []
    while not until():  # type: ignore[operator]
        n = {s: len(s.tokens) for s in streams}
        llm.step()
        now = time.perf_counter()
        for s in streams:
            if len(s.tokens) > n[s]:
                found.append(now - last[s])
                last[s] = now
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=4000)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    endless = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)
    one = SamplingParams(max_tokens=1, temperature=0)
    seats = max(args.streams) + 1
    llm = LLM(args.model, n_ctx=args.prompt + 1024, n_threads=args.threads, max_num_seqs=seats)
    prompt = arbitrary_tokens(args.prompt, llm.n_vocab)
    alone = llm.generate([1, *prompt], one).timings["prompt_ms"] / 1e3
    print(f"{args.prompt} tokens alone: {alone:.2f} s to the first token")
    for n in args.streams:
        streams = [llm.submit([3 + i, *prompt[:16]], endless)[0] for i in range(n)]
        while any(len(s.tokens) < s.n_prompt + 5 for s in streams):
            llm.step()
        wanted = len(streams[0].tokens) + GAPS
        quiet = gaps(llm, streams, lambda: len(streams[0].tokens) >= wanted)  # noqa: B023
        other = llm.submit([2 + n, 5, *prompt[2:]], one)[0]
        begun = time.perf_counter()
        beside = gaps(llm, streams, lambda: other.finish_reason is not None)  # noqa: B023
        first = time.perf_counter() - begun
        for stream in streams:
            llm.forget(stream)
        rows = [1e3 * np.percentile(found, PERCENTILES) for found in (quiet, beside)]
        print(f"{n} streams, gaps P50/P95/P99 in ms: "
              f"quiet {' / '.join(f'{x:.1f}' for x in rows[0])}, "
              f"beside the prompt {' / '.join(f'{x:.1f}' for x in rows[1])}, "
              f"P99 ratio {rows[1][2] / rows[0][2]:.2f}; "
              f"first token of the prompt after {first:.2f} s")  # fmt: skip


if __name__ == "__main__":
    main()
