"""How many tokens lie together changes nothing but where they lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from invariance import tokens_of

from edgellm import LLM, SamplingParams
from edgellm.errors import EdgeLLMError
from edgellm.kernels.cpu.kv_types import BLOCKS

PARAMS = SamplingParams(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True)


@pytest.mark.parametrize("types", [{}, {"type_k": "q8_0", "type_v": "q4_0"}])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_same_tokens_in_blocks_of_any_size(
    tiny_model: Callable[..., Path], name: str, types: dict[str, str]
) -> None:
    path = tiny_model(name, n_ctx=1024)
    found = []
    for size in BLOCKS:
        with LLM(path, n_ctx=512, n_threads=2, block_size=size, **types) as llm:  # type: ignore[arg-type]
            prompts = [tokens_of(i, 40 + 60 * i, llm.n_vocab) for i in range(5)]
            answers = llm.generate([*prompts, prompts[4][:200]], PARAMS)
            again = llm.generate([*prompts[4], 7], PARAMS)
            found.append(([a.tokens for a in answers], again.tokens, llm.logits(prompts[3])))
            assert again.n_cached == len(prompts[4]) and llm.is_idle
    for tokens, more, logits in found[1:]:
        assert (tokens, more) == found[0][:2]
        assert np.array_equal(logits, found[0][2])


@pytest.mark.parametrize("size", [0, 8, 33, 256, True, "32"])
def test_other_sizes_are_refused(tiny_model: Callable[..., Path], size: object) -> None:
    with pytest.raises(EdgeLLMError, match="block_size must be 16, 32, 64 or 128, not"):
        LLM(tiny_model("llama"), block_size=size)  # type: ignore[arg-type]
