"""edgellm kv-advise: the table, the advice, and input that cannot be used."""

import json
import sys
from types import ModuleType

import pytest

from edgellm.cli.main import run

FOUND = {
    "model": "m.gguf", "n_tokens": 1024, "n_compared": 512,
    "rows": [
        {"type_k": "f16", "type_v": "f16", "bytes_per_token": 23040, "kl_mean": 0.00382,
         "kl_99": 0.0149, "same_top": 0.9609, "tokens_per_second": 124.31},
        {"type_k": "q8_0", "type_v": "q4_0", "bytes_per_token": 9360, "kl_mean": 0.0081,
         "kl_99": 0.07, "same_top": 0.904, "tokens_per_second": 150.2},
    ],
    "recommended": {"type_k": "q8_0", "type_v": "q4_0"}, "reason": "the smallest", "left_out": "",
}  # fmt: skip


@pytest.fixture
def advice(monkeypatch, fake, tmp_path):
    """The command without an engine; what it was asked for."""
    seen = {}

    def advise(path, text, n_tokens, most_kl, n_threads, cpu_mask, say):
        seen.update(path=path, text=text, n=n_tokens, kl=most_kl, t=n_threads, c=cpu_mask)
        return FOUND

    module = ModuleType("edgellm.kv_advise")
    module.advise = advise
    monkeypatch.setitem(sys.modules, "edgellm.kv_advise", module)
    (tmp_path / "text.txt").write_text("Words.\n")
    return seen


def test_a_table_and_one_line_of_advice(advice, capsys):
    flags = ["-n", "100", "--max-kl", "0.02", "-t", "2"]
    assert run(["kv-advise", "m.gguf", "-f", "text.txt", *flags]) == 0
    assert advice == {"path": "m.gguf", "text": "Words.", "n": 100, "kl": 0.02, "t": 2, "c": None}
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:4]]
    assert cells[0][:3] == ["keys", "values", "bytes/token"]
    assert cells[2] == ["f16", "f16", "23,040", "0.0038", "0.015", "96.1 %", "124.3"]
    assert lines[-1] == "Recommended: -ctk q8_0 -ctv q4_0: the smallest."


def test_as_json(advice, capsys):
    assert run(["kv-advise", "m.gguf", "-f", "text.txt", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == FOUND


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "use -f FILE"),
        (["-f", "none.txt"], "none.txt: No such file"),
        (["-f", "empty.txt"], "empty.txt is empty"),
        (["-f", "m.gguf.bin"], "is not UTF-8 text"),
        (["-f", "text.txt", "-n", "5"], "--n-tokens"),
        (["-f", "text.txt", "-o", "csv"], "must be md or json"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(advice, capsys, tmp_path, arguments, named):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "m.gguf.bin").write_bytes(b"\xff\xfe")
    assert run(["kv-advise", "m.gguf", *arguments]) == 2
    captured = capsys.readouterr()
    assert named in captured.err and captured.err.count("\n") == 1 and not captured.out
