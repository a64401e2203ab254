"""Types of keys and values through the whole engine: the same bits in any company, room, refusals,
and real models against float32 and llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import architectures
import numpy as np
import pytest
from invariance import check_invariance, tokens_of

from edgellm import LLM, SamplingParams
from edgellm.cache_types import CACHE_TYPES
from edgellm.context import fit_context
from edgellm.errors import EdgeLLMError
from edgellm.kernels.cpu.kv_types import KV_TYPES
from edgellm.kv_advise import divergence, log_softmax
from edgellm.memory import bill
from edgellm.models import build_graph
from edgellm.quant.gguf import GGUF

Make = Callable[..., Path]
Real = Callable[[str], Path]
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


def test_names_are_the_same_in_every_layer() -> None:
    assert KV_TYPES == CACHE_TYPES


@pytest.mark.parametrize("types", [("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q8_0", "f32")])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_rows_do_not_depend_on_company_chunks_or_threads(
    tiny_model: Make, architecture: str, types: tuple[str, str]
) -> None:
    check_invariance(tiny_model(architecture, n_ctx=1024), 300, type_k=types[0], type_v=types[1])


def test_a_ring_depends_on_position_only(tiny_model: Make) -> None:
    path, start = tiny_model("gemma3"), list(range(60))
    with LLM(
        path, n_ctx=100, n_threads=2, context_policy="ring", type_k="q8_0", type_v="q4_0"
    ) as llm:
        first = llm.generate(start, SamplingParams(max_tokens=120, temperature=0, ignore_eos=True))
        again = llm.generate(start + first.tokens[:80], GREEDY)
    assert again.tokens == first.tokens[80:]


@pytest.mark.parametrize(
    ("types", "of_16_bits"),
    [(("q8_0", "q8_0"), 34 / 64), (("q4_0", "q4_0"), 18 / 64), (("f32", "f32"), 2.0),
     (("q8_0", "q4_0"), 26 / 64)],
)  # fmt: skip
def test_the_same_memory_holds_more_tokens(
    tiny_model: Make, monkeypatch: pytest.MonkeyPatch, types: tuple[str, str], of_16_bits: float
) -> None:
    """Exactly: q8_0 takes 34 bytes where f16 takes 64."""
    path = tiny_model("llama", n_ctx=1 << 20)
    monkeypatch.setattr("edgellm.context.available_bytes", lambda: 1 << 26)
    with GGUF(path) as file:
        config, _ = build_graph(file)
        wide, small = bill(file), bill(file, None, *types)
        assert small.kv_per_token == wide.kv_per_token * of_16_bits
        assert small.kv == wide.kv * of_16_bits and small.weights == wide.weights
        usual = fit_context(file, config, None, 1, "f16", "f16", False)
        other = fit_context(file, config, None, 1, *types, False)
    assert other.n_blocks / usual.n_blocks == pytest.approx(1 / of_16_bits, rel=1e-3)
    with LLM(path, n_ctx=1024, type_k=types[0], type_v=types[1]) as llm:
        (group,) = llm.runner.program.groups.values()
        layers, n_bytes = len(group.keys), group.keys[0].nbytes + group.values[0].nbytes
        assert layers * n_bytes == small.kv_per_token * group.n_blocks * 32


@pytest.mark.parametrize(("flag", "types"), [("-ctk", ("q8_0", "f16")), ("-ctv", ("f16", "q4_0"))])
def test_heads_that_cannot_be_cut_are_refused(
    tmp_path: Path, flag: str, types: tuple[str, str]
) -> None:
    path = architectures.write(tmp_path / "model.gguf", "qwen3")  # heads of 16
    with pytest.raises(EdgeLLMError, match=rf"qwen3 model have 16 a head.*\({flag}\)"):
        LLM(path, type_k=types[0], type_v=types[1])


def test_a_context_that_does_not_fit_names_the_types(
    tiny_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgellm.context.available_bytes", lambda: 1 << 24)
    with pytest.raises(EdgeLLMError, match="-ctk q8_0 -ctv q8_0"):
        LLM(tiny_model("llama"), n_ctx=1 << 20)
    with pytest.raises(EdgeLLMError, match=r"\(-c\)\.$"):
        LLM(tiny_model("llama"), n_ctx=1 << 20, type_k="q4_0", type_v="q8_0")


def test_a_step_with_eight_bits_is_near_that_with_sixteen(tiny_model: Make) -> None:
    path, tokens = tiny_model("llama"), tokens_of(4, 200, 258)
    with LLM(path) as wide, LLM(path, type_k="q8_0", type_v="q8_0") as small:
        exact, found = (log_softmax(llm.logits(tokens)) for llm in (wide, small))
    assert 0 < divergence(exact, found).mean() < 2e-3


# ---- real models --------------------------------------------------------------------------------

TEXT = Path(__file__).parents[2] / "CONTRIBUTING.md"


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize(("name", "most"), [("SmolLM2", 0.01), ("gemma-3-270m", 0.02)])
def test_a_real_model_says_the_same_with_eight_bits(
    real_model: Real, name: str, most: float
) -> None:
    path = real_model(name)
    with LLM(path, n_ctx=1024) as wide, LLM(path, n_ctx=1024, type_k="q8_0", type_v="q8_0") as llm:
        tokens = llm.tokenize(TEXT.read_text())[:600]
        exact, found = (log_softmax(m.logits(tokens)[300:]) for m in (wide, llm))
        assert divergence(exact, found).mean() < most
        if name == "SmolLM2":
            assert "Paris" in llm.generate("The capital of France is", GREEDY).text


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
def test_the_loss_is_that_of_llama_cpp_with_the_same_types(
    real_model: Real, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")  # it turns heads before it quantizes them
    llama_cpp = pytest.importorskip("llama_cpp")
    path = real_model("SmolLM2")
    with LLM(path, n_ctx=600, type_k=kind, type_v=kind) as llm:
        tokens = llm.tokenize(TEXT.read_text())[:512]
        mine = loss(llm.logits(tokens), tokens)
    number = {"f16": 1, "q8_0": 8, "q4_0": 2}[kind]
    other = llama_cpp.Llama(
        str(path), n_ctx=600, n_batch=512, logits_all=True, type_k=number, type_v=number,
        flash_attn=True, n_threads=2, verbose=False,
    )  # fmt: skip
    other.eval(tokens)
    theirs = loss(np.array(other.scores[: len(tokens)]), tokens)
    other.close()
    assert mine == pytest.approx(theirs, rel=0.015)


def loss(logits: np.ndarray, tokens: list[int]) -> float:  # type: ignore[type-arg]
    """Mean negative log-likelihood of each token behind those before it."""
    rows = log_softmax(logits[:-1])
    return -float(rows[np.arange(len(rows)), tokens[1:]].mean())
