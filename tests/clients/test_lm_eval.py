"""lm-eval (local-completions) on a task of our own: its log-likelihoods are those of the model."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quiz
from client_env import serving

from edgellm import LLM

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python(python_of: Callable[..., Path]) -> Path:
    return python_of("lm_eval")


@pytest.fixture(scope="module", params=["tiny", pytest.param("SmolLM2", marks=pytest.mark.real)])
def model(
    request: pytest.FixtureRequest, tiny_model: Callable[..., Path],
    real_model: Callable[[str], Path],
) -> Path:  # fmt: skip
    return tiny_model("llama", n_ctx=512) if request.param == "tiny" else real_model(request.param)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[tuple[str, str], float]:
    """The log-likelihood of each answer behind its question, by the model's logits."""
    found = {}
    with LLM(model, n_ctx=512) as llm:
        for item in quiz.items():
            for choice in item["choices"]:
                tokens = llm.tokenize(f"{item['question']} {choice}", add_special=False)
                n_context = len(llm.tokenize(item["question"], add_special=False))
                logits = llm.logits(tokens).astype(np.float64)
                peaks = logits.max(-1, keepdims=True)
                sums = np.log(np.exp(logits - peaks).sum(-1)) + peaks[:, 0]
                found[item["question"], choice] = float(
                    sum(logits[i - 1, tokens[i]] - sums[i - 1]
                        for i in range(n_context, len(tokens)))
                )  # fmt: skip
    return found


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with serving(model, "-c", "512") as address:
        yield address


@pytest.mark.parametrize(
    ("options", "batch"),
    [("tokenized_requests=True", 16), ("tokenized_requests=False", 7),
     ("tokenized_requests=True,num_concurrent=6", 1)],
)  # fmt: skip
def test_log_likelihoods_are_those_of_the_model(
    python: Path,
    url: str,
    expected: dict[tuple[str, str], float],
    tmp_path: Path,
    options: str,
    batch: int,
) -> None:
    """Prompts as token ids and as texts, one by one, in batches and side by side; the tokenizer is
    the server's own, and nothing comes from a network."""
    quiz.write(tmp_path)
    out = tmp_path / "out"
    arguments = f"base_url={url}/completions,model=smol,tokenizer_backend=remote,{options}"
    command = [python, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments,
               "--tasks", "quiz", "--include_path", tmp_path, "--output_path", out,
               "--log_samples", "--batch_size", str(batch)]  # fmt: skip
    environment = {
        **os.environ, "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": "",
        "HF_HOME": str(tmp_path / "cache"), "OPENAI_API_KEY": "none",
    }  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    [log] = out.rglob("samples_quiz_*.jsonl")
    samples: list[dict[str, Any]] = [json.loads(line) for line in log.read_text().splitlines()]
    seen = {}
    for sample in samples:
        doc = sample["doc"]
        for choice, [answer] in zip(doc["choices"], sample["resps"], strict=True):
            seen[doc["question"], choice] = float(answer[0])
        right = [expected[doc["question"], choice] for choice in doc["choices"]]
        assert sample["acc"] == (int(np.argmax(right)) == doc["answer"])
    assert seen == pytest.approx(expected, abs=1e-3)
