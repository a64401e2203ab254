"""Measuring: which tests there are, what steps cost, and a real run on a tiny model."""

from __future__ import annotations

import json
import math

import architectures
import numpy as np
import pytest

from edgellm import LLM, baseline, bench
from edgellm.bench import Workload, bottleneck, workloads
from edgellm.cost import step_cost
from edgellm.energy import energy_joules
from edgellm.errors import EdgeLLMError
from edgellm.kernels.graph import Graph, Weight
from edgellm.quant import by_name
from edgellm.steps import Steps, arbitrary_tokens


def test_names_are_those_of_llama_bench():
    found = workloads([512], [128], [0, 4096], [1, 8])
    assert [t.name for t in found] == [
        "pp512", "tg128", "pp512 @ d4096", "tg128 @ d4096", "tg8 x1", "tg8 x8",
    ]  # fmt: skip
    assert workloads([0], [0], [0], []) == []


def test_tokens_and_positions():
    test = Workload(n_gen=8, n_depth=100, n_seqs=4)
    assert test.n_tokens == 32 and test.n_positions == 108


def test_the_cost_of_a_step_is_weights_once_and_what_is_in_sight():
    graph, kind = Graph(), by_name("q4_0")
    x = graph.embed(Weight("e", kind, (64, 10)))
    q, k, v = (graph.linear(x, Weight(name, kind, (64, 64))) for name in "qkv")
    a = graph.attention(q, k, v, n_heads=2, n_kv_heads=2, scale=1.0, window=16)
    graph.linear(graph.select(a), Weight("o", kind, (64, 128)))
    matrix = 64 * 64 * 18 // 32
    one = step_cost(graph, "f16", "f16", [(1, 5)], 1)
    assert one.n_bytes == 5 * matrix + 6 * 2 * 2 * 32 * 2
    assert one.dots == 5 * 64 * 64
    small = step_cost(graph, "q8_0", "q4_0", [(1, 5)], 1)
    assert small.n_bytes == 5 * matrix + 6 * 2 * (34 + 18) and small.dots == one.dots
    many = step_cost(graph, "f16", "f16", [(3, 100), (3, 0)], 0)
    assert many.n_bytes == 3 * matrix + (18 + 3) * 2 * 2 * 32 * 2
    assert many.dots == 6 * 3 * 64 * 64


def test_bottlenecks():
    shares = {"linear": 0.8, "attention": 0.1, "other": 0.05, "waiting": 0.05}
    assert bottleneck(shares, 0.9, 0.1) == "memory"
    assert bottleneck(shares, 0.1, 0.7) == "dot products"
    assert bottleneck(shares, 0.3, 0.3) == "unpacking"
    assert bottleneck(shares | {"attention": 0.9}, 0.9, 0.1) == "attention"
    assert bottleneck(shares | {"waiting": 0.9}, 0.9, 0.1) == "waiting threads"


def test_energy_is_the_sum_of_packages(tmp_path):
    assert energy_joules(tmp_path) is None
    for name, joules in (("intel-rapl:0", 5), ("intel-rapl:1", 7), ("intel-rapl:0:0", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{joules}000000\n")
    assert energy_joules(tmp_path) == 12
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()
    assert energy_joules(tmp_path) is None


def test_arbitrary_tokens_fit_any_vocabulary():
    for n_vocab in (3, 258, 50_000):
        tokens = arbitrary_tokens(1000, n_vocab)
        assert all(0 <= t < n_vocab for t in tokens)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_sequence_that_was_cut_goes_on_as_before(tiny_model, architecture):
    """gemma3's window lets go of tokens: then it cannot be cut that far, and says so."""
    with LLM(tiny_model(architecture), n_ctx=512, n_threads=2) as llm:
        steps = Steps(llm)
        sequence = steps.open(400)
        steps.prefill(sequence, 70)
        steps.prefill(sequence, 30)
        first = llm.runner.program.logits[0].copy()
        assert steps.cut(sequence, 70)
        steps.prefill(sequence, 30)
        assert np.array_equal(first, llm.runner.program.logits[0])
        steps.prefill(sequence, 250)
        assert steps.cut(sequence, 70) == (architecture == "llama")
        assert steps.cut(sequence, 0)
        steps.release(sequence)
        assert llm.is_idle


@pytest.fixture
def small_peaks(monkeypatch):
    """A buffer that costs a test nothing."""
    monkeypatch.setattr("edgellm.kernels.cpu.peaks.last_level_cache", lambda: 1)
    monkeypatch.setattr("edgellm.kernels.cpu.peaks._LEAST_BYTES", 1 << 20)
    monkeypatch.setattr("edgellm.kernels.cpu.peaks._TURNS", 10)


def test_a_tiny_model_is_measured(tiny_model, small_peaks):
    tests = workloads([300], [3], [0, 40], [1, 3])
    rows = bench.bench(str(tiny_model("gemma3")), tests, repetitions=2, n_threads=2)
    assert [row["test"] for row in rows] == [t.name for t in tests]
    for row in rows:
        assert len(row["samples_ts"]) == len(row["samples_ns"]) == 2
        assert row["avg_ts"] > 0 and row["of_bandwidth"] > 0 and row["of_dot_peak"] > 0
        assert row["read_bandwidth"] > 0 and row["peak_memory"] > 1e6
        assert sum(row["shares"].values()) == pytest.approx(1)
        assert 0 < row["beside_kernels"]["greedy"] < 1
        assert row["kernels"]["q8_0"].startswith("linear_q8_0")
    json.dumps(rows)


def test_nothing_to_measure_is_an_error():
    with pytest.raises(EdgeLLMError, match="-p, -n and --batch"):
        bench.bench("absent.gguf", [])


def test_more_than_fits_is_an_error_with_the_flags(tiny_model):
    with pytest.raises(EdgeLLMError, match="ask for less with -d, -p or -n"):
        bench.bench(str(tiny_model("llama")), [Workload(n_gen=1, n_depth=10**12)])


# ---- reports in files ---------------------------------------------------------------------------


def test_more_than_a_model_has_positions_is_an_error_with_the_flags(tmp_path):
    path = architectures.write(tmp_path / "gpt2.gguf", "gpt2")
    with pytest.raises(EdgeLLMError, match=r"needs 600 positions and this model has 512.*-p"):
        bench.bench(str(path), workloads([600], [], [0], []))


def row(test: str, speeds: list[float], **more: object) -> dict[str, object]:
    return {"test": test, "model_filename": "m.gguf", "samples_ts": speeds, "cpu_info": "a cpu",
            "target": "avx2", "n_threads": 2, **more}  # fmt: skip


def test_reports_are_kept_and_compared(tmp_path):
    path = str(tmp_path / "baseline.json")
    baseline.save(path, [row("pp512", [100, 101, 99]), row("tg128", [10, 10, 10])])
    other = row("pp512", [1, 1], model_filename="other.gguf")
    baseline.save(path, [other])
    old = baseline.load(path)
    assert len(old) == 3 and old[2] == other
    changes, notes = baseline.compare([row("tg128", [5, 5, 5]), row("tg9", [1])], old)
    assert [c.test for c in changes] == ["tg128"] and changes[0].ratio.verdict == "slower"
    assert notes == []
    _, notes = baseline.compare([row("tg128", [5, 5, 5], n_threads=4)], old)
    assert notes == ["The old report was measured with n_threads 2, this one with 4."]
    baseline.save(path, [row("tg128", [20])])  # replaces the model's rows
    assert [r["test"] for r in baseline.load(path)] == ["pp512", "tg128"]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]x", '{"a": 1}', '[{"test": "pp1"}]', "[" * 100_000,
     json.dumps([row("pp1", [math.inf])]), json.dumps([row("pp1", [1]) | {"test": ["pp1"]}])],
    ids=range(8),
)  # fmt: skip
def test_what_is_no_report_is_refused(tmp_path, text):
    path = tmp_path / "b.json"
    path.write_text(text)
    with pytest.raises(EdgeLLMError, match=r"b\.json is no report"):
        baseline.load(str(path))


def test_absent_and_foreign_reports_are_refused(tmp_path):
    with pytest.raises(EdgeLLMError, match="cannot be read"):
        baseline.load(str(tmp_path / "no.json"))
    with pytest.raises(EdgeLLMError, match="--save"):
        baseline.save(str(tmp_path / "no" / "b.json"), [row("pp1", [1])])
    with pytest.raises(EdgeLLMError, match="no folder"):
        baseline.check_place(str(tmp_path / "no" / "b.json"))
    baseline.check_place(str(tmp_path / "b.json"))
    with pytest.raises(EdgeLLMError, match="in common"):
        baseline.compare([row("tg9", [1])], [row("tg8", [1])])
