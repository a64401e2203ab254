"""Rule 6 for whole requests: the same tokens alone and in any company, whatever of a prompt is
computed at once, known already, or computed again after a preemption."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import architectures
import pytest
from invariance import tokens_of

from edgellm import LLM, RequestOptions, SamplingParams

N_PROMPTS, N_OUTPUT = 50, 40
CASES: dict[str, dict[str, Any]] = {
    "batches of 2": {"max_num_seqs": 2},
    "batches of 4, one thread": {"max_num_seqs": 4, "n_threads": 1},
    "batches of 8": {"max_num_seqs": 8},
    "16 tokens a step": {"max_num_batched_tokens": 16},
    "64 tokens a step": {"max_num_batched_tokens": 64},
    "256 tokens a step": {"max_num_batched_tokens": 256},
    "no prefix cache": {"prefix_cache": False},
    "no room for all": {"cache_tokens": 320},
}


def prompts(n_vocab: int) -> list[list[int]]:
    """Of many lengths; they begin with one of three texts."""
    trunks = [tokens_of(seed, 200, n_vocab) for seed in range(3)]
    found = []
    for i in range(N_PROMPTS):
        n = 5 + i * 37 % 190
        found.append(trunks[i % 3][: n * (i % 4) // 4] + tokens_of(100 + i, 3 + n // 3, n_vocab))
    return found


def check_company(path: Path) -> None:
    params = SamplingParams(max_tokens=N_OUTPUT, temperature=0.9, seed=5, ignore_eos=True)
    with LLM(path, n_ctx=512, n_threads=2, prefix_cache=False) as llm:
        asked = prompts(llm.n_vocab)
        alone = [llm.generate(prompt, params).tokens for prompt in asked]
    for name, options in CASES.items():
        given = {"n_ctx": 512, "n_threads": 2, "cache_tokens": 16384, **options}
        with LLM(path, **given) as llm:
            for turn in ("miss", "hit"):
                found = [c.tokens for c in llm.generate(asked, params)]
                assert found == alone, f"{name}, {turn}"
            if given["cache_tokens"] == 320:
                assert llm.metrics.preemptions["memory"] > 0
            elif given.get("prefix_cache", True):
                assert llm.metrics.hit_rate > 0.3
            people = [
                llm.submit(p, params, RequestOptions(priority=lane))[0]
                for p, lane in zip(asked[:20], ["batch"] * 12 + ["interactive"] * 8, strict=True)
            ]
            while not all(s.finish_reason for s in people):
                llm.step()
            assert [s.output for s in people] == alone[:20], f"{name}, lanes"
            assert llm.is_idle and llm.runner.cache.faults() == [] and llm.metrics.faults == 0


@pytest.mark.parametrize("name", ["qwen35", "lfm2"])
def test_a_tiny_hybrid_answers_as_alone(tmp_path: Path, name: str) -> None:
    check_company(architectures.write(tmp_path / "model.gguf", name))


@pytest.mark.parametrize("architecture", ["gemma3"])
def test_a_tiny_model_answers_as_alone(tiny_model: Callable[..., Path], architecture: str) -> None:
    check_company(tiny_model(architecture, n_ctx=1024))


@pytest.mark.real
@pytest.mark.slow
def test_a_real_model_answers_as_alone(real_model: Callable[[str], Path]) -> None:
    check_company(real_model("SmolLM2"))


def test_choices_of_a_request(tiny_model: Callable[..., Path]) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
    with LLM(tiny_model("llama"), n_threads=2, max_num_seqs=3) as llm:
        prompt = tokens_of(1, 60, llm.n_vocab)
        choices = llm.generate(prompt, params, n=5)
        assert len({tuple(c.tokens) for c in choices}) == 5
        assert choices[0].tokens == llm.generate(prompt, params).tokens
        assert [c.n_cached for c in choices] == [0, 59, 59, 59, 59]
        several = llm.generate([prompt, prompt[:9]], params, n=2)
        assert [c.tokens for c in several[0]] == [c.tokens for c in choices[:2]]
        assert len(several[1]) == 2 and llm.is_idle
