"""A server's day in one process: requests arrive, the engine serves them, every token is noted.

The clients' times are those of their plan, not of when the loop got round to them: what waits
behind a long step has waited. There is no network and no text, so whether an answer is streamed
makes no difference here.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from itertools import count
from typing import Any

from edgellm.errors import EdgeLLMError
from edgellm.llm import LLM
from edgellm.request_options import RequestOptions
from edgellm.sampling_params import SamplingParams
from edgellm.sequence import Sequence
from edgellm.serving_records import SLO, Record, Report, Run, summary
from edgellm.workloads import SECONDS, Ask, Maker, Speed, find, flood

SAMPLING = {"temperature": 0.0, "ignore_eos": True}  # the same work whatever the model says
_CALIBRATION = 192, 12  # tokens of a prompt, and of each of several answers
_NAP = 0.02  # seconds between looks at the clock while nothing is due


class Simulation:
    """Serves plans with one model, one after another. ``is_static``: a batch of as many requests
    as there are seats is filled again only when the last of it is finished."""

    def __init__(
        self, llm: LLM, is_static: bool = False, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self.llm, self._is_static, self._say = llm, is_static, say

    def run(self, asks: list[Ask], beside: str | None = None, until: float = math.inf) -> Run:
        """Serve a plan to its end. What is left when all requests but those of the priority
        ``beside`` are done, or after ``until`` seconds, is given up."""
        return _Service(self.llm, self._is_static, self._say, beside).run(asks, until)

    def forget(self, reuse: bool = True) -> None:
        """What was computed so far is of no use to what comes."""
        self.llm.runner.cache.start_anew(reuse)

    def measure_speed(self) -> Speed:
        """Of a prompt alone and of a full batch of answers."""
        n_prompt, n_answer = _CALIBRATION
        n_prompt = min(n_prompt, self.llm.n_ctx // 2)
        n_seqs = self.llm.max_num_seqs
        tokens = Maker(Speed(1, 1), self.llm.n_ctx, self.llm.n_vocab, 1).tokens
        params = SamplingParams(max_tokens=n_answer, **SAMPLING)  # type: ignore[arg-type]
        self.forget()
        self.llm.generate(tokens(n_prompt), params)  # pages and caches
        one = self.llm.generate(tokens(n_prompt), params)
        begun = time.perf_counter()
        self.llm.generate([tokens(4) for _ in range(n_seqs)], params)
        seconds = time.perf_counter() - begun
        self.forget()
        return Speed(one.timings["prompt_per_second"], n_seqs * n_answer / seconds)


class _Service:
    """One plan being served."""

    def __init__(
        self, llm: LLM, is_static: bool, say: Callable[[str], None], beside: str | None
    ) -> None:
        self._llm, self._is_static, self._say, self._beside = llm, is_static, say, beside
        self._n_left = 0  # requests that have to be done
        self._plan: list[tuple[float, int, Ask]] = []
        self._numbers = count()
        self._arrived: deque[Ask] = deque()
        self._active: dict[Sequence, tuple[Ask, Record]] = {}
        self._records: list[Record] = []
        self._begun = 0.0

    def run(self, asks: list[Ask], until: float) -> Run:
        metrics = self._llm.metrics
        before = _counts(metrics)
        for ask in asks:
            self._expect(ask)
        self._begun, said = time.perf_counter(), 0.0
        try:
            while self._n_left:
                now = self._now()
                if now > until:
                    break
                self._take_arrivals(now)
                if self._active:
                    self._llm.step()
                    self._collect()
                else:
                    time.sleep(max(0.0, min(_NAP, self._plan[0][0] - now)) if self._plan else 0)
                if now - said > 0.25:
                    said = now
                    n_left = len(self._plan) + len(self._arrived) + len(self._active)
                    self._say(f"{len(self._records)} done, {n_left} to do, {now:.0f} s")
        finally:
            seconds = self._now()
            for sequence, (_, record) in self._active.items():
                sequence.cancel()
                record.finish_reason = "abort"  # what it had until here is on record
                self._finish(sequence, record, seconds)
                self._llm.forget(sequence)
        counted = {name: value - before[name] for name, value in _counts(metrics).items()}
        return Run(self._records, seconds, counted)

    def _expect(self, ask: Ask) -> None:
        heapq.heappush(self._plan, (ask.at, next(self._numbers), ask))
        self._n_left += ask.priority != self._beside

    def _now(self) -> float:
        return time.perf_counter() - self._begun

    def _take_arrivals(self, now: float) -> None:
        while self._plan and self._plan[0][0] <= now:
            self._arrived.append(heapq.heappop(self._plan)[2])
        if self._is_static:
            if not self._active:
                for _ in range(min(self._llm.max_num_seqs, len(self._arrived))):
                    self._submit(self._arrived.popleft())
        else:
            while self._arrived:
                self._submit(self._arrived.popleft())
        for sequence, (ask, _) in self._active.items():
            if ask.cancel_after is not None and now >= ask.at + ask.cancel_after:
                sequence.cancel()

    def _submit(self, ask: Ask) -> None:
        params = SamplingParams(**{"max_tokens": ask.max_tokens, **SAMPLING, **ask.params})
        options = RequestOptions(priority=ask.priority, timeout=ask.timeout)
        record = Record(ask.kind, len(ask.prompt), ask.at, ask.priority, ask.turn)
        try:
            [sequence] = self._llm.submit(ask.prompt, params, options)
        except EdgeLLMError:
            record.finish_reason = "error"
            self._close(record, self._now())
            return
        sequence.arrived = self._begun + ask.at
        self._active[sequence] = ask, record

    def _collect(self) -> None:
        now = self._now()  # when a client could have seen what the step brought
        done = []
        for sequence, (_, record) in self._active.items():
            while sequence.pieces:
                if sequence.pieces.popleft().token is not None:
                    record.tokens.append(now)
            if sequence.finish_reason is not None:
                done.append(sequence)
        for sequence in done:
            ask, record = self._active.pop(sequence)
            record.finish_reason = sequence.finish_reason or "error"
            self._finish(sequence, record, now)
            if ask.then is not None and record.is_complete:
                following = ask.then(sequence.output)
                following.at = now
                self._expect(following)

    def _finish(self, sequence: Sequence, record: Record, now: float) -> None:
        if sequence.started:
            record.admitted = max(record.arrived, sequence.started - self._begun)
        record.n_cached, record.n_preempted = sequence.n_cached, sequence.n_preempted
        self._close(record, now)

    def _close(self, record: Record, now: float) -> None:
        record.finished = now
        self._records.append(record)
        self._n_left -= record.priority != self._beside


def _counts(metrics: Any) -> dict[str, float]:
    """The engine's counters that a report shows."""
    by_cause = {f"preempted_by_{c}": metrics.preemptions[c] for c in ("memory", "priority")}
    return {
        **by_cause,
        "steps": metrics.steps,
        "prefill_tokens_computed": metrics.prefill_tokens_computed,
        "decode_tokens_computed": metrics.decode_tokens_computed,
        "schedule_seconds": metrics.schedule_seconds,
        "forward_seconds": metrics.forward_seconds,
        "update_seconds": metrics.update_seconds,
        "stalls": metrics.stalls,
        "faults": metrics.faults,
    }


def config(llm: LLM, name: str, seed: int, is_static: bool, slo: SLO) -> dict[str, Any]:
    """What a report was measured with; sampling is the same for all that is compared."""
    return {
        "scenario": name, "seed": seed, "static": is_static, "synthetic": True,
        "n_ctx": llm.n_ctx, "max_num_seqs": llm.max_num_seqs,
        "slo": slo.as_ms(),
        "sampling": asdict(SamplingParams(**SAMPLING)),  # type: ignore[arg-type]
    }  # fmt: skip


# ---- reports ------------------------------------------------------------------------------------


def simulate(
    simulation: Simulation, name: str, seed: int = 0, n_requests: int | None = None,
    rate: float | None = None, slo: SLO | None = None, speed: Speed | None = None,
) -> Report:  # fmt: skip
    """Run a scenario. ``speed`` None: measured before."""
    llm, slo, report = simulation.llm, slo or SLO(), Report()
    make = find(name).make  # an unknown name is an error at once
    speed = speed or simulation.measure_speed()
    maker = Maker(speed, llm.n_ctx, llm.n_vocab, llm.max_num_seqs, seed, n_requests, rate)
    simulation.forget()
    if name == "flood":
        _flood(simulation, maker, report, slo)
    elif name == "chat5":
        _chat5(simulation, maker, report, slo)
    else:
        report.add(name, simulation.run(make(maker)), slo)
    report.facts |= {"scale": maker.scale, "speed_prefill": speed.prefill,
                     "speed_decode": speed.decode}  # fmt: skip
    return report


def _chat5(simulation: Simulation, maker: Maker, report: Report, slo: SLO) -> None:
    """With reuse and without, in turns 2 to 5."""
    asks = find("chat5").make(maker)
    figures = {}
    for name, reuse in (("reuse", True), ("no reuse", False)):
        simulation.forget(reuse)
        try:
            run = simulation.run(asks)
        finally:
            simulation.forget()
        report.add(name, run, slo, is_judged=reuse)
        later = summary([r for r in run.records if r.turn > 1], run.seconds, slo)
        figures[name] = later["prefill_tokens"], later["ttft"]["p50"] or 0.0
    (prefill, ttft), (all_prefill, all_ttft) = figures["reuse"], figures["no reuse"]
    fewer, sooner = 1 - prefill / max(1, all_prefill), 1 - ttft / max(1e-9, all_ttft)
    report.facts |= {"prefill_saved": fewer, "ttft_saved": sooner}
    report.notes.append(
        f"Turns 2 to 5 compute {100 * fewer:.1f} % fewer prompt tokens than without reuse "
        f"({prefill:,} of {all_prefill:,}); their TTFT P50 is {100 * sooner:.1f} % shorter "
        f"({1e3 * ttft:.0f} instead of {1e3 * all_ttft:.0f} ms)."
    )


def _flood(simulation: Simulation, maker: Maker, report: Report, slo: SLO) -> None:
    ttft, share = {}, {}
    for name, asks in flood(maker).items():
        simulation.forget()
        # what is measured ends with the interactive requests: the flood would go on for ever
        run = simulation.run(asks, "batch", SECONDS)
        report.add(name, run, slo, is_judged=name != "permanent")
        quick, batch = ([r for r in run.records if r.priority == p]
                        for p in ("interactive", "batch"))  # fmt: skip
        ttft[name] = summary(quick, run.seconds)["ttft"]["p95"] or math.inf
        tokens = [sum(len(r.tokens) + (r.n_prompt if r.tokens else 0) for r in of)
                  for of in (quick, batch)]  # fmt: skip
        share[name] = tokens[1] / max(1, sum(tokens))
    ratio = ttft["flooded"] / ttft["alone"]
    report.facts |= {"ttft_ratio": ratio, "batch_share": share["permanent"]}
    report.notes.append(
        f"Interactive TTFT P95 is {1e3 * ttft['flooded']:.0f} ms beside a flood of batch requests "
        f"and {1e3 * ttft['alone']:.0f} alone: {ratio:.2f} times. Beside a permanent crowd of "
        f"interactive requests the batch lane gets {100 * share['permanent']:.1f} % of the tokens."
    )
