"""Statistics of serving, on records that no engine has made."""

from __future__ import annotations

import json

import numpy as np
import pytest

from edgellm import serving_records
from edgellm.errors import EdgeLLMError
from edgellm.serving_records import LATENCIES, SLO, Record, quantiles, summary


def record(arrived: float = 0.0, first: float = 0.2, gap: float = 0.05, n: int = 20) -> Record:
    tokens = [arrived + first + i * gap for i in range(n)]
    return Record("a", 100, arrived, admitted=arrived + 0.1, tokens=tokens,
                  finished=tokens[-1] + 0.001, finish_reason="length", n_cached=40)  # fmt: skip


def test_figures_of_one_request():
    r = record(arrived=5.0)
    assert r.ttft == pytest.approx(0.2) and r.tpot == pytest.approx(0.05)
    assert r.wait == pytest.approx(0.1) and r.jitter == pytest.approx(0, abs=1e-9)
    # what a client sees: the time to the first token and all gaps are the whole time
    assert r.ttft + sum(r.gaps) == pytest.approx(r.e2e, rel=0.01)


def test_one_request_that_violates_one_slo_lowers_goodput_by_exactly_one(tmp_path):
    slo = SLO(ttft=0.3, tpot=0.08)
    records = [record(arrived=i) for i in range(50)]
    before = summary(records, 10.0, slo)
    assert before["good"] == 50 and before["goodput"] == 5.0
    for slow in (record(first=0.31), record(gap=0.081), Record("a", 9, 0.0, finish_reason="error")):
        path = tmp_path / "records.jsonl"
        serving_records.write(path, [*records[:7], slow, *records[8:]])
        after = summary(serving_records.read(path), 10.0, slo)
        assert after["good"] == 49 and after["requests"] == 50
        assert after["goodput"] == pytest.approx(4.9)


def test_a_stall_in_one_stream_raises_its_jitter_alone():
    records = [record(arrived=i / 10) for i in range(10)]
    records[3].tokens = [t + 2.0 * (i >= 8) for i, t in enumerate(records[3].tokens)]
    jitters = [r.jitter for r in records]
    assert jitters[3] > 0.4
    assert all(j == pytest.approx(0, abs=1e-9) for i, j in enumerate(jitters) if i != 3)
    found = summary(records, 10.0)
    assert found["jitter"]["p50"] == pytest.approx(0, abs=1e-9)
    assert found["jitter"]["max"] == jitters[3] and found["pooled_jitter"] > 0.1
    assert found["gap"]["p50"] == pytest.approx(0.05) and found["gap"]["max"] > 2


def test_no_latency_without_percentiles():
    found = summary([record()], 1.0)
    for name in (*LATENCIES, "gap"):
        assert {"mean", "p50", "p95", "p99", "n"} <= set(found[name])
    json.dumps(found)


def test_percentiles_and_their_absence():
    values = list(np.random.default_rng(1).permutation(101) / 100)
    found = quantiles([*values, None])
    assert (found["p50"], found["p95"], found["p99"]) == pytest.approx((0.5, 0.95, 0.99))
    assert found["n"] == 101 and found["mean"] == pytest.approx(0.5) and found["max"] == 1.0
    assert quantiles([])["p50"] is None and quantiles([None])["n"] == 0


def test_throughput_hits_and_what_did_not_end_well():
    records = [record(), record(), Record("b", 10, 0.0, finished=3.0, finish_reason="error"),
               Record("b", 10, 1.0, finished=2.0, finish_reason="abort")]  # fmt: skip
    found = summary(records, 4.0)
    assert (found["completed"], found["failed"], found["cancelled"]) == (2, 1, 1)
    assert found["prompt_tokens"] == 200 and found["prefill_tokens"] == 120
    assert found["hit_rate"] == 0.4 and found["generated_tokens_per_second"] == 10.0
    assert found["wait"]["max"] == 3.0  # it was never begun
    assert found["of_good"] == pytest.approx(2 / 3)  # who left does not judge


def test_an_slo_is_judged_at_95_percent():
    records = [record() for _ in range(100)]
    slow = [record(first=1.5) for _ in range(4)]
    assert SLO(ttft=1.0, tpot=0.08).missed(summary(records[4:] + slow, 1.0)) == []
    slow = [record(first=1.5) for _ in range(8)]
    [sentence] = SLO(ttft=1.0, tpot=0.08).missed(summary(records[8:] + slow, 1.0))
    assert sentence == "TTFT P95 is 1500 ms, more than 1000"
    assert SLO(tpot=0.01).missed(summary(records, 1.0))[0].startswith("TPOT P95 is 50 ms")
    assert SLO(ttft=1.0).missed(summary([], 1.0)) == ["no request had a TTFT"]
    assert SLO().missed(summary([], 1.0)) == []


def test_files_that_are_no_records(tmp_path):
    path = tmp_path / "r.jsonl"
    serving_records.write(path, [record()])
    assert serving_records.read(path) == [record()]
    for text in ("{", "[1]\n", '{"kind": "a"}\n', "5\n"):
        path.write_text(text)
        with pytest.raises(EdgeLLMError, match="no records"):
            serving_records.read(path)
    with pytest.raises(EdgeLLMError, match="No such file"):
        serving_records.read(tmp_path / "absent")
    with pytest.raises(EdgeLLMError, match="--records"):
        serving_records.write(tmp_path / "no" / "r", [])
