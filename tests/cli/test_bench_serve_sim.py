"""edgellm bench serve-sim: the command of two words, formats, exit codes."""

import csv
import io
import json

import pytest

from edgellm import serving_records
from edgellm.cli.main import run


def sim(path, *more):
    return run(["bench", "serve-sim", str(path), "--requests", "8", "--rate", "inf", "-c", "256",
                "-np", "4", "-t", "1", *more])  # fmt: skip


def test_formats_and_records(tiny_model, tmp_path, capsys):
    path, kept = tiny_model("llama"), tmp_path / "r.jsonl"
    assert sim(path, "-o", "json", "--records", str(kept)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["config"]["scenario"] == "mix" and found["config"]["sampling"]["temperature"] == 0
    assert found["config"]["cpu_info"] and found["rows"][0]["ttft"]["p95"] > 0
    assert len(serving_records.read(kept)) == 8
    assert sim(path, "-o", "csv", "--static") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert rows[0]["kind"] == "all" and float(rows[0]["ttft_p95"]) > 0
    assert len(rows[1:]) == 3 and rows[1]["tpot_p50"]
    assert sim(path, "--scenario", "chat5", "--requests", "2") == 0
    text = capsys.readouterr().out
    assert "turn 5" in text and "fewer prompt tokens" in text and "mean / P50 / P95 / P99" in text


def test_a_missed_slo_is_exit_code_1(tiny_model, capsys):
    path = tiny_model("llama")
    assert sim(path, "--slo-ttft", "600000", "--slo-tpot", "600000") == 0
    assert sim(path, "--slo-ttft", "0.0001") == 1
    assert "SLO missed: TTFT P95 is" in capsys.readouterr().err


def test_scenarios_are_listed_and_named(tiny_model, capsys):
    assert run(["bench", "serve-sim", "--scenario", "list"]) == 0
    listed = capsys.readouterr().out
    assert "chat5" in listed and "flood" in listed and len(listed.splitlines()) >= 10
    assert run(["bench", "serve-sim", "--scenario", "nothing"]) == 2
    assert "--scenario" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["-o", "x"], ["--rate", "-1"], ["--slo-ttft", "0"]])
def test_bad_flags_are_refused(flags, capsys):
    assert run(["bench", "serve-sim", "m.gguf", *flags]) == 2
    assert flags[0] in capsys.readouterr().err


def test_the_command_of_one_word_is_still_there(capsys):
    assert run(["bench", "--help"]) == 0
    assert "--n-prompt" in capsys.readouterr().out
