"""What a step costs beside its kernels: scheduling, the cache's accounts, sampling and text.

    python benchmarks/scheduler.py

The engine's loop runs over a runner that computes nothing: logits are random and the same at every
step. Short requests of 30 tokens (a few have long prompts, so that they are chunked) come as fast
as there are seats, so that one comes and goes in nearly every step; requests of 600 tokens show a
step in which nobody does. Microseconds of a step by part: "schedule" is everything before the
kernels, "accounts" what the runner asks of the cache, "update" sampling and text. They have to stay
below 200 us at 32 sequences.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import time
from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm import SamplingParams
from edgellm.kv_cache import CacheGroup, KVCache
from edgellm.loop import Loop
from edgellm.metrics import Metrics
from edgellm.runner import Run
from edgellm.scheduler import Scheduler, SchedulerConfig
from edgellm.sequence import Sequence
from edgellm.step_time import StepTime

BLOCK, N_CTX, STEP_TOKENS = 32, 2048, 256
N_VOCAB = 1000  # small: sampling is not what is measured
# seats, tokens of an answer, requests that are always queued, window of a second cache group
CASES = (
    (8, 600, 0, None), (32, 600, 0, None), (128, 600, 0, None),
    (8, 30, 0, None), (32, 30, 0, None), (128, 30, 0, None),
    (32, 30, 1000, None), (32, 600, 0, 512), (32, 30, 0, 512),
)  # fmt: skip
LIMIT = 200.0  # microseconds at 32 sequences


class NoText:
    """Decoder of a tokenizer that is not there."""

    eog: frozenset[int] = frozenset()

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class FakeRunner:
    """Makes room and keeps the accounts as the real one; its logits are always the same."""

    def __init__(self, cache: KVCache, max_seqs: int) -> None:
        self.cache = cache
        rng = np.random.default_rng(0)
        self._logits = rng.standard_normal((max_seqs, N_VOCAB)).astype(np.float32)
        self.commit_seconds = 0.0

    def forward(self, runs: list[Run]) -> NDArray[np.float32]:
        begun = time.perf_counter()
        for run in runs:
            assert self.cache.extend(run.sequence, run.n_tokens)
        for run in runs:
            self.cache.commit(run.sequence, run.n_tokens)
        self.commit_seconds += time.perf_counter() - begun
        return self._logits[: sum(run.wanted == "last" for run in runs)]


def make(max_seqs: int, window: int | None) -> tuple[Loop, FakeRunner, Metrics]:
    windows = [None] if window is None else [None, window]
    groups = [
        CacheGroup(w, max_seqs * N_CTX // BLOCK,
                   np.zeros((max_seqs, N_CTX // BLOCK), np.int32)) for w in windows
    ]  # fmt: skip
    cache = KVCache(groups, BLOCK, STEP_TOKENS, max_seqs=max_seqs)
    metrics, step_time = Metrics(), StepTime(1e-5)
    config = SchedulerConfig(max_seqs, STEP_TOKENS, max_num_batched_tokens=STEP_TOKENS)
    scheduler = Scheduler(cache, config, step_time, metrics)
    runner = FakeRunner(cache, max_seqs)
    tokenizer: Any = NoText()
    loop = Loop(runner, scheduler, step_time, metrics, lambda: tokenizer, N_CTX)  # type: ignore[arg-type]
    return loop, runner, metrics


def request(rng: np.random.Generator, shared: list[int], n_output: int) -> Sequence:
    """A quarter begins like others; one of sixteen is long."""
    n = int(rng.integers(400, 900)) if rng.random() < 1 / 16 else int(rng.integers(8, 40))
    head = shared if rng.random() < 0.25 else []
    decoder: Any = NoText()
    params = SamplingParams(max_tokens=n_output, temperature=0, ignore_eos=True)
    return Sequence([*head, *rng.integers(0, N_VOCAB, n).tolist()], params, decoder)


def serve(
    max_seqs: int, n_requests: int, window: int | None = None, n_waiting: int = 0,
    n_output: int = 30,
) -> dict[str, float]:  # fmt: skip
    """Microseconds of a step, by part; ``n_waiting`` requests are always queued."""
    loop, runner, metrics = make(max_seqs, window)
    rng = np.random.default_rng(1)
    shared = rng.integers(0, N_VOCAB, 128).tolist()
    requests = [request(rng, shared, n_output) for _ in range(n_requests + n_waiting)]
    n_ended = 0
    while n_ended < n_requests:
        while requests and loop.scheduler.n_waiting < max(n_waiting, max_seqs // 8):
            sequence = requests.pop()
            sequence.arrived = time.perf_counter()
            loop.scheduler.add(sequence)
        loop.step()
        n_ended = sum(metrics.finished.values())
    n = metrics.steps
    tokens = (metrics.decode_tokens_computed + metrics.prefill_tokens_computed) / n
    found = {
        "schedule": metrics.schedule_seconds, "accounts": runner.commit_seconds,
        "update": metrics.update_seconds,
    }  # fmt: skip
    return {"steps": n, "tokens": tokens, **{k: 1e6 * v / n for k, v in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-n", type=int, default=1000, help="requests")
    parser.add_argument("--profile", action="store_true", help="which functions take the time")
    given = parser.parse_args()
    parts = ("schedule", "accounts", "update")
    print(" ".join(f"{head:>9}" for head in ("seats", "output", "queued", "window", "tok/step",
                                            *parts, "all us")))  # fmt: skip
    for max_seqs, n_output, n_waiting, window in CASES:
        n = given.n if n_output == 30 else max_seqs
        runs = [serve(max_seqs, n, window, n_waiting, n_output) for _ in range(3)]
        best = min(runs, key=lambda run: sum(run[part] for part in parts))
        whole = sum(best[part] for part in parts)
        cells = [max_seqs, n_output, n_waiting, window or "-",
                 *(f"{best[k]:.1f}" for k in ("tokens", *parts)), f"{whole:.1f}"]  # fmt: skip
        is_over = max_seqs == 32 and whole > LIMIT
        print(" ".join(f"{cell:>9}" for cell in cells) + " !" * is_over)
    if given.profile:
        _profile(given.n)


def _profile(n: int) -> None:
    profile = cProfile.Profile()
    profile.enable()
    found = serve(32, n)
    profile.disable()
    shares: dict[str, float] = defaultdict(float)
    stats: Any = pstats.Stats(profile, stream=io.StringIO())
    for (file, _, name), (_, _, own, _, _) in stats.stats.items():
        shares[f"{file.rsplit('/', 1)[-1]}:{name}"] += own
    total = sum(shares.values())
    print(f"32 seats, {found['steps']:.0f} steps: own time of functions, profiled")
    for name, own in sorted(shares.items(), key=lambda item: -item[1])[:20]:
        print(f"{100 * own / total:5.1f} % {1e6 * own / found['steps']:7.1f} us  {name}")


if __name__ == "__main__":
    main()
