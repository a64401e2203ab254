"""What a GPU computes of a token as part of a prompt and as a generated one: alike within the
tolerance, and bit for bit when that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from on_gpus import GREEDY, PROMPTS, is_close, load, write

from edgellm import LLM
from edgellm.errors import EdgeLLMError
from edgellm.kernels.cuda.emulated import EmulatedDevice
from edgellm.runner import Run
from edgellm.sequence import Sequence

Gpus = Callable[..., list[EmulatedDevice]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("strict")


def admitted(llm: LLM, tokens: list[int]) -> Sequence:
    sequence = llm.sequence(tokens, GREEDY)
    assert llm.runner.cache.admit(sequence, reuse=False)
    return sequence


def generated(llm: LLM, tokens: list[int], n_prompt: int) -> NDArray[np.float32]:
    """Logits behind the first n_prompt tokens in one step, then behind each other in its own."""
    sequence = admitted(llm, tokens[:n_prompt])
    rows = [llm.runner.forward([Run(sequence, n_prompt, "last")]).copy()]
    for token in tokens[n_prompt:]:
        sequence.tokens.append(token)
        rows.append(llm.runner.forward([Run(sequence, 1, "last")]).copy())
    llm.runner.cache.release(sequence)
    return np.concatenate(rows)


def prompted(llm: LLM, tokens: list[int], n_prompt: int) -> NDArray[np.float32]:
    """The same logits of a prompt in two chunks."""
    sequence = admitted(llm, tokens)
    n = n_prompt - 1
    llm.runner.forward([Run(sequence, n, "none")])
    rows = llm.runner.forward([Run(sequence, len(tokens) - n, "all")]).copy()
    llm.runner.cache.release(sequence)
    return rows


@pytest.mark.parametrize("name", ["llama", "qwen3moe", "gpt-oss"])
@pytest.mark.parametrize("n_gpu_layers", [2, 3])
def test_a_recomputed_token_has_its_bits_where_that_is_asked_for(
    folder: Path, gpus: Gpus, name: str, n_gpu_layers: int
) -> None:
    path = write(folder, name)
    tokens = [*PROMPTS[0], *PROMPTS[1][:12]]
    for strict in (False, True):
        gpus(1 << 24)
        with load(path, n_gpu_layers, strict=strict) as llm:
            one, other = (f(llm, tokens, len(PROMPTS[0])) for f in (generated, prompted))
            assert np.array_equal(one, other) == strict
            assert is_close(one, other)


def test_an_answer_goes_on_from_an_earlier_answer_with_the_same_bits(
    folder: Path, gpus: Gpus
) -> None:
    """A hit on tokens that were generated, against the same text computed anew."""
    path = write(folder, "llama")
    gpus(1 << 24)
    with load(path, strict=True) as llm:
        first = llm.generate(PROMPTS[0], GREEDY)
        turn = [*PROMPTS[0], *first.tokens, 5, 6, 7]
        hit = llm.generate(turn, GREEDY)
        assert hit.n_cached > len(PROMPTS[0])
        kept = llm.logits(turn)[-1]
    gpus(1 << 24)
    with load(path, strict=True, prefix_cache=False) as llm:
        assert llm.generate(turn, GREEDY).tokens == hit.tokens
        assert np.array_equal(llm.logits(turn)[-1], kept)


def test_a_saved_cache_keeps_to_what_was_asked_for(
    folder: Path, gpus: Gpus, tmp_path: Path
) -> None:
    """Keys and values of a prompt's own kernels are not those that strict bits promise."""
    path, saved = write(folder, "llama"), tmp_path / "kv"
    for strict in (False, True):
        gpus(1 << 24)
        with load(path, strict=strict) as llm:
            if strict:
                with pytest.raises(EdgeLLMError, match="--strict-bits"):
                    llm.load_cache(saved)
            llm.generate(PROMPTS[0], GREEDY)
            llm.save_cache(saved, PROMPTS[0])
    gpus(1 << 24)
    with load(path, strict=True) as llm:
        assert llm.load_cache(saved) == len(PROMPTS[0])


def test_without_a_gpu_it_changes_nothing(folder: Path) -> None:
    path = write(folder, "llama")
    found = []
    for strict in (False, True):
        with load(path, 0, strict=strict) as llm:
            found.append(llm.logits(PROMPTS[0]))
            tokens = [*PROMPTS[0], *PROMPTS[1][:12]]
            one, other = (f(llm, tokens, len(PROMPTS[0])) for f in (generated, prompted))
            assert np.array_equal(one, other)
    assert np.array_equal(*found)
