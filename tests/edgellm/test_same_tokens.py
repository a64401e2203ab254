"""Rule 6: a row's logits are bitwise the same whatever the company, the chunks, the threads or the
process."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from invariance import check_invariance, tokens_of

from edgellm import LLM, SamplingParams


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_rows_do_not_depend_on_company_chunks_or_threads(
    tiny_model: Callable[..., Path], architecture: str
) -> None:
    check_invariance(tiny_model(architecture, n_ctx=1024), 300)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("name", ["SmolLM2", "gemma-3-270m", "Coder-0.5B"])
def test_rows_of_real_models_do_not_depend_on_company(
    real_model: Callable[[str], Path], name: str
) -> None:
    check_invariance(real_model(name), 300)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_two_processes_compute_the_same_bits(
    tiny_model: Callable[..., Path], architecture: str
) -> None:
    path = tiny_model(architecture)
    tokens = tokens_of(5, 200, 258)
    script = (
        "import hashlib, sys; from edgellm import LLM\n"
        "with LLM(sys.argv[1], n_threads=2) as llm:\n"
        "    print(hashlib.sha256(llm.logits(eval(sys.argv[2])).tobytes()).hexdigest())"
    )
    run = [sys.executable, "-c", script, str(path), str(tokens)]
    other = subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()
    with LLM(path, n_threads=1) as llm:
        mine = hashlib.sha256(llm.logits(tokens).tobytes()).hexdigest()
    assert mine == other


@pytest.fixture(scope="module")
def shared(tiny_model: Callable[..., Path]):  # type: ignore[no-untyped-def]
    with LLM(tiny_model("gemma3", n_ctx=1024), n_ctx=512, n_threads=2, max_num_seqs=5) as llm:
        yield llm


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    prompts=st.lists(st.integers(1, 120), min_size=2, max_size=8),
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_completions_do_not_depend_on_company(
    shared: LLM, prompts: list[int], seed: int, temperature: float
) -> None:
    params = SamplingParams(max_tokens=20, temperature=temperature, seed=seed, ignore_eos=True)
    texts = [tokens_of(seed + i, n, 258) for i, n in enumerate(prompts)]
    together = [c.tokens for c in shared.generate(texts, params)]
    alone = [shared.generate(text, params).tokens for text in texts]
    assert together == alone
    assert shared.is_idle
