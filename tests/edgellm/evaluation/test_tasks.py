"""Tasks have the answers they claim, and metrics are exact on what was made for them."""

import contextlib
import io
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.evaluation.compare import shipped_prompts
from edgellm.evaluation.tasks import find_json, last_number, make, repetition


@given(st.integers(0, 1 << 30))
def test_known_answers(seed: int) -> None:
    for task in make(3, seed):
        if task.kind == "arithmetic":
            value = int(re.findall(r"\d+", task.prompt)[0])
            for word, n in re.findall(r"(Add|Subtract|Multiply by) (\d+)", task.prompt):
                value = {"Add": value + int(n), "Subtract": value - int(n)}.get(
                    word, value * int(n)
                )
            assert task.answer == str(value)
            assert task.is_right(f"First 12, so the result is **{value}**.")
            assert not task.is_right(f"The result is {value + 1}.")
        elif task.kind == "code":
            source = task.prompt.split("\n\n")[1]
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(source, {})  # of ours
            assert out.getvalue().strip() == task.answer
            assert task.is_right(f"`{task.answer}`") and not task.is_right("nothing of it")
        else:
            wanted = json.loads(task.answer)
            assert all(str(value) in task.prompt for value in wanted.values())
            assert task.is_right(f"```json\n{task.answer}\n```")
            assert not task.is_right(f"Here it is: {task.answer}")
            assert not task.is_right(json.dumps(wanted | {"age": wanted["age"] + 1}))


def test_a_seed_makes_the_same() -> None:
    assert [t.prompt for t in make(5, 7)] == [t.prompt for t in make(5, 7)]
    assert [t.prompt for t in make(5, 7)] != [t.prompt for t in make(5, 8)]
    assert len(make(5)) == 15


@pytest.mark.parametrize(("text", "number"), [
    ("It is 42.", 42), ("1,234", 1234), ("-7 or 3.5", 3.5), ("none", None), ("x = -12", -12),
])  # fmt: skip
def test_last_number(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_json() -> None:
    assert find_json(' {"a": [1, null]}\n') == {"a": [1, None]}
    for text in ("", "{", "{'a': 1}", '{"a": 1} and more', "```\n{}"):
        assert find_json(text) is None


def test_brackets_without_end() -> None:
    assert find_json("[" * 100_000) is None


def test_repetition() -> None:
    assert repetition([1, 2, 3]) == 0
    assert repetition(list(range(50))) == 0
    assert repetition([5] * 13) == 0.9  # ten runs of four, one kind
    assert repetition([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)


def test_shipped_prompts() -> None:
    prompts = shipped_prompts()
    assert len(set(prompts)) == 100 and all(prompts)
