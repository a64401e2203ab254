"""Simulated serving: what scenarios ask, and that each runs, on a tiny model."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from edgellm import LLM
from edgellm.errors import EdgeLLMError
from edgellm.serving_records import SLO, summary
from edgellm.simulation import Simulation, config, simulate
from edgellm.workloads import SCENARIOS, SECONDS, Ask, Maker, Speed, find, flood

FAST = Speed(prefill=1e5, decode=1e5)


def maker(speed: Speed = FAST, seed: int = 0, n_ctx: int = 2048, **more: object) -> Maker:
    return Maker(speed, n_ctx, 1000, 8, seed, **more)  # type: ignore[arg-type]


def plain(asks: list[Ask]) -> list[tuple[object, ...]]:
    return [(a.at, tuple(a.prompt), a.max_tokens, a.kind, a.priority, a.cancel_after, a.timeout)
            for a in asks]  # fmt: skip


# ---- what is asked ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_seed_decides_everything(name: str) -> None:
    make = SCENARIOS[name].make
    assert plain(make(maker(seed=3))) == plain(make(maker(seed=3)))
    assert plain(make(maker(seed=3))) != plain(make(maker(seed=4)))
    for ask in make(maker()):
        assert 0 < len(ask.prompt) + ask.max_tokens <= 2048
        assert all(0 <= token < 1000 for token in ask.prompt[:50])


@pytest.mark.parametrize("n", [50, 200])
def test_the_mix_has_its_shares_within_two_points(n: int) -> None:
    kinds = Counter(a.kind for a in find("mix").make(maker(n_requests=n)))
    shares = {"short/short": 0.4, "mid/mid": 0.4, "long/long": 0.2}
    assert {k: kinds[k] / n for k in kinds} == pytest.approx(shares, abs=0.02)


def test_arrivals_follow_the_rate() -> None:
    steady = [a.at for a in find("mix").make(maker(n_requests=200, rate=10.0))]
    assert np.mean(np.diff(steady)) == pytest.approx(0.1, rel=0.2)
    assert np.std(np.diff(steady)) == pytest.approx(0.1, rel=0.3)  # nothing is scheduled
    assert {a.at for a in find("mix").make(maker(n_requests=9, rate=math.inf))} == {0.0}
    periodic = [a.at for a in find("periodic").make(maker(n_requests=9, rate=4.0))]
    assert periodic == pytest.approx([i / 4 for i in range(9)])
    burst = Counter(a.at for a in find("burst").make(maker(n_requests=40, rate=4.0)))
    assert burst == {0.0: 16, 4.0: 16, 8.0: 8}


def test_prefixes_are_shared_or_not() -> None:
    def heads(name: str) -> int:
        return len({tuple(a.prompt[:700]) for a in find(name).make(maker(n_requests=30))})

    assert heads("prefix-high") == 3 and heads("prefix-low") == 30


def test_a_slow_machine_gets_shorter_requests() -> None:
    quick, slow = maker(), maker(Speed(prefill=100, decode=30))
    n_quick, n_slow = (len(find("mix").make(m)) for m in (quick, slow))
    assert quick.scale == 1 and n_quick == 200 and slow.scale < 0.5 and n_slow >= 20
    work = sum(len(a.prompt) / 100 + a.max_tokens / 30 for a in find("mix").make(slow))
    assert work < 1.3 * SECONDS


def test_the_phases_of_a_flood() -> None:
    phases = flood(maker())
    kinds = {name: Counter(a.priority for a in asks) for name, asks in phases.items()}
    assert kinds["alone"]["batch"] == 0
    assert kinds["alone"]["interactive"] == kinds["flooded"]["interactive"] >= 20
    assert kinds["flooded"]["batch"] >= 16 and kinds["permanent"]["interactive"] >= 20


def test_an_unknown_scenario_names_the_others() -> None:
    with pytest.raises(EdgeLLMError, match="No scenario 'x'.*mix, short-short"):
        find("x")


# ---- served by a tiny model ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[..., Path]) -> Iterator[LLM]:
    with LLM(tiny_model("llama"), n_ctx=512, n_threads=2, max_num_seqs=4) as model:
        yield model


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_runs_to_its_end(llm: LLM, name: str) -> None:
    report = simulate(Simulation(llm), name, n_requests=12, rate=200.0, speed=FAST)
    assert llm.is_idle and llm.runner.cache.faults() == []
    whole = next(row for row in report.rows if row["kind"] == "all")
    assert whole["requests"] >= 12 and whole["counted"]["faults"] == 0
    may_fail = name in ("cancel", "flood")
    assert may_fail or whole["completed"] == whole["requests"]
    for r in report.records:
        assert r.finished is not None and r.finish_reason and r.tokens == sorted(r.tokens)
        if r.is_complete:
            assert r.arrived <= r.admitted <= r.tokens[0] <= r.tokens[-1] <= r.finished
    json.dumps([report.rows, report.facts, config(llm, name, 0, False, SLO())])


def test_what_each_scenario_is_there_for(llm: LLM) -> None:
    def run(name: str, **more: object) -> list[dict[str, object]]:
        report = simulate(Simulation(llm), name, n_requests=24, speed=FAST, **more)  # type: ignore
        return {row["kind"]: row for row in report.rows}  # type: ignore

    assert run("prefix-high")["all"]["hit_rate"] > 0.5 > 0.1 > run("prefix-low")["all"]["hit_rate"]
    slow = Speed(1e5, 1e4)  # its clients give up soon
    report = simulate(Simulation(llm), "cancel", n_requests=40, rate=math.inf, speed=slow)
    assert report.rows[0]["cancelled"] > 3
    lanes = run("priorities", rate=math.inf)
    assert lanes["interactive"]["ttft"]["mean"] < lanes["batch"]["ttft"]["mean"]
    assert run("structured")["schema"]["completed"] == 12


def test_static_batches_are_filled_when_the_last_is_done(
    tiny_model: Callable[..., Path],
) -> None:
    """The same requests, all there from the beginning: continuous batching needs fewer steps. A
    fixed budget, so that they do not depend on how busy the machine is."""
    steps, path = {}, tiny_model("llama")
    for is_static in (True, False):
        with LLM(path, n_ctx=512, n_threads=1, max_num_seqs=4, max_num_batched_tokens=256) as llm:
            simulation = Simulation(llm, is_static)
            report = simulate(simulation, "mix", n_requests=24, rate=math.inf, speed=FAST)
        steps[is_static] = report.rows[0]["counted"]["steps"]
        begun = sorted(r.admitted for r in report.records)
        if is_static:
            ends = sorted(r.finished for r in report.records)
            assert begun[4] > ends[3] and begun[8] > ends[7]
    assert steps[True] > 1.5 * steps[False]


def test_what_was_waited_for_counts_from_the_plan(llm: LLM) -> None:
    """A request that arrives during a step has waited for it, though nobody looked at it."""
    long = Ask(0.0, [5] * 400, 3, "long")
    late = Ask(1e-4, [6] * 4, 3, "late")
    run = Simulation(llm).run([long, late])
    found = {r.kind: r for r in run.records}
    assert found["late"].arrived == 1e-4 and found["late"].ttft < found["late"].e2e < run.seconds


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_later_turns_of_a_chat_compute_much_less(
    tiny_model: Callable[..., Path], architecture: str
) -> None:
    with LLM(tiny_model(architecture), n_ctx=512, n_threads=2, max_num_seqs=4) as model:
        report = simulate(Simulation(model), "chat5", n_requests=3, speed=FAST)
        assert report.facts["prefill_saved"] >= 0.6
        rows = {row["kind"]: row for row in report.rows if row["phase"] == "reuse"}
        assert all(rows[f"turn {n}"]["hit_rate"] > 0.6 for n in range(2, 6))
        assert model.is_idle and model.runner.cache.reuse


def test_an_slo_is_for_those_who_wait(llm: LLM) -> None:
    slo = SLO(ttft=1e-9)
    report = simulate(Simulation(llm), "priorities", n_requests=12, slo=slo, speed=FAST)
    assert report.judged and all(r.priority == "interactive" for r in report.judged)
    assert slo.missed(summary(report.judged, 1.0)) and report.rows[0]["goodput"] == 0


def test_speed_is_measured(llm: LLM) -> None:
    speed = Simulation(llm).measure_speed()
    assert speed.prefill > 0 and speed.decode > 0 and llm.is_idle
