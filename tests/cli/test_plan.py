"""edgellm plan: the table and JSON of a small model."""

import json

import pytest
import tiny

from edgellm.cli.main import run
from edgellm.offload import CPU
from edgellm.speeds import Speed, Speeds


@pytest.fixture
def model(tmp_path, monkeypatch):
    speeds = Speeds({CPU: Speed(20e9, 200e9), "cuda0": Speed(4e11, 5e13, 2e10, 1e-5)})
    monkeypatch.setattr("edgellm.plan.measure", lambda devices: speeds)
    return str(tiny.build(tmp_path / "m.gguf"))


def test_table(model, capsys, monkeypatch):
    monkeypatch.setenv("EDGELLM_DEVICE", "emulated:256M")
    assert run(["plan", model, "--users", "2"]) == 0
    out, _ = capsys.readouterr()
    lines = [line for line in out.splitlines() if line.startswith("|")]
    assert sum(line.startswith("| *") for line in lines) == 1
    assert "cuda0: reads 400.0 GB/s" in out and "Best (*): weights" in out
    assert {line.split("|")[2].strip() for line in lines[2:]} == {"0", "1", "3"}


def test_json_without_a_gpu(model, capsys, monkeypatch):
    monkeypatch.setenv("EDGELLM_DEVICE", "cpu")
    assert run(["plan", model, "-c", "128,256", "-o", "json", "--check"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {line["n_ctx"] for line in found["lines"]} == {128, 256}
    assert {line["n_gpu_layers"] for line in found["lines"]} == {0}
    assert found["lines"][found["best"]]["n_ctx"] == 256
    assert "tokens/s of one user" in [row["what"] for row in found["check"]]


def test_bad_lists_are_named(model, capsys):
    assert run(["plan", model, "-c", "many"]) == 2
    assert "'many' is no number" in capsys.readouterr().err


def test_a_context_too_short_to_check(model, capsys, monkeypatch):
    monkeypatch.setenv("EDGELLM_DEVICE", "cpu")
    assert run(["plan", model, "-c", "1", "--check"]) == 2
    assert "too short; ask for 32 at least (-c)" in capsys.readouterr().err
