"""LLM(..., samplers=[fn]): plain Python functions, compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgellm import LLM, SamplingParams
from edgellm.errors import EdgeLLMError
from edgellm.kernels.cpu.user import UserSamplerError, compile_sampler
from edgellm.sampling import NothingLeft

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def never_twice(logits, tokens, position):  # type: ignore[no-untyped-def]
    for token in tokens:
        logits[token] = -np.inf


def even_at_even(logits, tokens, position):  # type: ignore[no-untyped-def]
    for token in range(len(logits)):
        if token % 2 != position % 2:
            logits[token] -= 1000


def test_two_functions_steer_every_request(tiny_model: Callable[..., Path]) -> None:
    with LLM(tiny_model("llama"), n_threads=1, samplers=[never_twice, even_at_even]) as llm:
        prompt = [3, 5, 7]
        found = llm.generate(prompt, GREEDY).tokens
        assert len(set(prompt + found)) == 15
        assert [token % 2 for token in found] == [(3 + i) % 2 for i in range(12)]
        rows = llm.logits(prompt + found)
        for i, token in enumerate(found):
            row = rows[2 + i].copy()
            never_twice(row, prompt + found[:i], 3 + i)
            even_at_even(row, None, 3 + i)
            assert token == row.argmax()
        several = llm.generate([prompt, [9]], SamplingParams(max_tokens=8, seed=5))
        alone = llm.generate(prompt, SamplingParams(max_tokens=8, seed=5))
        assert several[0].tokens == alone.tokens
        assert llm.is_idle


def test_errors_of_a_function_reach_the_caller_and_only_this_request_ends(
    tiny_model: Callable[..., Path],
) -> None:
    def beyond(logits, tokens, position):  # type: ignore[no-untyped-def]
        logits[len(logits) + position] = 0

    def nothing(logits, tokens, position):  # type: ignore[no-untyped-def]
        logits[:] = -np.inf

    def broken(logits, tokens, position):  # type: ignore[no-untyped-def]
        logits[1] = np.nan

    with LLM(tiny_model("llama"), n_threads=1, samplers=[beyond]) as llm:
        with pytest.raises(IndexError):
            llm.generate("a", GREEDY)
        assert llm.is_idle
    with LLM(tiny_model("llama"), n_threads=1, samplers=[nothing]) as llm:
        with pytest.raises(NothingLeft, match="ban every token"):
            llm.generate("a", GREEDY)
    with LLM(tiny_model("llama"), n_threads=1, samplers=[broken]) as llm:
        with pytest.raises(NothingLeft, match="not numbers: broken"):
            llm.generate("a", GREEDY)


def returns(logits, tokens, position):  # type: ignore[no-untyped-def]
    return logits


def writes_history(logits, tokens, position):  # type: ignore[no-untyped-def]
    tokens[0] = 1


def opens(logits, tokens, position):  # type: ignore[no-untyped-def]
    with open("x") as file:
        file.read()


def unknown(logits, tokens, position):  # type: ignore[no-untyped-def]
    there_is_no_such_thing(logits)  # noqa: F821


def too_few(logits):  # type: ignore[no-untyped-def]
    pass


@pytest.mark.parametrize("function", [returns, writes_history, opens, unknown, too_few, print, 3])
def test_what_cannot_be_a_sampler_is_refused_in_one_sentence(
    function: object, tiny_model: Callable[..., Path]
) -> None:
    with pytest.raises(UserSamplerError) as caught:
        compile_sampler(function)  # type: ignore[arg-type]
    message = str(caught.value)
    assert getattr(function, "__name__", "3") in message
    assert "\n" not in message and message.endswith(".") and not message.endswith("..")
    with pytest.raises(EdgeLLMError, match="The sampler"):
        LLM(tiny_model("llama"), samplers=[function])  # type: ignore[list-item]
