"""Hooks: reading and replacing a layer's output from Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import architectures
import numpy as np
import pytest

from edgellm import LLM, SamplingParams
from edgellm.errors import EdgeLLMError

GREEDY = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
TOKENS = list(range(1, 100))


@pytest.fixture(params=[1, 2])
def llm(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]):  # type: ignore[no-untyped-def]
    with LLM(tiny_model("llama"), n_ctx=256, n_threads=request.param) as model:
        yield model


def test_a_reading_hook_sees_every_token_and_changes_nothing(llm: LLM) -> None:
    plain, seen = llm.logits(TOKENS), []
    remove = llm.on("blk.0.resid", lambda x: seen.append(x.copy()))
    hooked = llm.logits(TOKENS)
    assert np.array_equal(plain, hooked)
    assert sum(len(x) for x in seen) == len(TOKENS) and seen[0].shape[1] == llm.config.n_embd
    remove()
    seen.clear()
    assert np.array_equal(plain, llm.logits(TOKENS)) and seen == []


def test_a_tensor_put_back_from_another_run_gives_its_logits(llm: LLM) -> None:
    wanted, kept = llm.logits(TOKENS[:50]), []
    remove = llm.on("blk.1.resid", lambda x: kept.append(x.copy()))
    llm.logits(TOKENS[:50])
    remove()
    llm.on("blk.1.resid", lambda x: kept[0])  # replaces what other tokens computed
    assert np.array_equal(llm.logits(TOKENS[49:99]), wanted)


def test_changes_in_place_count_in_prefill_and_decode(llm: LLM) -> None:
    plain = llm.generate(TOKENS, GREEDY).tokens

    def silence(x: np.ndarray) -> None:
        x[:, ::2] *= -1

    remove = llm.on("blk.0.attn_output", silence)
    changed = llm.generate(TOKENS, GREEDY).tokens
    assert changed != plain
    remove()
    assert llm.generate(TOKENS, GREEDY).tokens == plain


def test_an_exception_reaches_the_caller_and_the_model_goes_on(llm: LLM) -> None:
    plain = llm.generate(TOKENS, GREEDY).tokens

    def fail(x: np.ndarray) -> None:
        raise KeyError("mine")

    remove = llm.on("blk.1.ffn_down", fail)
    with pytest.raises(KeyError, match="mine"):
        llm.generate(TOKENS, GREEDY)
    assert llm.is_idle
    remove()
    assert llm.generate(TOKENS, GREEDY).tokens == plain


def test_a_result_of_the_wrong_shape_is_the_callers_error(llm: LLM) -> None:
    for wrong in (np.zeros(3), np.zeros((1, 1))):
        remove = llm.on("output", lambda x, wrong=wrong: wrong)
        with pytest.raises(ValueError, match="A hook returned .* for a tensor of"):
            llm.logits(TOKENS)
        remove()
    with pytest.raises(EdgeLLMError, match="must be a function"):
        llm.on("output", 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("use", ["generate", "on", "close", "logits"])
def test_a_hook_that_uses_its_own_model_is_refused(llm: LLM, use: str) -> None:
    calls = {
        "generate": lambda x: llm.generate("a", GREEDY) and None,
        "on": lambda x: llm.on("output", print) and None,
        "close": lambda x: llm.close(),
        "logits": lambda x: llm.logits([1]) and None,
    }
    remove = llm.on("blk.0.resid", calls[use])
    with pytest.raises(EdgeLLMError, match="A hook cannot use a model"):
        llm.logits(TOKENS)
    remove()
    assert len(llm.generate(TOKENS, GREEDY).tokens) == 5


def test_a_hook_may_remove_itself(llm: LLM) -> None:
    seen = []

    def once(x: np.ndarray) -> None:
        seen.append(len(x))
        remove()

    remove = llm.on("blk.0.resid", once)
    llm.generate(TOKENS, GREEDY)
    llm.generate(TOKENS, GREEDY)
    assert seen == [len(TOKENS)]


def test_an_unknown_name_lists_what_there_is(llm: LLM) -> None:
    with pytest.raises(EdgeLLMError, match=r"'blk.9.resid'.*blk.N.attn_q.*N = 0 to 1"):
        llm.on("blk.9.resid", lambda x: None)


@pytest.mark.parametrize("name", ["llama-moe", "deepseek2", "qwen35moe"])
def test_every_matrix_of_a_layer_with_experts_can_be_hooked(tmp_path: Path, name: str) -> None:
    """Behind the last attention only wanted rows are computed; who looks at one tensor sees all."""
    with LLM(architectures.write(tmp_path / "model.gguf", name), n_ctx=256) as llm:
        plain, text = llm.logits(TOKENS[:80]), llm.generate(TOKENS[:80], GREEDY).tokens
        last = f"blk.{llm.config.n_layers - 1}."
        with pytest.raises(EdgeLLMError, match="No tensor") as caught:
            llm.on("none", print)
        parts = str(caught.value).split(" has ")[1].split(" for layers")[0].split(", ")
        hooked = set()
        for part in parts:
            if not part.startswith("blk.N."):
                continue
            seen: list[int] = []
            try:
                remove = llm.on(
                    part.replace("blk.N.", last), lambda x, seen=seen: seen.append(len(x))
                )
            except EdgeLLMError:  # only other layers have it
                continue
            assert llm.generate(TOKENS[:80], GREEDY).tokens == text, part
            assert sum(seen) == 80 + GREEDY.max_tokens - 1, part
            assert np.array_equal(llm.logits(TOKENS[:80]), plain), part
            remove()
            hooked.add(part)
        assert {"blk.N.resid", "blk.N.ffn_down_exps"} <= hooked
        assert np.array_equal(llm.logits(TOKENS[:80]), plain)
