"""The engines that peers.py compares: each in a process of its own, one measurement at a time.

    python engines.py ENGINE MODEL THREADS DEPTH

reads names of tests from stdin and answers each with a line of JSON: tokens/s of ``prefill`` (256
tokens from an empty cache), ``decode`` (32 tokens one by one behind those), ``batch`` (8 sequences,
32 tokens each), ``answers`` (the same as requests, scheduled, sampled and in text; llama.cpp: as
``batch``), ``deep prefill`` and ``deep decode`` (the same behind DEPTH tokens), bytes of
``memory`` (the most that was resident). Timed is otherwise the evaluation alone, without sampling
and text.
"""

from __future__ import annotations

import ctypes
import json
import resource
import sys
import time
from collections.abc import Callable

PREFILL, DECODE, BATCH, BEFORE_BATCH = 256, 32, 8, 16


def tokens(n: int) -> list[int]:
    """What edgellm.steps takes, for vocabularies of 30,100 and more."""
    return [100 + (7919 * i + 13) % 30_000 for i in range(n)]


class EdgeLLM:
    def __init__(self, path: str, threads: int, depth: int) -> None:
        from edgellm import LLM
        from edgellm.steps import Steps

        longest = max(depth, PREFILL) + PREFILL
        self._llm = LLM(path, n_ctx=longest, n_threads=threads, max_num_seqs=2 * BATCH + 3)
        self._steps = Steps(self._llm)
        self._open: dict[tuple[int, int], object] = {}

    def _at(self, depth: int, number: int = 0) -> object:
        """A sequence with ``depth`` tokens in the cache."""
        key = depth, number
        sequence = self._open.get(key)
        if sequence is None or not self._steps.cut(sequence, depth):
            if sequence is not None:
                self._steps.release(sequence)
            sequence = self._open[key] = self._steps.open(depth + PREFILL)
            self._steps.prefill(sequence, depth)
        return sequence

    def prefill(self, depth: int) -> float:
        return PREFILL / sum(self._steps.prefill(self._at(depth), PREFILL))

    def decode(self, depth: int) -> float:
        sequence = self._at(depth)
        return DECODE / sum(self._steps.decode([sequence]) for _ in range(DECODE))

    def batch(self) -> float:
        sequences = [self._at(BEFORE_BATCH, i) for i in range(BATCH)]
        return BATCH * DECODE / sum(self._steps.decode(sequences) for _ in range(DECODE))

    def answers(self) -> float:
        """From where all 8 answers have begun to where the first is complete."""
        from edgellm import RequestOptions, SamplingParams

        params = SamplingParams(max_tokens=DECODE + BATCH, temperature=0, ignore_eos=True)
        options = RequestOptions(priority="batch")  # as LLM.generate does with a list
        requests = [
            self._llm.submit([i, *tokens(BEFORE_BATCH)], params, options)[0] for i in range(BATCH)
        ]

        def advance(least: int) -> int:
            while any(len(a.tokens) < a.n_prompt + least for a in requests):
                if any(a.finish_reason for a in requests):
                    break
                self._llm.step()
            return sum(len(a.output) for a in requests)

        before, started = advance(1), time.perf_counter()
        n = advance(DECODE + BATCH) - before
        seconds = time.perf_counter() - started
        for request in requests:
            self._llm.forget(request)
        return n / seconds


class LlamaCpp:
    """A context for each kind of test: the cells of a cache are shared out among its sequences."""

    def __init__(self, path: str, threads: int, depth: int) -> None:
        import llama_cpp as c

        self.c, self._threads = c, threads
        self._quiet = c.llama_log_callback(lambda *a: None)  # kept: C calls it later
        c.llama_log_set(self._quiet, ctypes.c_void_p(0))
        c.llama_backend_init()
        self._model = c.llama_model_load_from_file(path.encode(), c.llama_model_default_params())
        self._batch = c.llama_batch_init(512, 0, BATCH)
        self._contexts: dict[int, object] = {}
        self._filled: dict[int, int] = {}

    def _context(self, depth: int, n_seqs: int = 1) -> object:
        if depth not in self._contexts:
            params = self.c.llama_context_default_params()
            params.n_ctx = (depth + PREFILL) * n_seqs
            params.n_batch = params.n_ubatch = 512
            params.n_seq_max = n_seqs
            params.n_threads = params.n_threads_batch = self._threads
            self._contexts[depth] = self.c.llama_init_from_model(self._model, params)
        return self._contexts[depth]

    def _evaluate(self, context: object, rows: list[tuple[int, int, int, bool]]) -> float:
        """Seconds for rows of (token, position, sequence, logits wanted)."""
        b = self._batch
        b.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            b.token[i], b.pos[i], b.n_seq_id[i] = token, position, 1
            b.seq_id[i][0], b.logits[i] = sequence, wanted
        started = time.perf_counter()
        if self.c.llama_decode(context, b) != 0:
            raise RuntimeError("llama_decode failed")
        self.c.llama_get_logits_ith(context, -1)  # waits for the result
        return time.perf_counter() - started

    def _fill(self, context: object, sequence: int, first: int, n: int) -> float:
        """Seconds for n tokens of a sequence from position ``first`` on, 256 at a time."""
        seconds = 0.0
        for start in range(first, first + n, 256):
            end = min(start + 256, first + n)
            rows = [(t, start + i, sequence, start + i == first + n - 1)
                    for i, t in enumerate(tokens(end)[start:])]  # fmt: skip
            seconds += self._evaluate(context, rows)
        return seconds

    def _at(self, depth: int, n_seqs: int = 1) -> object:
        context = self._context(depth, n_seqs)
        memory = self.c.llama_get_memory(context)
        kept = depth in self._filled and all(
            self.c.llama_memory_seq_rm(memory, s, depth, -1) for s in range(n_seqs)
        )
        if not kept:
            self.c.llama_memory_clear(memory, True)
            for s in range(n_seqs):
                self._fill(context, s, 0, depth)
            self._filled[depth] = depth
        return context

    def prefill(self, depth: int) -> float:
        return PREFILL / self._fill(self._at(depth), 0, depth, PREFILL)

    def decode(self, depth: int) -> float:
        context, ids = self._at(depth), tokens(depth + DECODE)
        return DECODE / sum(
            self._evaluate(context, [(ids[i], i, 0, True)]) for i in range(depth, depth + DECODE)
        )

    def batch(self) -> float:
        context, ids = self._at(BEFORE_BATCH, BATCH), tokens(BEFORE_BATCH + DECODE)
        return BATCH * DECODE / sum(
            self._evaluate(context, [(ids[i], i, s, True) for s in range(BATCH)])
            for i in range(BEFORE_BATCH, BEFORE_BATCH + DECODE)
        )  # fmt: skip

    answers = batch


ENGINES: dict[str, Callable[[str, int, int], EdgeLLM | LlamaCpp]] = {
    "edgellm": EdgeLLM,
    "llama.cpp": LlamaCpp,
}


def memory() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return float(unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def main() -> None:
    name, path, threads, depth = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    engine = ENGINES[name](path, threads, depth)
    tests: dict[str, Callable[[], float]] = {
        "prefill": lambda: engine.prefill(0),
        "decode": lambda: engine.decode(PREFILL),
        "batch": lambda: engine.batch(),
        "answers": lambda: engine.answers(),
        "deep prefill": lambda: engine.prefill(depth),
        "deep decode": lambda: engine.decode(depth),
        "memory": memory,
    }
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(tests[line.strip()]()), flush=True)


if __name__ == "__main__":
    main()
