"""What the engine counts while it runs: plain numbers, added up without locks by its one thread.

Readers in other threads see each number as it was a moment ago. Names follow vLLM's metrics, so
that the server can offer them under those names.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING, Any

from edgellm.speculative.statistics import SpeculationCounts

if TYPE_CHECKING:
    from edgellm.sequence import Sequence

SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5,
    10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Histogram:
    """Counts of values up to each of ``bounds``, and of all above the last."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts = bounds, [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def n(self) -> int:
        return sum(self.counts)

    def quantile(self, q: float) -> float:
        """The bound below which a share q of the values lies; 0 without values."""
        wanted, seen = q * self.n, 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            seen += count
            if seen and seen >= wanted:
                return bound
        return self.bounds[-1] if self.n else 0.0


class Metrics:
    """Fed by the engine's loop. Times are seconds."""

    def __init__(self) -> None:
        self.prompt_tokens = 0  # of requests that were begun
        self.cached_tokens = 0  # of these, what an earlier request had computed
        self.generation_tokens = 0
        self.prefill_tokens_computed = 0  # also what preempted requests computed again
        self.decode_tokens_computed = 0
        self.steps = 0
        self.finished: Counter[str] = Counter()  # by finish_reason
        self.preemptions: Counter[str] = Counter()  # by cause
        self.stalls = 0
        self.step_errors = 0  # exceptions that no request was to blame for
        self.faults = 0  # accounts of the cache that were wrong when nothing ran
        self.schedule_seconds = self.forward_seconds = self.update_seconds = 0.0
        self.speculation = SpeculationCounts()
        self.time_to_first_token = Histogram(SECONDS)
        self.inter_token_latency = Histogram(SECONDS)
        self.e2e_request_latency = Histogram(SECONDS)
        self.request_queue_time = Histogram(SECONDS)
        self.step_time = Histogram(SECONDS)
        self.request_prompt_tokens = Histogram(TOKENS)
        self.request_generation_tokens = Histogram(TOKENS)
        self.iteration_tokens = Histogram(TOKENS)

    def began(self, sequence: Sequence) -> None:
        """A request was admitted for the first time."""
        self.prompt_tokens += sequence.n_prompt
        self.cached_tokens += sequence.n_cached
        self.request_queue_time.observe(sequence.started - sequence.arrived)
        self.request_prompt_tokens.observe(sequence.n_prompt)

    def preempted(self, cause: str) -> None:
        self.preemptions[cause] += 1

    def token(self, sequence: Sequence, now: float) -> None:
        """A request got its next token."""
        self.generation_tokens += 1
        if sequence.last_token:
            self.inter_token_latency.observe(now - sequence.last_token)
        else:
            self.time_to_first_token.observe(now - sequence.arrived)
        sequence.last_token = now

    def ended(self, sequence: Sequence) -> None:
        self.finished[sequence.finish_reason or "error"] += 1
        self.e2e_request_latency.observe(sequence.finished - sequence.arrived)
        self.request_generation_tokens.observe(len(sequence.tokens) - sequence.n_prompt)

    def step(
        self, n_decode: int, n_prefill: int, schedule: float, forward: float, update: float
    ) -> None:
        """A step of so many generated and prompt tokens, and where its time went."""
        self.steps += 1
        self.decode_tokens_computed += n_decode
        self.prefill_tokens_computed += n_prefill
        self.iteration_tokens.observe(n_decode + n_prefill)
        self.schedule_seconds += schedule
        self.forward_seconds += forward
        self.update_seconds += update
        self.step_time.observe(schedule + forward + update)

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that did not have to be computed."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def snapshot(self) -> dict[str, Any]:
        """Plain numbers; of histograms the median, 95 % and 99 % bounds, sum and count."""
        found: dict[str, Any] = {"hit_rate": self.hit_rate}
        for name, value in vars(self).items():
            if isinstance(value, Histogram):
                quantiles = {f"p{q}": value.quantile(q / 100) for q in (50, 95, 99)}
                found[name] = {"n": value.n, "sum": value.sum, **quantiles}
            elif isinstance(value, SpeculationCounts):
                found[name] = value.snapshot()
            else:
                found[name] = dict(value) if isinstance(value, Counter) else value
        return found
