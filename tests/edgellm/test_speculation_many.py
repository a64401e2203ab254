"""200 prompts: the same tokens with and without speculation, alone and four at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from invariance import tokens_of

from edgellm import LLM, SamplingParams
from edgellm.speculative.options import SpeculationOptions

N_PROMPTS = 200
GREEDY = SamplingParams(max_tokens=24, temperature=0)
SAMPLED = replace(GREEDY, temperature=0.8, seed=11)
WORDS = ("water", "a garden", "the moon", "trains", "bread", "music", "winter", "a bridge",
         "old maps", "the sea")  # fmt: skip
ASKS = ("Write about {}.", "Repeat this five times: {}, {}.", "List ten facts about {}:\n1.",
        "def about(thing):\n    return '{}'\n\ndef again(thing):\n")  # fmt: skip


def texts() -> list[str]:
    """Some quote themselves, some do not."""
    return [
        ASKS[i % len(ASKS)].format(*[WORDS[i // 4 % 10]] * 2) + " " * (i // 40)
        for i in range(N_PROMPTS)
    ]


def check(path: Path, prompts: list[list[int]], options: SpeculationOptions) -> None:
    for params in (GREEDY, SAMPLED):
        with LLM(path, n_ctx=512, max_num_seqs=4) as plain:
            expected = [c.tokens for c in plain.generate(prompts, params)]
        with LLM(path, n_ctx=512, max_num_seqs=4, speculation=options) as llm:
            assert [c.tokens for c in llm.generate(prompts, params)] == expected
            assert [llm.generate(p, params).tokens for p in prompts] == expected
            assert llm.is_idle and llm.runner.cache.faults() == []
            assert llm.metrics.speculation.drafted_tokens > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["lookup", "draft"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_tiny_models(
    tiny_model: Callable[..., Path], eager: None, architecture: str, kind: str
) -> None:
    path = tiny_model(architecture)
    # repeats make lookup find something
    prompts = [tokens_of(i, 3 + i % 20, 250) * (1 + i % 4) for i in range(N_PROMPTS)]
    model = str(tiny_model("llama", n_layers=1)) if kind == "draft" else None
    check(path, prompts, SpeculationOptions(kind, model=model, cores=None))


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["lookup", "auto"])
def test_a_real_model(real_model: Callable[[str], Path], eager: None, kind: str) -> None:
    """With itself as the draft model: what it guesses is right, so that drafts are long."""
    path = real_model("SmolLM2")
    with LLM(path) as llm:
        prompts = [llm.tokenize(text) for text in texts()]
    model = str(path) if kind == "auto" else None
    check(path, prompts, SpeculationOptions(kind, model=model))
