"""Measuring a model's speed, and how far it is from what the machine allows.

Tests are llama-bench's: ``pp512`` computes a prompt of 512 tokens, ``tg128`` 128 tokens one by one,
``@ d4096`` behind 4096 that are in the cache already; ``tg8 x4`` takes 8 steps of 4 sequences
together. Only the engine's steps are timed, without sampling and text. Repetitions go through all
tests in turn, and the memory's bandwidth and the dot-product peak are sampled between the steps, so
that a noisy machine is noisy for all of them alike.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from edgellm.bootstrap import mean_deviation
from edgellm.context import ContextTooLong
from edgellm.cost import Cost, step_cost
from edgellm.energy import energy_joules
from edgellm.errors import EdgeLLMError
from edgellm.forecast import Forecast
from edgellm.kernels.cpu import targets
from edgellm.kernels.cpu.cores import cpu_name
from edgellm.kernels.cpu.kv_types import BLOCK
from edgellm.kernels.cpu.peaks import Peaks
from edgellm.kernels.cpu.store import KernelStore
from edgellm.llm import LLM
from edgellm.lora import Adapter
from edgellm.memory import STEP_TOKENS, peak_resident_bytes, resident_bytes
from edgellm.offload import CPU, Options
from edgellm.quant.gguf import GGUF
from edgellm.sampling import SamplingParams
from edgellm.sequence import Sequence
from edgellm.speeds import Speed, Speeds, measure_device
from edgellm.steps import Steps, arbitrary_tokens

WIDTH_STEPS = 8  # steps of a test of several sequences together
_GENERATED = 64  # tokens, for what an engine does beside kernels
_PROFILES = 5  # of which the quickest counts
_NEAR = 0.5  # of a limit: it is what holds the kernels back
_SAMPLE_EVERY = 0.2  # seconds between samples of the machine's limits


@dataclass(frozen=True)
class Workload:
    """A prompt of ``n_prompt`` tokens, or ``n_gen`` steps of ``n_seqs`` sequences, each behind
    ``n_depth`` tokens."""

    n_prompt: int = 0
    n_gen: int = 0
    n_depth: int = 0
    n_seqs: int = 1
    is_width: bool = False  # one of a series of numbers of sequences

    @property
    def name(self) -> str:
        what = f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"
        depth = f" @ d{self.n_depth}" if self.n_depth else ""
        return what + depth + (f" x{self.n_seqs}" if self.is_width else "")

    @property
    def n_tokens(self) -> int:
        """Tokens that are computed."""
        return self.n_prompt or self.n_gen * self.n_seqs

    @property
    def n_positions(self) -> int:
        """Of each sequence."""
        return self.n_depth + (self.n_prompt or self.n_gen)

    def costs(self, llm: LLM) -> list[Cost]:
        """Of each step."""
        steps, at = [], self.n_depth
        while at < self.n_positions:
            n = min(self.n_positions - at, STEP_TOKENS) if self.n_prompt else 1
            n_out = 0 if self.n_prompt and at + n < self.n_positions else self.n_seqs
            steps.append(step_cost(llm.graph, llm.type_k, llm.type_v,
                                   [(n, at)] * self.n_seqs, n_out))  # fmt: skip
            at += n
        return steps


def workloads(
    prompts: Iterable[int], gens: Iterable[int], depths: Iterable[int], widths: Iterable[int]
) -> list[Workload]:
    """All tests asked for, in the order they are reported; a size of 0 is none."""
    tests = []
    for depth in depths:
        tests += [Workload(n_prompt=n, n_depth=depth) for n in prompts if n]
        tests += [Workload(n_gen=n, n_depth=depth) for n in gens if n]
    return tests + [Workload(n_gen=WIDTH_STEPS, n_seqs=n, is_width=True) for n in widths]


@dataclass
class Samples:
    """What repetitions of one test came to."""

    seconds: list[float] = field(default_factory=list)  # of each repetition
    steps: list[list[float]] = field(default_factory=list)  # seconds of the steps of each
    read: list[float] = field(default_factory=list)  # bytes/s of the plain loop meanwhile
    dot: list[float] = field(default_factory=list)  # multiply-adds/s of the plain loop meanwhile
    joules: list[float] = field(default_factory=list)  # of each repetition, where it is known


class Bench:
    """Measures tests of one model. ``say`` is told what is being done."""

    def __init__(self, llm: LLM, say: Callable[[str], None] = lambda text: None) -> None:
        self.llm, self._say = llm, say
        self._peak_bytes = peak_resident_bytes()  # of loading; our own buffer is not counted
        self._steps = Steps(llm)
        self._peaks = Peaks(llm.runner.program.team, KernelStore())
        # of the devices that have layers: with them, limits are of all places in turn
        self._devices = {name: measure_device(d) for name, d in llm.placement.used.items()}
        self._sequences: dict[tuple[int, int], Sequence] = {}  # by depth and number
        self._room: dict[int, int] = {}  # positions that sequences at a depth need
        self._sampled = self._joules_of_samples = 0.0

    @staticmethod
    def limits_for(tests: list[Workload]) -> dict[str, Any]:
        """Arguments of LLM with which it can run the tests."""
        n_seqs: dict[int, int] = {}
        for test in tests:
            n_seqs[test.n_depth] = max(n_seqs.get(test.n_depth, 0), test.n_seqs)
        n_ctx = max([_GENERATED + 1, *(test.n_positions for test in tests)])
        return {"n_ctx": n_ctx, "max_num_seqs": 1 + sum(n_seqs.values())}

    def run(self, tests: list[Workload], repetitions: int) -> list[dict[str, Any]]:
        """One row for each test; see ``row``."""
        for test in tests:
            self._room[test.n_depth] = max(self._room.get(test.n_depth, 0), test.n_positions)
        samples = {test: Samples() for test in tests}
        for test in tests:  # once without timing: pages and caches
            self._say(f"warming up: {test.name}")
            self._measure(test, Samples())
        for i in range(repetitions):
            for test in tests:
                self._say(f"{test.name}: {i + 1} of {repetitions}")
                self._measure(test, samples[test])
        rows = []
        for test in tests:
            self._say(f"{test.name}: where the time goes")
            rows.append(self.row(test, samples[test], self._shares(test)))
        self._say("generating text")
        beside = {"greedy": self._beside_kernels(0.0), "sampled": self._beside_kernels(0.8)}
        for row in rows:
            row["peak_memory"], row["beside_kernels"] = self._peak_bytes, beside
        return rows

    # ---- one test -----------------------------------------------------------------------------

    def _at(self, test: Workload) -> list[Sequence]:
        """The test's sequences with n_depth tokens computed."""
        found = []
        for i in range(test.n_seqs):
            at = (test.n_depth, i)
            sequence = self._sequences.get(at)
            if sequence is None or not self._steps.cut(sequence, test.n_depth):
                if sequence is not None:
                    self._steps.release(sequence)
                sequence = self._sequences[at] = self._steps.open(self._room[test.n_depth])
                self._steps.prefill(sequence, test.n_depth)
            found.append(sequence)
        return found

    def _measure(self, test: Workload, samples: Samples) -> None:
        sequences = self._at(test)
        times: list[float] = []
        self._sample(samples)
        before, beside = energy_joules(), self._joules_of_samples
        if test.n_prompt:
            times = self._steps.prefill(sequences[0], test.n_prompt)
        for _ in range(test.n_gen):
            times.append(self._steps.decode(sequences))
            if time.perf_counter() - self._sampled > _SAMPLE_EVERY:
                self._sample(samples)
        after, beside = energy_joules(), self._joules_of_samples - beside
        self._sample(samples)
        samples.seconds.append(sum(times))
        samples.steps.append(times)
        if before is not None and after is not None and after > before:  # the counter may wrap
            samples.joules.append(after - before - beside)
        held = resident_bytes() - self._peaks.buffer.nbytes
        self._peak_bytes = max(self._peak_bytes, held)

    def _sample(self, samples: Samples) -> None:
        before = energy_joules()
        samples.read.append(self._peaks.read())
        samples.dot.append(self._peaks.dot())
        if before is not None:
            self._joules_of_samples += (energy_joules() or before) - before
        self._sampled = time.perf_counter()

    def _shares(self, test: Workload) -> dict[str, float]:
        """Shares of a step's time: one thread's in linear, attention, other ops and waiting, and
        that of devices."""
        sequences = self._at(test)
        if test.n_prompt:
            self._steps.prefill(sequences[0], test.n_prompt)
            n_tokens, n_out = (test.n_prompt - 1) % STEP_TOKENS + 1, 1
        else:
            self._steps.decode(sequences)
            n_tokens = n_out = test.n_seqs
        program, devices = self.llm.runner.program, self.llm.runner.devices.values()
        before = program.seconds, sum(d.seconds for d in devices)
        profiles = [self._steps.profile(n_tokens, n_out) for _ in range(_PROFILES)]
        stages = min(profiles, key=lambda p: sum(wait + work for _, wait, work in p))
        whole = program.seconds - before[0]
        on_gpu = (sum(d.seconds for d in devices) - before[1]) / whole
        graph = program.graph
        kinds = {op.label: op.kind for op in graph.ops}
        cycles: dict[str, float] = defaultdict(float)
        for label, waiting, working in stages:
            kind = kinds.get(label, "")
            name = "linear" if kind in ("linear", "moe_linear") else kind
            cycles[name if name in ("linear", "attention") else "other"] += working
            cycles["waiting"] += waiting
        total = sum(cycles.values()) or 1.0
        mine = 1 - on_gpu
        shares = {k: mine * cycles[k] / total for k in ("linear", "attention", "other", "waiting")}
        return shares | ({"GPU": on_gpu} if devices else {})

    def _beside_kernels(self, temperature: float) -> float:
        """The share of a generated token's time in which no kernel runs: sampling, text and
        bookkeeping."""
        params = SamplingParams(
            max_tokens=_GENERATED, temperature=temperature, seed=1, ignore_eos=True
        )
        pieces = self.llm.stream(arbitrary_tokens(1, self.llm.n_vocab), params)
        next(pieces)  # with the prompt, and what is built on first use
        program = self.llm.runner.program
        before, started = program.seconds, time.perf_counter()
        for _ in pieces:
            pass
        return 1 - (program.seconds - before) / (time.perf_counter() - started)

    def _of_floors(
        self, test: Workload, n_steps: int, seconds: float, read: float, dot: float
    ) -> tuple[float, float]:
        """Shares of the time that memory and that arithmetic need at least, place after place."""
        llm = self.llm
        speeds = Speeds({CPU: Speed(read, dot), **self._devices})
        plan = llm.placement.plan
        forecast = Forecast(llm.graph, plan, llm.type_k, llm.type_v, speeds)
        memory = n_steps * forecast.step_seconds(test.n_seqs, test.n_depth)
        return memory / seconds, forecast.dot_seconds(test.n_tokens) / seconds

    # ---- the report ---------------------------------------------------------------------------

    def row(self, test: Workload, samples: Samples, shares: dict[str, float]) -> dict[str, Any]:
        """llama-bench's fields and ours. Fractions of the limits are of medians, so that a step
        from which the host took the core does not count."""
        speeds = [test.n_tokens / s for s in samples.seconds]
        avg_ts, stddev_ts = mean_deviation(speeds)
        avg_s, stddev_s = mean_deviation(samples.seconds)
        costs = test.costs(self.llm)
        # a decode step is nearly the same every time; a prompt's steps are not
        if test.n_gen:
            seconds = len(costs) * statistics.median(s for rep in samples.steps for s in rep)
        else:
            seconds = statistics.median(samples.seconds)
        read, dot = statistics.median(samples.read), statistics.median(samples.dot)
        of_bandwidth = sum(c.n_bytes for c in costs) / seconds / read
        of_dot = sum(c.dots for c in costs) / seconds / dot
        if self._devices:
            of_bandwidth, of_dot = self._of_floors(test, len(costs), seconds, read, dot)
        joules = statistics.median(samples.joules) if samples.joules else 0.0
        return {
            "test": test.name,
            "n_prompt": test.n_prompt,
            "n_gen": test.n_gen,
            "n_depth": test.n_depth,
            "n_seqs": test.n_seqs,
            "is_width": test.is_width,
            "avg_ns": round(1e9 * avg_s),
            "stddev_ns": round(1e9 * stddev_s),
            "avg_ts": avg_ts,
            "stddev_ts": stddev_ts,
            "samples_ns": [round(1e9 * s) for s in samples.seconds],
            "samples_ts": speeds,
            "step_ms": 1e3 * seconds / len(costs),
            "of_bandwidth": of_bandwidth,
            "of_dot_peak": of_dot,
            "read_bandwidth": read,
            "dot_peak": dot,
            "bottleneck": bottleneck(shares, of_bandwidth, of_dot),
            "shares": shares,
            "tokens_per_joule": test.n_tokens / joules if joules else None,
        }


def bottleneck(shares: dict[str, float], of_bandwidth: float, of_dot: float) -> str:
    """What to make faster: the largest share of the time; for matrices the limit that is near, and
    when none is, what stands between codes and products."""
    largest = max(shares, key=lambda name: shares[name])
    if largest == "linear":
        if max(of_bandwidth, of_dot) < _NEAR:
            return "unpacking"
        return "memory" if of_bandwidth >= of_dot else "dot products"
    return {"other": "row ops", "waiting": "waiting threads"}.get(largest, largest)


def machine(llm: LLM) -> dict[str, Any]:
    """What was measured on which machine: fields that all rows of a report share."""
    from edgellm import __version__

    with GGUF(llm.path) as file:
        tensors = list(file.tensors.values())
        sizes: Counter[str] = Counter()
        for tensor in tensors:
            sizes[str(tensor.type)] += tensor.n_bytes
        heaviest = max(sizes, key=lambda name: sizes[name])
        return {
            "build": f"edgellm {__version__}",
            "cpu_info": cpu_name(),
            "target": targets.current().name,
            "model_filename": os.path.basename(llm.path),
            "model_type": f"{file.architecture} {heaviest}",
            "model_size": sum(tensor.n_bytes for tensor in tensors),
            "model_n_params": sum(math.prod(tensor.shape) for tensor in tensors),
            "n_threads": llm.n_threads,
            "n_gpu_layers": llm.placement.plan.n_gpu_layers,
            "gpu_info": ", ".join(d.name for d in llm.placement.used.values()),
            "placement": llm.placement_report(),
            "type_k": llm.type_k,
            "type_v": llm.type_v,
            "kernels": {r["type"]: r["kernel"] for r in llm.report()},
        }


def bench(
    path: str, tests: list[Workload], repetitions: int = 5, n_threads: int | None = None,
    cpu_mask: str | None = None, say: Callable[[str], None] = lambda text: None,
    type_k: str = "f16", type_v: str = "f16", block_size: int = BLOCK,
    offload: Options | None = None, lora: Iterable[Adapter] = (),
) -> list[dict[str, Any]]:  # fmt: skip
    """Load a model and measure it: one row for each test."""
    if not tests:
        raise EdgeLLMError("There is nothing to measure: all of -p, -n and --batch are 0.")
    limits = Bench.limits_for(tests)
    try:
        llm = LLM(
            path, n_threads=n_threads, cpu_mask=cpu_mask, type_k=type_k, type_v=type_v,
            block_size=block_size, progress=say, offload=offload, lora=lora, **limits,
        )  # fmt: skip
    except ContextTooLong as error:
        raise EdgeLLMError(
            f"The longest test needs {limits['n_ctx']:,} positions and {error.n_affordable:,} fit "
            "into memory: ask for less with -d, -p or -n."
        ) from None
    with llm:
        if llm.n_ctx < limits["n_ctx"]:  # learned positions end a model's context
            raise EdgeLLMError(
                f"The longest test needs {limits['n_ctx']:,} positions and this model has "
                f"{llm.n_ctx:,}: ask for less with -d, -p or -n."
            )
        shared = machine(llm)
        return [{**shared, **row} for row in Bench(llm, say).run(tests, repetitions)]
