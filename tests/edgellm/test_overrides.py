"""What a caller says instead of the file reaches the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import architectures
import numpy as np
import pytest

from edgellm import LLM
from edgellm.errors import EdgeLLMError
from edgellm.kernels.graph import Rope
from edgellm.overrides import parse
from edgellm.quant.gguf import GGUFError

TOKENS = list(range(40))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return architectures.write(tmp_path_factory.mktemp("overrides") / "qwen3.gguf", "qwen3")


def rope_of(llm: LLM) -> Rope:
    rope: Rope = next(op.attrs["rope"] for op in llm.graph.ops if op.kind == "rope")
    return rope


def test_rotation_flags(path: Path) -> None:
    with LLM(path) as llm:
        plain = llm.logits(TOKENS)
        assert rope_of(llm).base == 10000 and rope_of(llm).freq_scale == 1
    with LLM(path, rope_freq_base=5e5) as llm:
        assert rope_of(llm).base == 5e5
        assert not np.array_equal(llm.logits(TOKENS), plain)
    with LLM(path, rope_scale=4) as one, LLM(path, rope_freq_scale=0.25) as two:
        assert rope_of(one) == rope_of(two) and rope_of(one).freq_scale == 0.25
        assert rope_of(one).yarn is None
    with LLM(path, rope_scaling="none", rope_scale=4) as llm:
        assert np.array_equal(llm.logits(TOKENS), plain)


def test_yarn_flags_extend_the_context(path: Path) -> None:
    yarn = {"rope_scaling": "yarn", "rope_scale": 4.0, "yarn_orig_ctx": 256}
    with LLM(path, **yarn) as llm:  # type: ignore[arg-type]
        rope = rope_of(llm)
        assert llm.n_ctx == 1024 and rope.yarn is not None and rope.yarn.n_ctx == 256
        assert (rope.yarn.ext_factor, rope.yarn.beta_fast, rope.yarn.beta_slow) == (1, 32, 1)
        assert abs(rope.magnitude - (1 + 0.1 * np.log(4))) < 1e-6
    with LLM(
        path, yarn_ext_factor=0.5, yarn_beta_fast=16.0, yarn_beta_slow=2.0, yarn_attn_factor=1.5,
        **yarn,  # type: ignore[arg-type]
    ) as llm:  # fmt: skip
        rope = rope_of(llm)
        assert rope.yarn is not None
        assert (rope.yarn.ext_factor, rope.yarn.beta_fast, rope.yarn.beta_slow) == (0.5, 16, 2)
        assert abs(rope.magnitude - 1.5 * (1 + 0.1 * np.log(4))) < 1e-6


def test_yarn_flags_mean_what_they_do_in_llama_cpp(path: Path) -> None:
    """A mixture of 0 is linear interpolation, magnitude included; a mixture and a magnitude count
    whatever the kind of scaling; below 0 the file decides."""
    with LLM(path, rope_scale=4.0) as llm:
        linear = rope_of(llm)
    with LLM(path, rope_scaling="yarn", rope_scale=4.0, yarn_ext_factor=0.0) as llm:
        found = rope_of(llm)
        assert (found.freq_scale, found.yarn, found.magnitude) == (0.25, None, 1)
    with LLM(path, rope_scale=4.0, yarn_attn_factor=1.3) as llm:
        assert rope_of(llm).magnitude == 1.3 and rope_of(llm).yarn is None
    with LLM(path, rope_scale=4.0, yarn_ext_factor=1.0) as llm:
        assert rope_of(llm).yarn is not None and rope_of(llm).magnitude > 1.1
    with LLM(
        path, rope_scale=4.0, yarn_ext_factor=-1.0, yarn_attn_factor=-1.0, yarn_beta_fast=-1.0,
        yarn_beta_slow=-1.0,
    ) as llm:  # fmt: skip
        assert rope_of(llm) == linear


def test_metadata_by_key(path: Path) -> None:
    with LLM(path, kv_overrides={"qwen3.context_length": 128, "general.name": "Other"}) as llm:
        assert llm.n_ctx == 128 and llm.metadata["general.name"] == "Other"
    with pytest.raises(GGUFError, match=r"qwen3\.context_length cannot become 'long'"):
        LLM(path, kv_overrides={"qwen3.context_length": "long"})
    with pytest.raises(GGUFError, match=r"block_count is 0; allowed"):
        LLM(path, kv_overrides={"qwen3.block_count": 0})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rope_scaling": "ntk"}, "rope_scaling must be none, linear, yarn, longrope, not 'ntk'"),
        ({"rope_freq_base": 0}, "rope_freq_base must be above 0"),
        ({"yarn_ext_factor": float("nan")}, "yarn_ext_factor must be a finite number"),
        ({"rope_scale": float("inf")}, "rope_scale must be a finite number"),
        ({"yarn_orig_ctx": 1.5}, "yarn_orig_ctx must be a whole number"),
        ({"rope_scale": 2, "rope_freq_scale": 0.5}, "say the same"),
        ({"rope_base": 1}, "LLM has no argument 'rope_base'"),
        ({"kv_overrides": ["a=int:1"]}, "must map metadata keys"),
    ],
)
def test_what_makes_no_sense_is_refused(path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(EdgeLLMError, match=words):
        LLM(path, **given)


def test_override_kv_is_parsed_as_llama_cpp_writes_it() -> None:
    assert parse("a.b=int:-3") == ("a.b", -3)
    assert parse("a=float:1e6") == ("a", 1e6)
    assert parse("a=bool:true") == ("a", True)
    assert parse("a=str:x=y:z") == ("a", "x=y:z")
    for wrong in ("a", "a=1", "a=int:x", "a=bool:yes", "a=list:1", "=int:1"):
        with pytest.raises(EdgeLLMError, match="--override-kv"):
            parse(wrong)
