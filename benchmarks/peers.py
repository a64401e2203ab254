#!/usr/bin/env python3
"""edgellm beside llama.cpp on the same machine, interleaved: ratios that a noisy host cannot fake.

    CMAKE_ARGS="-DGGML_NATIVE=ON" pip install --no-binary llama-cpp-python llama-cpp-python
    python benchmarks/peers.py MODEL.gguf [MODEL.gguf ...] [--threads 2] [--rounds 7]

Each engine runs in a process of its own and is asked in turns: prefill of 256 random tokens from
an empty cache, then 32 single tokens after them; with --batch also 8 sequences token by token.
Timed is the evaluation alone, without sampling and text. Printed are medians of tokens/s and the
median of the ratios of adjacent measurements.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import time

PREFILL, DECODE, BATCH = 256, 32, 8


def tokens(n: int) -> list[int]:
    """The same arbitrary ids for everybody, below any vocabulary's size."""
    return [(7919 * i + 13) % 30000 + 100 for i in range(n)]


class EdgeLLM:
    def __init__(self, path: str, threads: int) -> None:
        from edgellm import LLM, SamplingParams
        from edgellm.runner import Run

        self._run, self._params = Run, SamplingParams(max_tokens=256)
        self._llm = LLM(path, n_ctx=2048, n_threads=threads, max_num_seqs=BATCH)

    def _start(self) -> object:
        sequence = self._llm._sequence(tokens(PREFILL + 64), self._params)
        assert self._llm._ready().cache.admit(sequence, 1024)
        return sequence

    def _step(self, runs: list[tuple[object, int]]) -> None:
        self._llm._forward([self._run(s, n, "last") for s, n in runs])

    def measure(self, batch: bool) -> dict[str, float]:
        sequence = self._start()
        begin = time.perf_counter()
        self._step([(sequence, PREFILL)])
        middle = time.perf_counter()
        for _ in range(DECODE):
            self._step([(sequence, 1)])
        end = time.perf_counter()
        self._llm._ready().cache.release(sequence)
        out = {"prefill": PREFILL / (middle - begin), "decode": DECODE / (end - middle)}
        if batch:
            sequences = [self._start() for _ in range(BATCH)]
            for s in sequences:
                self._step([(s, 16)])
            begin = time.perf_counter()
            for _ in range(DECODE):
                self._step([(s, 1) for s in sequences])
            out["batch of 8"] = BATCH * DECODE / (time.perf_counter() - begin)
            for s in sequences:
                self._llm._ready().cache.release(s)
        return out


class LlamaCpp:
    def __init__(self, path: str, threads: int) -> None:
        import llama_cpp as c

        self.c = c
        self.quiet = c.llama_log_callback(lambda *a: None)  # kept: C calls it later
        c.llama_log_set(self.quiet, ctypes.c_void_p(0))
        c.llama_backend_init()
        self.model = c.llama_model_load_from_file(path.encode(), c.llama_model_default_params())
        params = c.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 4096, 512, 512, BATCH
        params.n_threads = params.n_threads_batch = threads
        self.context = c.llama_init_from_model(self.model, params)
        self.batch = c.llama_batch_init(512, 0, BATCH)

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """rows of (token, position, sequence, logits wanted)"""
        b = self.batch
        b.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            b.token[i], b.pos[i], b.n_seq_id[i] = token, position, 1
            b.seq_id[i][0], b.logits[i] = sequence, wanted
        if self.c.llama_decode(self.context, b) != 0:
            raise RuntimeError("llama_decode failed")
        self.c.llama_get_logits_ith(self.context, -1)  # waits for the result

    def _clear(self) -> None:
        self.c.llama_memory_clear(self.c.llama_get_memory(self.context), True)

    def measure(self, batch: bool) -> dict[str, float]:
        self._clear()
        ids = tokens(PREFILL + DECODE)
        begin = time.perf_counter()
        self._decode([(t, i, 0, i == PREFILL - 1) for i, t in enumerate(ids[:PREFILL])])
        middle = time.perf_counter()
        for i in range(PREFILL, PREFILL + DECODE):
            self._decode([(ids[i], i, 0, True)])
        end = time.perf_counter()
        out = {"prefill": PREFILL / (middle - begin), "decode": DECODE / (end - middle)}
        if batch:
            self._clear()
            for s in range(BATCH):
                self._decode([(t, i, s, i == 15) for i, t in enumerate(ids[:16])])
            begin = time.perf_counter()
            for i in range(16, 16 + DECODE):
                self._decode([(ids[i], i, s, True) for s in range(BATCH)])
            out["batch of 8"] = BATCH * DECODE / (time.perf_counter() - begin)
        return out


ENGINES = {"edgellm": EdgeLLM, "llama.cpp": LlamaCpp}


def worker(engine: str, path: str, threads: int, batch: bool) -> None:
    """Measure once for every line on stdin."""
    running = ENGINES[engine](path, threads)
    running.measure(batch)  # warm: pages, caches
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(running.measure(batch)), flush=True)


def compare(path: str, args: argparse.Namespace) -> None:
    command = [sys.executable, __file__, path, "--threads", str(args.threads)]
    command += ["--batch"] if args.batch else []
    workers = {
        name: subprocess.Popen(
            [*command, "--worker", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name in ENGINES
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ENGINES}
    for process in workers.values():
        assert process.stdout is not None and process.stdout.readline().strip() == "ready"
    for _ in range(args.rounds):
        for name, process in workers.items():
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            found[name].append(json.loads(process.stdout.readline()))
    for process in workers.values():
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    print(f"{path.rsplit('/', 1)[-1]}, {args.threads} threads, {args.rounds} rounds")
    for phase in found["edgellm"][0]:
        ours, theirs = ([r[phase] for r in found[n]] for n in ENGINES)
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        print(
            f"  {phase:11} edgellm {statistics.median(ours):8.1f}   "
            f"llama.cpp {statistics.median(theirs):8.1f}   "
            f"ratio {statistics.median(ratios):5.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", action="store_true", help="also 8 sequences together")
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.models[0], args.threads, args.batch)
        return
    for path in args.models:
        compare(path, args)


if __name__ == "__main__":
    main()
