"""edgellm bench: lists of numbers, formats, files of reports."""

import csv
import io
import json

import pytest
import typer

from edgellm.cli import _bench_report
from edgellm.cli._lists import numbers
from edgellm.cli.main import run


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512", [512]),
        ("512,1024,512", [512, 1024]),
        ("1-4", [1, 2, 3, 4]),
        ("0-4096+2048", [0, 2048, 4096]),
        ("128-1000*2", [128, 256, 512]),
        ("1-16*4, 3", [1, 4, 16, 3]),
    ],
)
def test_lists(text, expected):
    assert numbers(text) == expected


@pytest.mark.parametrize("text", ["", "a", "1,", "-5", "4-1", "0-8*2", "1-8*1", "1-8+0", "1-99999"])
def test_what_is_no_list_is_refused(text):
    with pytest.raises(typer.BadParameter):
        numbers(text)


def rows():
    shared = {
        "build": "edgellm 0", "cpu_info": "a cpu", "target": "avx2", "model_filename": "m.gguf",
        "model_type": "llama Q4_K", "model_size": 10**9, "model_n_params": 15 * 10**8,
        "n_threads": 2, "type_k": "f16", "type_v": "q8_0", "kernels": {"q4_k": "linear_q4_k_q8k"},
    }  # fmt: skip
    measured = {
        "n_prompt": 512, "n_gen": 0, "n_depth": 0, "n_seqs": 1, "is_width": False,
        "avg_ns": 5, "stddev_ns": 1, "avg_ts": 100.0, "stddev_ts": 1.5, "samples_ns": [5, 6],
        "samples_ts": [99.0, 101.0], "step_ms": 10.0, "of_bandwidth": 0.934, "of_dot_peak": 0.1,
        "read_bandwidth": 3e10, "dot_peak": 4e11, "bottleneck": "memory",
        "shares": {"linear": 1.0}, "tokens_per_joule": None, "peak_memory": 12 * 10**8,
        "beside_kernels": {"greedy": 0.0123, "sampled": 0.05},
    }  # fmt: skip
    widths = [
        {**shared, **measured, "test": f"tg8 x{n}", "n_seqs": n, "is_width": True, "avg_ts": 30 * n}
        for n in (1, 4)
    ]
    return [{**shared, **measured, "test": "pp512"}, *widths]


def test_the_markdown_has_llama_bench_columns():
    text = _bench_report.as_markdown(rows())
    head, rule, line = text.splitlines()[:3]
    cells = [cell.strip() for cell in head.strip("|").split("|")]
    assert cells[:7] == ["model", "size", "params", "backend", "threads", "test", "t/s"]
    assert set(rule) <= set("|-:") and len(rule) == len(head) == len(line)
    assert "100.00 ± 1.50" in line and "93 %" in line and "memory" in line
    assert "4.00" in text and "1.20 times" in text and "q4_k linear_q4_k_q8k" in text
    assert "1.2 % of a token's time" in text and "tokens/J" not in text


def test_energy_has_a_column_where_it_is_known():
    known = rows()
    known[0]["tokens_per_joule"] = 1.5
    assert "tokens/J" in _bench_report.as_markdown(known)


def test_csv_is_flat_and_json_whole():
    parsed = list(csv.DictReader(io.StringIO(_bench_report.as_csv(rows()))))
    assert parsed[0]["test"] == "pp512" and "samples_ts" not in parsed[0]
    assert json.loads(_bench_report.as_json(rows())) == rows()


@pytest.fixture
def measured(monkeypatch, fake):
    """The command without an engine; what it was asked for."""
    seen = {}

    def bench(path, tests, r, n_threads, cpu_mask, say, type_k, type_v, block_size, offload):
        seen.update(path=path, tests=[t.name for t in tests], r=r, t=n_threads)
        seen.update(c=cpu_mask, types=(type_k, type_v))
        return rows()

    import sys
    from types import ModuleType

    module = ModuleType("edgellm.bench")
    module.bench = bench

    class Named:
        def __init__(self, name):
            self.name = name

    module.workloads = lambda p, n, d, b: [Named(f"{p} {n} {d} {b}")]
    monkeypatch.setitem(sys.modules, "edgellm.bench", module)
    return seen


def test_flags_reach_the_measurement(measured, capsys):
    assert run(["bench", "m.gguf", "-p", "256", "-n", "0", "-d", "0,64", "--batch", "1,4",
                "-r", "2", "-t", "2", "-C", "0x3", "-ctk", "q8_0", "-o", "json"]) == 0  # fmt: skip
    assert measured == {"path": "m.gguf", "tests": ["[256] [0] [0, 64] [1, 4]"], "r": 2, "t": 2,
                        "c": "0x3", "types": ("q8_0", "f16")}  # fmt: skip
    out, err = capsys.readouterr()
    assert json.loads(out) == rows() and err == ""


def test_a_report_is_saved_and_compared(measured, capsys, tmp_path):
    assert run(["bench", "m.gguf", "--save", "b.json"]) == 0
    assert run(["bench", "m.gguf", "--compare", "b.json"]) == 0
    assert "same" in capsys.readouterr().err
    old = json.loads((tmp_path / "b.json").read_text())
    for row in old:
        row["samples_ts"] = [200.0, 201.0]
    (tmp_path / "b.json").write_text(json.dumps(old))
    assert run(["bench", "m.gguf", "--compare", "b.json"]) == 1
    assert "slower" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["-p", "x"], "'-p' / '--n-prompt'"),
        (["-o", "yaml"], "md, json, csv"),
        (["--batch", "0,2"], "0 sequences"),
        (["-r", "0"], "repetitions"),
        (["--compare", "none.json"], "none.json"),
        (["--save", "none/b.json"], "none/b.json"),
        (["--save", __file__], "test_bench.py is no report"),
    ],
)
def test_bad_input_is_a_sentence(measured, capsys, arguments, named):
    assert run(["bench", "m.gguf", *arguments]) == 2
    err = capsys.readouterr().err
    assert named in err and "Traceback" not in err and err.count("\n") == 1
    assert measured == {}  # it is said before anything is measured
