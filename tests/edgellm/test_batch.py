"""Batches: every line gets its one record, whatever happens on the way."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgellm import LLM, SamplingParams, batch
from edgellm.errors import EdgeLLMError

PARAMS = SamplingParams(max_tokens=8, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[..., Path]):  # type: ignore[no-untyped-def]
    with LLM(tiny_model("llama"), n_ctx=256, n_threads=1, max_num_seqs=4) as model:
        yield model


def lines(*bodies: Any) -> list[bytes]:
    return [b if isinstance(b, bytes) else json.dumps(b).encode() + b"\n" for b in bodies]


def answers(llm: LLM, out: Path, source: list[bytes], params: SamplingParams = PARAMS) -> Any:
    """(progress, records by line number) after one run."""
    results = batch.Results(out)
    try:
        progress = batch.run(
            llm, source, results, params, lambda body: llm.tokenize(body["prompt"])
        )
    finally:
        results.close()
    records = [json.loads(line) for line in out.read_bytes().splitlines()]
    assert len({record["line"] for record in records}) == len(records)
    assert llm.is_idle
    return progress, {record["line"]: record for record in records}


def test_each_line_answers_what_it_would_alone(llm: LLM, tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": "abc", "id": "first"},
        {"prompt": "xyz", "id": 7, "seed": 9, "n_predict": 3},
        {"prompt": "xyz", "temp": 0, "max_completion_tokens": 5},
        {"prompt": "abc", "regex": "[0-9]{4}"},
        {"prompt": "abc", "stop": ["e"], "max_tokens": 30, "logprobs": 1},
        *({"prompt": f"number {i}"} for i in range(12)),
    ]
    progress, found = answers(llm, tmp_path / "out", lines(*bodies))
    assert (progress.done, progress.failed, progress.skipped) == (17, 0, 0)
    assert [found[n]["id"] for n in (1, 2, 3)] == ["first", 7, None]
    assert found[2]["completion_tokens"] == 3 and found[2]["seed"] == 9
    assert found[4]["text"].isdigit() and found[4]["finish_reason"] == "stop"
    assert len(found[5]["logprobs"]) == len(found[5]["tokens"])
    for number in (1, 3, 6, 17):
        params = PARAMS
        if number == 3:
            params = SamplingParams(max_tokens=5, seed=3, temperature=0, ignore_eos=True)
        alone = llm.generate(bodies[number - 1]["prompt"], params)
        assert found[number]["text"] == alone.text
        assert found[number]["prompt_tokens"] == len(llm.tokenize(bodies[number - 1]["prompt"]))


def test_the_order_of_lines_changes_nothing(llm: LLM, tmp_path: Path) -> None:
    bodies = [{"prompt": "p" * (1 + i % 7), "id": i, "seed": i} for i in range(15)]
    _, found = answers(llm, tmp_path / "a", lines(*bodies))
    random.Random(1).shuffle(bodies)
    _, other = answers(llm, tmp_path / "b", lines(*bodies))
    assert {r["id"]: r["text"] for r in found.values()} == {
        r["id"]: r["text"] for r in other.values()
    }


def test_without_a_seed_each_line_has_its_own_and_tells_it(llm: LLM, tmp_path: Path) -> None:
    free = SamplingParams(max_tokens=8, ignore_eos=True)
    _, found = answers(llm, tmp_path / "out", lines({"prompt": "a"}, {"prompt": "a"}), free)
    assert found[1]["seed"] != found[2]["seed"]
    again = llm.generate("a", SamplingParams(max_tokens=8, ignore_eos=True, seed=found[1]["seed"]))
    assert found[1]["text"] == again.text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"nonsense\n", "Line 2 is not JSON"),
        (b"\xff\xfe\n", "Line 2 is not JSON"),
        (b"[1]\n", "not a JSON object"),
        (b'{"a":' * 100_000 + b"\n", "not JSON"),
        ({"id": "x"}, "Line 2 must have either prompt or messages"),
        ({"prompt": "a", "messages": []}, "either prompt or messages"),
        ({"prompt": ""}, "prompt must be a text"),
        ({"prompt": 3}, "prompt must be a text"),
        ({"messages": "hi"}, "messages must be a list"),
        ({"prompt": "a", "id": 1.5}, "id must be"),
        ({"prompt": "a", "id": True}, "id must be"),
        ({"prompt": "a", "tempreature": 1}, "no field 'tempreature'"),
        ({"prompt": "a", "temperature": -1}, "Line 2: temperature must"),
        ({"prompt": "a", "stop": 3}, "stop must be a text"),
        ({"messages": [{"content": "Hi"}]}, "every message needs a role"),
        ({"prompt": "a", "json_schema": {"not": {}}}, "uses not"),
        ({"prompt": "a", "regex": "a", "grammar": "b"}, "only one"),
        ({"prompt": "a" * 400}, "400 tokens and the context 256"),
        ({"prompt": "a", "id": "good"}, 'Line 2: the id "good" was used before'),
        ({"prompt": "a", "regex": "b", "logit_bias": {"b": False}}, "grammar allows"),
    ],
)
def test_a_bad_line_gives_one_record_and_stops_nothing(
    llm: LLM, tmp_path: Path, line: Any, message: str
) -> None:
    source = lines({"prompt": "a", "id": "good"}, line, {"prompt": "b"}, b"\n", b"  \n")
    progress, found = answers(llm, tmp_path / "out", source)
    assert (progress.done, progress.failed) == (2, 1)
    assert message in found[2]["error"] and "\n" not in found[2]["error"]
    assert found[1]["text"] and found[3]["text"]
    before = (tmp_path / "out").read_bytes()
    progress, found = answers(llm, tmp_path / "out", source)  # resumed: nothing is added
    assert (progress.done, progress.failed, progress.skipped) == (0, 0, 3)
    assert (tmp_path / "out").read_bytes() == before
    results = batch.Results(tmp_path / "out")
    results.close()
    assert results.n_failed == 1


def test_a_resumed_batch_computes_what_is_missing(llm: LLM, tmp_path: Path) -> None:
    source = lines(*({"prompt": f"p{i}", "id": f"i{i}"} for i in range(9)))
    _, whole = answers(llm, tmp_path / "whole", source)
    text = (tmp_path / "whole").read_bytes()
    for cut in (0, 1, 8, 50, len(text) // 2, len(text) - 1, len(text)):
        (tmp_path / "out").write_bytes(text[:cut])
        progress, found = answers(llm, tmp_path / "out", source)
        kept = text[:cut].count(b"\n")
        assert (progress.skipped, progress.done) == (kept, 9 - kept)
        assert found == whole
    longer = [*source, *lines({"prompt": "new"})]
    progress, more = answers(llm, tmp_path / "out", longer)
    assert (progress.skipped, progress.done) == (9, 1) and more.keys() == {*range(1, 11)}


def test_ids_of_two_kinds_are_two(llm: LLM, tmp_path: Path) -> None:
    source = lines({"prompt": "a", "id": 1}, {"prompt": "a", "id": "1"}, {"prompt": "a"},
                   {"prompt": "a", "id": "line 3"}, {"prompt": "a", "id": "\ud800"})  # fmt: skip
    progress, found = answers(llm, tmp_path / "out", source)
    assert progress.done == 5
    assert answers(llm, tmp_path / "out", source)[0].skipped == 5


@pytest.mark.parametrize("text", ["hello\n", "hello", '{"id": 1}\n', '{"a": ', "[1]\n\n"])
def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "out").write_text(text)
    with pytest.raises(batch.BatchError, match="not an answer of a batch"):
        batch.Results(tmp_path / "out")
    assert (tmp_path / "out").read_text() == text


def test_two_batches_do_not_write_one_file(tmp_path: Path) -> None:
    first = batch.Results(tmp_path / "out")
    with pytest.raises(batch.BatchError, match="another batch"):
        batch.Results(tmp_path / "out")
    first.close()
    batch.Results(tmp_path / "out").close()
    with pytest.raises(EdgeLLMError, match="--out"):
        batch.Results(tmp_path / "none" / "out")


def test_a_batch_left_early_frees_everything(llm: LLM) -> None:
    requests = (([1 + i], PARAMS) for i in range(100))
    running = batch.as_completed(llm, requests)
    next(running)
    running.close()  # type: ignore[attr-defined]
    assert llm.is_idle
    assert next(iter(requests))[0][0] < 20  # no more were taken than had seats


@pytest.mark.slow
def test_killed_and_resumed_it_comes_to_the_same(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    n = 60
    source.write_bytes(b"".join(lines(*({"prompt": f"p{i}", "id": i} for i in range(n)), b"bad\n")))
    command = [
        sys.executable, "-m", "edgellm", "run", str(tiny_model("llama")), "--batch", str(source),
        "--seed", "1", "-n", "400", "--ignore-eos", "-c", "500", "-t", "1", "-np", "4", "--raw",
    ]  # fmt: skip
    assert subprocess.run([*command, "--out", str(tmp_path / "whole")], timeout=200).returncode == 2
    chance, kills = random.Random(4), 0
    for _ in range(60):
        child = subprocess.Popen([*command, "--out", str(out)], stderr=subprocess.DEVNULL)
        begun, before = time.monotonic(), out.stat().st_size if out.exists() else 0
        while child.poll() is None and time.monotonic() - begun < 60:
            if out.exists() and out.stat().st_size > before:  # it is writing
                time.sleep(chance.random() * 0.2)
                break
            time.sleep(0.01)
        if child.poll() is None:
            os.kill(child.pid, signal.SIGKILL)
            kills += 1
        if child.wait() == 2:
            break
    assert kills >= 3
    subprocess.run([*command, "--out", str(out)], timeout=200)
    records = [json.loads(line) for line in out.read_bytes().splitlines()]
    whole = [json.loads(line) for line in (tmp_path / "whole").read_bytes().splitlines()]
    assert len(records) == n + 1

    def by_line(record: dict[str, Any]) -> int:
        return int(record["line"])

    assert sorted(records, key=by_line) == sorted(whole, key=by_line)
