"""Real models against llama.cpp's float32 evaluation of the same weights (golden/real)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgellm import LLM

pytestmark = [pytest.mark.real, pytest.mark.slow]
MODELS = {"smollm2": "SmolLM2", "gemma3": "gemma-3-270m", "qwen05": "Coder-0.5B"}


@pytest.mark.parametrize("name", MODELS)
def test_top_tokens_and_likelihood(
    name: str, vectors: Path, real_model: Callable[[str], Path]
) -> None:
    golden = json.loads((vectors / f"golden/real/{name}.dev.json").read_text())
    with LLM(real_model(MODELS[name]), n_ctx=1024, n_threads=2) as llm:
        for prompt in golden["prompts"]:
            assert llm.tokenize(prompt["prompt"], parse_special=True) == prompt["tokens"]
            fed = prompt["tokens"] + prompt["greedy_f32"][:-1]
            best = llm.logits(fed)[len(prompt["tokens"]) - 1 :].argmax(axis=1)
            expected = np.array(prompt["greedy_f32"])
            decided = np.array(prompt["margins"]) > 0.5
            assert np.array_equal(best[decided], expected[decided]), prompt["prompt"]
        for text in golden["nll"]:
            source = (vectors / "golden" / "text" / Path(text["text"]).name).read_text()
            tokens = llm.tokenize(source[: text["first_chars"]], add_special=False)
            found = likelihood(llm, tokens[: text["n_tokens"]])
            exact = text["nll_f32"]
            bar = max(0.010, abs(text["nll_llama_cpp"] - exact))
            assert abs(found - exact) <= bar, (text["text"], exact, found)


def likelihood(llm: LLM, tokens: list[int]) -> float:
    """Mean negative log-likelihood over windows of 512 tokens, each from position 0."""
    total, n = 0.0, 0
    for start in range(0, len(tokens), 512):
        window = tokens[start : start + 512]
        if len(window) < 2:
            continue
        logits = llm.logits(window)[:-1].astype(np.float64)
        top = logits.max(axis=1)
        log_sum = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
        total += float((log_sum - logits[np.arange(len(logits)), window[1:]]).sum())
        n += len(logits)
    return total / n
