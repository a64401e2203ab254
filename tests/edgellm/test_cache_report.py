"""What a prompt had to be computed again for, in words that help."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cache_model import request

from edgellm import LLM, SamplingParams
from edgellm.cache_report import PromptHistory

END = 9


def decode(tokens: list[int]) -> str:
    return " ".join(map(str, tokens))


def test_where_a_prompt_parts_from_the_nearest_earlier_one() -> None:
    history = PromptHistory()
    system, question = [1, 2, 3, END], [4, 5, END]
    for prompt in ([8, 8, 8], [*system, *question, 6], [*system, 7, 7]):
        history.add(request(prompt))
    asked = request([*system, 4, 6, END])
    asked.n_cached = 5
    report = history.known(asked).report({END})
    assert (report.n_common, report.message) == (5, 1)
    assert (report.here, report.there) == ((6, END), (5, END, 6))
    text = report.text(decode)
    assert "5 of 7 prompt tokens were known" in text
    assert "token 5, in message 2, behind '1 2 3 9 4'" in text and "'6 9', not '5 9 6'" in text
    assert "no longer kept" not in text


def test_what_was_given_away_is_said() -> None:
    history = PromptHistory()
    history.add(request(list(range(20))))
    asked = request([*range(15), 99])
    asked.n_cached = 4
    text = history.known(asked).report({END}).text(decode)
    assert "Of 15 common tokens the rest was no longer kept" in text


def test_nothing_alike_and_everything_alike() -> None:
    history = PromptHistory()
    history.add(request([1, 2, 3], cache_salt="other"))
    assert "no earlier request begins like this" in history.known(request([1, 2])).report(
        {END}
    ).text(decode)
    history.add(request([1, 2, 3]))
    assert "an earlier request has them all" in history.known(request([1, 2])).report({END}).text(
        decode
    )
    ends = history.known(request([1, 2, 3, 4])).report({END}).text(decode)
    assert "an earlier request ends at token 3" in ends and "here follows '4'" in ends


def test_only_the_newest_requests_are_remembered() -> None:
    history = PromptHistory()
    for i in range(100):
        history.add(request([i]))
    assert history.known(request([35, 1])).report({END}).n_common == 0
    assert history.known(request([36, 1])).report({END}).n_common == 1


def test_the_engine_explains_its_requests(tiny_model: Callable[..., Path]) -> None:
    params = SamplingParams(max_tokens=3, temperature=0)
    with LLM(tiny_model("llama")) as llm:
        first = llm.generate("The day is Monday. Be brief.", params)
        assert "no earlier request" in llm.explain(first)
        second = llm.generate("The day is Sunday. Be brief.", params)
        assert "'Sunday. Be b', not 'Monday. Be b'" in llm.explain(second)
        queued = llm.submit("x", params)[0]
        assert "not begun" in llm.explain(queued)
        llm.forget(queued)
