"""A draft model changes when tokens come, never which; what cannot be one is refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import architectures
import numpy as np
import pytest
from invariance import tokens_of

from edgellm import LLM, SamplingParams
from edgellm.errors import EdgeLLMError
from edgellm.memory import bill
from edgellm.quant.gguf import GGUF
from edgellm.request_options import RequestOptions
from edgellm.speculative import build
from edgellm.speculative.ahead import LINES, worth_waiting_for
from edgellm.speculative.check import draft_check
from edgellm.speculative.cores import Division, Share, divide
from edgellm.speculative.draft_model import DraftModel
from edgellm.speculative.options import SpeculationOptions
from edgellm.speculative.vocabulary import VocabularyMismatch, check_vocabularies

GREEDY = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.8, seed=3)
PROMPTS = [tokens_of(seed, n, 250) for seed, n in ((1, 5), (2, 60), (3, 1), (4, 33))]


@pytest.fixture(params=["in turns", "apart"])
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "apart":
        apart = Division(Share(1), Share(1, (0,)), True)
        monkeypatch.setattr(build, "divide", lambda *arguments: apart)
    return None


@pytest.mark.parametrize("draft", ["itself", "another"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_are_the_same_with_a_draft_model(
    tiny_model: Callable[..., Path], eager: None, cores: None, draft: str, params: SamplingParams
) -> None:
    path = tiny_model("gemma3")
    other = path if draft == "itself" else tiny_model("llama", seed=5)
    options = SpeculationOptions("draft", model=str(other))
    with LLM(path, n_ctx=256) as plain:
        expected = [plain.generate(p, params).tokens for p in PROMPTS]
    with LLM(path, n_ctx=256, max_num_seqs=4, speculation=options) as llm:
        assert [llm.generate(p, params).tokens for p in PROMPTS] == expected
        assert [c.tokens for c in llm.generate(PROMPTS, params)] == expected
        counts = llm.metrics.speculation
        assert counts.accepted_tokens <= counts.drafted_tokens
        if draft == "itself" and isinstance(llm.speculation.proposers[0], DraftModel):  # type: ignore[union-attr]
            assert counts.accepted_tokens == counts.drafted_tokens > 200  # the same noise
        elif draft == "itself":
            assert counts.accepted_tokens == counts.drafted_tokens
        # a request that is given up is forgotten by the draft model too
        [sequence] = llm.submit(PROMPTS[1], params, RequestOptions())
        for _ in range(4):
            llm.step()
        sequence.cancel()
        llm.step()
        assert llm.is_idle and llm.runner.cache.faults() == []


def test_lookup_goes_first_and_the_draft_model_has_the_rest(
    tiny_model: Callable[..., Path], eager: None
) -> None:
    path = tiny_model("llama")
    with LLM(path, speculation=SpeculationOptions("auto", model=str(path))) as llm:
        llm.generate(tokens_of(1, 40, 250), replace(SAMPLED, max_tokens=100))
        counts = llm.metrics.speculation.accepted_from
        assert counts["draft"] > 50


def test_what_cannot_draft_is_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny_model("llama")
    hybrid = architectures.write(tmp_path / "hybrid.gguf", "lfm2")
    encoder = architectures.write(tmp_path / "encoder.gguf", "bert")
    longer = tiny_model("llama", controls=("<|more|>",))
    for draft, words in (
        (hybrid, "has recurrent layers"), (encoder, "makes embeddings"),
        (longer, r"Only the draft model \(-md\) has the token '<\|more\|>'"),
        (tmp_path / "none.gguf", "none.gguf"),
    ):  # fmt: skip
        with pytest.raises((EdgeLLMError, ValueError), match=words) as caught:
            LLM(path, speculation=SpeculationOptions("draft", model=str(draft)))
        assert "\n" not in str(caught.value)


def test_what_a_draft_model_cannot_have_is_said_to_be_its_own(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgellm.placement.open_gpus", lambda: ({}, "There is none."))
    path = tiny_model("llama")
    with pytest.raises(EdgeLLMError, match=r"^Draft model \(-md, -ngld\): No layer can go to"):
        LLM(path, speculation=SpeculationOptions("draft", model=str(path), n_gpu_layers=3))


def test_vocabularies_are_compared_by_text() -> None:
    kind = {"tokenizer.ggml.model": "gpt2"}
    ours = {**kind, "tokenizer.ggml.tokens": ["a", "b", "c"]}
    check_vocabularies(ours, {**ours}, 3, 3)
    padded = {**kind, "tokenizer.ggml.tokens": ["a", "b", "c", "[PAD3]"]}
    check_vocabularies(ours, padded, 3, 4)
    for other, words in (
        (
            {**kind, "tokenizer.ggml.tokens": ["a", "x", "c"]},
            "Token 1 is 'b' in the target and 'x'",
        ),
        ({**kind, "tokenizer.ggml.tokens": ["a", "b"]}, "Only the target has the token 'c'"),
        (
            {"tokenizer.ggml.model": "llama"},
            "of the kind llama and the target one of the kind gpt2",
        ),
    ):
        with pytest.raises(VocabularyMismatch, match=words):
            check_vocabularies(ours, other, 3, 3)


def test_a_draft_model_gets_the_cores_that_are_left() -> None:
    cores = list(range(8))
    whole = divide(cores, Share(8), False, False)
    assert whole == Division(Share(8), Share(8), False)  # they take turns
    some = divide(cores, Share(6), True, False)
    assert some == Division(Share(6, (0, 1, 2, 3, 4, 5)), Share(2, (6, 7)), True)
    gpu = divide(cores, Share(8), False, True)
    assert gpu.is_apart and gpu.draft == Share(7, (1, 2, 3, 4, 5, 6, 7))
    asked = divide(cores, Share(8), False, False, None, (2, 3))
    assert asked.target == Share(6, (0, 1, 4, 5, 6, 7)) and asked.draft == Share(2, (2, 3))
    assert not divide([0], Share(1), False, True).is_apart
    with pytest.raises(EdgeLLMError, match="leaves the target no core"):
        divide([0, 1], Share(2), False, False, None, (0, 1))
    with pytest.raises(EdgeLLMError, match="CPU 1 is both the target's"):
        divide([0, 1], Share(2, (0, 1)), True, False, None, (1,))


def test_the_target_waits_for_guesses_that_are_worth_it() -> None:
    assert worth_waiting_for(0, 0.9, 1.0, 0.05, 0.05, 1.0) > 0  # a quick draft model
    assert worth_waiting_for(0, 0.05, 1.0, 0.5, 0.5, 1.0) == 0  # one that is mostly wrong
    assert worth_waiting_for(4, 0.6, 1.0, 0.5, 0.5, 2.0) == 0  # there are some already
    assert worth_waiting_for(1, 0.7, 1.0, 0.5, 0.5, 1.5) == 0
    assert worth_waiting_for(1, 0.7, 1.0, 0.05, 0.5, 1.5) == 1  # one is nearly there


def test_a_check_tells_rates_times_and_gains(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model("llama")
    params = replace(GREEDY, max_tokens=24)
    with LLM(path, speculation=SpeculationOptions("draft", model=str(path))) as llm:
        found = draft_check(llm, PROMPTS[:2], params, lambda text: None)
    assert found.rates == [1.0] * 8 and found.n_tokens == 48  # it is the same model
    assert len(found.check_seconds) == 8 and found.step_seconds > 0 and found.advice
    other = SpeculationOptions("draft", model=str(tiny_model("llama", seed=9)))
    with LLM(path, speculation=other) as llm:
        found = draft_check(llm, PROMPTS[:2], params, lambda text: None)
        assert found.rates[0] < 0.3 and "too often wrong" in found.advice
        assert llm.is_idle
    with LLM(path) as llm, pytest.raises(EdgeLLMError, match="without a draft model"):
        draft_check(llm, PROMPTS[:1], params, lambda text: None)


def test_tokens_that_only_the_target_has_are_not_guessed_behind(
    tiny_model: Callable[..., Path], eager: None, cores: None
) -> None:
    """Both vocabularies match, and the target's ends with more unused tokens."""
    path = tiny_model("llama", controls=("[PAD1]", "[PAD2]"))
    options = SpeculationOptions("draft", model=str(tiny_model("llama")))
    with LLM(path) as plain, LLM(path, speculation=options) as llm:
        last = llm.n_vocab - 1
        for prompt, params in (
            ([5, last, 6], GREEDY),
            ([5, 6, 7], replace(SAMPLED, logit_bias=((last, 30.0),))),
            ([5, 6, 7], replace(SAMPLED, logit_bias=((last, 4.0),), repeat_penalty=1.5)),
        ):
            assert llm.generate(prompt, params).tokens == plain.generate(prompt, params).tokens
        assert llm.generate([5, 6, 7], GREEDY).tokens == plain.generate([5, 6, 7], GREEDY).tokens
        assert llm.is_idle and llm.runner.cache.faults() == []


def test_a_users_function_may_fail_on_guesses_alone(
    tiny_model: Callable[..., Path], eager: None, cores: None
) -> None:
    path, params = tiny_model("llama"), GREEDY
    with LLM(path) as plain:
        came = plain.generate(PROMPTS[1], params).tokens
    true = np.array([*PROMPTS[1], *came])

    def only_what_comes(logits: Any, tokens: Any, position: int) -> None:
        if tokens[-1] != true[len(tokens) - 1]:
            raise ValueError

    options = SpeculationOptions("draft", model=str(tiny_model("llama", seed=5)))
    with LLM(path, samplers=[only_what_comes], speculation=options) as llm:
        assert llm.generate(PROMPTS[1], params).tokens == came


def test_a_draft_model_with_a_shorter_context_rests_when_it_is_full(
    tiny_model: Callable[..., Path], eager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = Division(Share(1), Share(1, (0,)), True)
    monkeypatch.setattr(build, "divide", lambda *arguments: apart)
    path, n_steps = tiny_model("llama"), 0
    options = SpeculationOptions("draft", model=str(tiny_model("llama", n_ctx=64)))
    with LLM(path, speculation=options) as llm:
        drafter = llm.speculation.proposers[0].drafter  # type: ignore[union-attr]
        step = drafter.step

        def counted(*arguments: Any) -> Any:
            nonlocal n_steps
            n_steps += 1
            return step(*arguments)

        monkeypatch.setattr(drafter, "step", counted)
        [sequence] = llm.submit(
            tokens_of(2, 40, 250), replace(GREEDY, max_tokens=90), RequestOptions()
        )
        while len(sequence.tokens) < 100:
            llm.step()
        time.sleep(0.2)
        n_before = n_steps
        time.sleep(0.3)
        assert n_steps == n_before


def test_a_draft_model_gets_its_share_of_memory(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both caches hold as many tokens, and together take what one would have taken."""
    path, room = tiny_model("llama", n_ctx=1 << 20), 1 << 26
    monkeypatch.setattr("edgellm.context.available_bytes", lambda: room)
    with GGUF(path) as file:
        costs = bill(file)
    with LLM(path, speculation=SpeculationOptions("draft", model=str(path))) as llm:
        draft = llm.speculation.proposers[0].drafter.llm  # type: ignore[union-attr]
        assert llm.n_ctx == draft.n_ctx == llm.cache_tokens
        lines = {64 * n * llm.max_num_seqs for n in (1, LINES)}  # where they end
        assert draft.cache_tokens - llm.cache_tokens in lines
        both = 2 * (costs.weights + costs.arena) + 2 * llm.cache_tokens * costs.kv_per_token
        assert 0.85 * room < both < room
