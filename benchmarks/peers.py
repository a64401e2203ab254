#!/usr/bin/env python3
"""edgellm beside llama.cpp on the same machine, interleaved: ratios that a noisy host cannot fake.

    CMAKE_ARGS="-DGGML_NATIVE=ON" pip install --no-binary llama-cpp-python llama-cpp-python
    python benchmarks/peers.py MODEL.gguf [MODEL.gguf ...] [--threads 2] [--rounds 7]

Each engine runs in a process of its own (engines.py) and is asked in turns, test by test: prefill
of 256 tokens, decode behind them, with --batch 8 sequences together (the
kernels alone, and as requests with scheduling, sampling and text), with --depth 4096 both behind
4096 tokens, with --busy decode while another process keeps one core busy, with --start the time of
a whole process from its start to its first token. Printed are medians, and the median of the
ratios of neighbouring measurements with its 95 % bootstrap interval.

For laptops without AVX-512: --target avx2 sets our target, and --peer-python names an interpreter
with a llama.cpp of its own that was built for the same instructions:

    python -m venv avx2 && CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON
        -DGGML_F16C=ON -DGGML_BMI2=ON" avx2/bin/pip install --no-binary llama-cpp-python
        llama-cpp-python
    python benchmarks/peers.py MODEL.gguf --target avx2 --peer-python avx2/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from edgellm.bootstrap import median_of_ratios

HERE = Path(__file__).parent
ENGINES = ("edgellm", "llama.cpp")
PROMPT = "The capital of France is"
BUSY = "import os,sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
START = """
import ctypes, sys, llama_cpp as c
quiet = c.llama_log_callback(lambda *a: None)
c.llama_log_set(quiet, ctypes.c_void_p(0))
model = c.Llama(sys.argv[1], n_ctx=512, n_threads=int(sys.argv[2]), verbose=False)
for token in model.generate(model.tokenize(sys.argv[3].encode()), temp=0):
    print(model.detokenize([token]), flush=True)
    break
"""
_SETTLE = 0.3  # seconds: llama.cpp's threads spin on for 0.1 s and more after their work
Found = dict[str, dict[str, list[float]]]  # test -> engine -> what each round measured


class Worker:
    """An engine's process; ``ask`` for one measurement."""

    def __init__(self, engine: str, path: str, args: argparse.Namespace) -> None:
        command = [interpreter(engine, args), str(HERE / "engines.py"), engine, path,
                   str(args.threads), str(args.depth)]  # fmt: skip
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment(engine, args),
        )  # fmt: skip
        self._answer(command)

    def _answer(self, what: object) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"peers.py: the engine's process ended during {what}.")
        return line

    def ask(self, test: str) -> float:
        assert self._process.stdin is not None
        time.sleep(_SETTLE)
        self._process.stdin.write(test + "\n")
        self._process.stdin.flush()
        return float(json.loads(self._answer(test)))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def interpreter(engine: str, args: argparse.Namespace) -> str:
    return args.peer_python if args.peer_python and engine != "edgellm" else sys.executable


def environment(engine: str, args: argparse.Namespace) -> dict[str, str]:
    ours = args.target and engine == "edgellm"
    return {**os.environ, "EDGELLM_TARGET": args.target} if ours else dict(os.environ)


def measure(path: str, args: argparse.Namespace) -> Found:
    """All rounds of the tests that run in the engines' processes."""
    tests = ["prefill", "decode"]
    tests += ["batch", "answers"] if args.batch else []
    tests += ["deep prefill", "deep decode"] if args.depth else []
    workers = {engine: Worker(engine, path, args) for engine in ENGINES}
    for test in tests:  # once without counting: pages, caches, the tokens of the depth
        for worker in workers.values():
            worker.ask(test)
    tests += ["decode, a core busy"] if args.busy else []
    found: Found = {test: {engine: [] for engine in ENGINES} for test in tests}
    for i in range(args.rounds):
        order = ENGINES if i % 2 == 0 else ENGINES[::-1]  # nobody is always first
        for test in tests:
            busy = keep_a_core_busy() if "busy" in test else None
            for engine in order:
                found[test][engine].append(workers[engine].ask(test.split(",")[0]))
            if busy is not None:
                busy.kill()
                busy.wait()
    found["memory, MB"] = {e: [workers[e].ask("memory") / 1e6] for e in ENGINES}
    for worker in workers.values():
        worker.close()
    return found


def keep_a_core_busy() -> subprocess.Popen[bytes]:
    """A process that computes on the last core that this one may use."""
    core = max(os.sched_getaffinity(0))
    busy = subprocess.Popen([sys.executable, "-c", BUSY, str(core)])
    time.sleep(0.3)
    return busy


def measure_start(path: str, args: argparse.Namespace) -> Found:
    """Seconds from the start of a process to the first byte of its answer, files in the cache."""
    threads = str(args.threads)
    commands = {
        "edgellm": [sys.executable, "-m", "edgellm", "run", path, "-p", PROMPT, "--raw", "-n", "1",
                    "--temp", "0", "-t", threads],
        "llama.cpp": [interpreter("llama.cpp", args), "-c", START, path, threads, PROMPT],
    }  # fmt: skip
    found: Found = {"start, s": {engine: [] for engine in ENGINES}}
    for i in range(args.rounds + 1):
        for engine in ENGINES if i % 2 == 0 else ENGINES[::-1]:
            started = time.perf_counter()
            process = subprocess.Popen(
                commands[engine], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                env=environment(engine, args),
            )  # fmt: skip
            assert process.stdout is not None
            first = process.stdout.read(1)
            seconds = time.perf_counter() - started
            process.stdout.read()
            if not first or process.wait():
                raise SystemExit(f"peers.py: {engine} printed no token (--start).")
            if i:  # the first filled the caches
                found["start, s"][engine].append(seconds)
    return found


def report(path: str, found: Found, args: argparse.Namespace) -> None:
    ours_is = f"edgellm ({args.target})" if args.target else "edgellm"
    print(f"{os.path.basename(path)}, {args.threads} threads, {args.rounds} rounds in turns")
    print(f"| {'test':22} | {ours_is:>16} | {'llama.cpp':>9} | {'ratio (95 %)':>18} |")
    print(f"|{'-' * 24}|{'-' * 17}:|{'-' * 10}:|{'-' * 19}:|")
    for test, by_engine in found.items():
        ours, theirs = (by_engine[engine] for engine in ENGINES)
        digits = 2 if test.endswith(", s") else 1
        print(
            f"| {named(test, args):22} | {statistics.median(ours):16.{digits}f} "
            f"| {statistics.median(theirs):9.{digits}f} | {median_of_ratios(ours, theirs)!s:>18} |"
        )
    if args.busy:
        for engine in ENGINES:
            busy, quiet = (found[t][engine] for t in ("decode, a core busy", "decode"))
            kept = median_of_ratios(busy, quiet)
            print(f"{engine} with a core busy: {kept} of its quiet speed")


def named(test: str, args: argparse.Namespace) -> str:
    return {
        "prefill": "prefill 256",
        "batch": "8 sequences",
        "answers": "8 answers",
        "deep prefill": f"prefill 256 @ d{args.depth}",
        "deep decode": f"decode @ d{args.depth}",
    }.get(test, test)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], epilog="Needs llama-cpp-python."
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", action="store_true", help="also 8 sequences together")
    parser.add_argument("--depth", type=int, default=0, help="also behind so many tokens")
    parser.add_argument("--busy", action="store_true", help="also with one core kept busy")
    parser.add_argument("--start", action="store_true", help="also start to first token")
    parser.add_argument("--target", default="", help="EDGELLM_TARGET for our side")
    parser.add_argument("--peer-python", help="the interpreter that has llama-cpp-python")
    parser.add_argument("--json", metavar="FILE", help="keep every measurement")
    args = parser.parse_args()
    if args.peer_python and not os.access(args.peer_python, os.X_OK):
        parser.error(f"--peer-python: {args.peer_python} is no interpreter")
    kept = {}
    for path in args.models:
        found = measure(path, args)
        if args.start:
            found |= measure_start(path, args)
        report(path, found, args)
        kept[os.path.basename(path)] = found
    if args.json:
        Path(args.json).write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
