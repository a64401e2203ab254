"""What an earlier request computed is gone on with, and never changes an answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import architectures
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from invariance import tokens_of

from edgellm import LLM, SamplingParams

PARAMS = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
POLICIES = [("llama", "error"), ("gemma3", "error"), ("llama-moe", "error"), ("llama", "ring")]


@pytest.mark.parametrize(("architecture", "policy"), POLICIES)
def test_a_conversation_is_not_read_again(
    tiny_model: Callable[..., Path], architecture: str, policy: str
) -> None:
    path = tiny_model(architecture)
    options = {"n_ctx": 128 if policy == "ring" else 512, "context_policy": policy}
    with LLM(path, n_threads=2, max_num_seqs=1, **options) as llm:  # type: ignore[arg-type]
        tokens = list(range(1, 80))
        for turn in range(4):
            done = llm.generate(tokens, PARAMS)
            assert (done.timings["cache_n"] > 0) == (turn > 0)
            assert done.timings["cache_n"] + done.timings["prompt_n"] == len(tokens)
            with LLM(path, n_threads=1, **options) as fresh:  # type: ignore[arg-type]
                assert fresh.generate(tokens, PARAMS).tokens == done.tokens
            tokens = tokens + done.tokens + [7, 8, 9]
        assert llm.is_idle


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def pair(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]):  # type: ignore[no-untyped-def]
    path = tiny_model(request.param)
    with LLM(path, n_ctx=256, max_num_seqs=3) as llm, LLM(path, n_ctx=256) as plain:
        plain._ready().cache.reuse = False
        yield llm, plain


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    starts=st.lists(
        st.tuples(st.sampled_from([0, 33, 64, 100, 150]), st.integers(0, 3), st.integers(1, 60)),
        min_size=2,
        max_size=6,
    )
)
def test_any_mixture_of_requests_answers_as_without_reuse(
    pair: tuple[LLM, LLM], starts: list[tuple[int, int, int]]
) -> None:
    llm, plain = pair
    trunk = [(i * 37) % 250 for i in range(150)]
    prompts = [trunk[:n] + [b] * m for n, b, m in starts]
    half = len(prompts) // 2
    found = llm.generate(prompts[:half], PARAMS) + llm.generate(prompts[half:], PARAMS)
    assert [c.tokens for c in found] == [c.tokens for c in plain.generate(prompts, PARAMS)]
    assert llm.is_idle and plain.is_idle


def test_a_hook_sees_every_token_again(tiny_model: Callable[..., Path]) -> None:
    with LLM(tiny_model("llama"), n_threads=1) as llm:
        plain, seen = llm.generate(list(range(90)), PARAMS), []
        remove = llm.on("blk.0.resid", lambda x: seen.append(len(x)))
        assert llm.generate(list(range(90)), PARAMS).tokens == plain.tokens
        assert sum(seen) == 90 + 11
        remove()
        assert llm.generate(list(range(90)), PARAMS).timings["cache_n"] == 0
        assert llm.generate(list(range(90)), PARAMS).timings["cache_n"] == 89


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "qwen35", "qwen3", "lfm2"])
def test_a_chat_whose_answers_are_rewritten_is_not_read_again(tmp_path: Path, name: str) -> None:
    """Templates drop the thinking of earlier answers: each prompt departs from what was computed
    behind the user's last message, in windows that have moved on and states that have changed."""
    path = architectures.write(tmp_path / "model.gguf", name)
    answers = SamplingParams(max_tokens=150, temperature=1.0, seed=3, ignore_eos=True)
    with LLM(path, n_ctx=2048, n_threads=2, max_num_seqs=1) as llm:
        end = min(llm.tokenizer.eog, default=0)
        ordinary = [t for t in range(llm.n_vocab) if t not in llm.tokenizer.eog]

        def message(seed: int, n: int) -> list[int]:
            return [ordinary[t] for t in tokens_of(seed, n, len(ordinary))] + [end]

        prompt = message(0, 799)
        for turn in range(5):
            prompt += message(10 + turn, 30)
            done = llm.generate([*prompt, 3, 4], answers)
            if turn:
                assert done.n_prompt - done.n_cached <= 0.4 * done.n_prompt, turn
            with LLM(path, n_ctx=2048, n_threads=1, prefix_cache=False) as fresh:
                assert fresh.generate([*prompt, 3, 4], answers).tokens == done.tokens
            prompt += message(20 + turn, 40)
        assert llm.is_idle and llm.runner.cache.faults() == []
