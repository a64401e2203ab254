"""Every architecture: the same bits in any cut and company, and files refused in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import architectures
import gguf
import numpy as np
import pytest
from invariance import check_invariance, tokens_of

from edgellm import LLM, SamplingParams
from edgellm.errors import EdgeLLMError
from edgellm.memory import bill
from edgellm.models import architectures as known
from edgellm.models import build_graph
from edgellm.models.config import ModelError
from edgellm.quant.gguf import GGUF, GGUFError
from edgellm.runner import Run

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
ENCODERS = ("bert", "nomic-bert")
DECODERS = [name for name in architectures.TINY if name not in ENCODERS]
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Make:
    folder = tmp_path_factory.mktemp("architectures")

    def make(name: str, **keys: object) -> Path:
        return architectures.write(folder / f"{name}-{len(keys)}.gguf", name, **keys)  # type: ignore[arg-type]

    return make


def test_every_architecture_has_a_tiny_model() -> None:
    assert {tiny.architecture or name for name, tiny in architectures.TINY.items()} == set(known())


@pytest.mark.parametrize("name", DECODERS)
def test_decoding_equals_prefill_in_any_chunks_and_company(model: Make, name: str) -> None:
    check_invariance(model(name), 300)


@pytest.mark.parametrize("name", ENCODERS)
def test_embeddings_do_not_depend_on_threads_or_company(model: Make, name: str) -> None:
    path, texts = model(name), [tokens_of(s, 20 + 90 * s, architectures.N_VOCAB) for s in range(4)]
    with LLM(path, n_threads=1) as one, LLM(path, n_threads=2) as two:
        together = two.embed(texts)
        assert together.shape == (4, architectures.N_EMBD)
        assert np.allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)
        for text, vector in zip(texts, together, strict=True):
            assert np.array_equal(one.embed(text), vector)
        with pytest.raises(EdgeLLMError, match="makes embeddings, not text: use LLM.embed"):
            one.generate([1, 2, 3], GREEDY)
        with pytest.raises(EdgeLLMError, match="makes embeddings, not text: use LLM.embed"):
            one.logits([1, 2, 3])
        assert one.is_idle


def test_an_encoder_sees_the_whole_text(model: Make) -> None:
    with LLM(model("bert")) as llm:
        first, second = llm.embed([[5, 6, 7, 8], [5, 6, 7, 9]])
        assert np.abs(first - second).max() > 1e-3


def test_a_generator_makes_no_embeddings(model: Make) -> None:
    with LLM(model("qwen3")) as llm, pytest.raises(EdgeLLMError, match="need an encoder"):
        llm.embed([1, 2])


# ---- recurrent state ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lfm2", "qwen35", "qwen35moe"])
def test_a_hybrid_model_after_a_rollback_equals_a_fresh_run(model: Make, name: str) -> None:
    start = tokens_of(1, 70, architectures.N_VOCAB)
    path = model(name)

    def fresh(prompt: list[int]) -> list[int]:
        with LLM(path, n_threads=1) as llm:
            return llm.generate(prompt, GREEDY).tokens

    with LLM(path, n_threads=2) as llm:
        first = llm.generate(start, GREEDY)
        whole = start + first.tokens
        # back to the middle, to another branch, and on from the end
        for prompt in (start[:50], start[:60] + [3, 4, 5], [*start, 9, 9], [*whole, 7, 8]):
            assert llm.generate(prompt, GREEDY).tokens == fresh(prompt)
        again = llm.generate(start, GREEDY)
        # a state was kept near the end of the prompt
        assert again.tokens == first.tokens and again.timings["cache_n"] == 64


def test_states_are_on_the_memory_bill(model: Make) -> None:
    with GGUF(model("qwen35")) as file:
        cost = bill(file)
    convolution, delta = 3 * (2 * 32 + 64), 4 * 16 * 16  # one layer of each kind has them
    assert cost.state == 2 * 4 * (convolution + delta)
    assert cost.total == cost.weights + cost.kv + cost.arena + cost.state
    with GGUF(model("deepseek2")) as file:  # latent vectors and rotated keys, as keys and values
        assert bill(file).kv_per_token == 2 * (64 + 16 + 64) * 2


def test_a_hybrid_model_goes_on_from_where_it_ended(model: Make) -> None:
    start = tokens_of(2, 70, architectures.N_VOCAB)
    with LLM(model("qwen35")) as llm:
        first = llm.generate(start, GREEDY)
        more = llm.generate([*start, *first.tokens, 5], GREEDY)
        assert more.timings["cache_n"] == len(start) + len(first.tokens) - 1


def test_a_step_that_failed_can_be_repeated(model: Make) -> None:
    """What it did to the states does not count."""
    tokens = tokens_of(3, 40, architectures.N_VOCAB)
    with LLM(model("qwen35")) as llm:
        whole = llm.logits(tokens)[-1]
        runner, sequence = llm.runner, llm.sequence(tokens, GREEDY)
        assert runner.cache.admit(sequence)
        runner.forward([Run(sequence, 30, "none")])

        def fail(rows: object) -> None:
            raise ZeroDivisionError

        remove = llm.on("output", fail)
        with pytest.raises(ZeroDivisionError):
            runner.forward([Run(sequence, 10, "last")])
        remove()
        assert np.array_equal(runner.forward([Run(sequence, 10, "last")])[0], whole)
        runner.cache.release(sequence)
        assert llm.is_idle and not runner.cache.faults()


# ---- refusals -----------------------------------------------------------------------------------


def rewritten(path: Path, change: Callable[[gguf.GGUFReader, gguf.GGUFWriter], set[str]]) -> Path:
    """The file once more; ``change`` adds tensors and returns the names to leave out."""
    reader, out = gguf.GGUFReader(path), path.with_suffix(".changed.gguf")
    writer = gguf.GGUFWriter(out, str(reader.fields["general.architecture"].contents()))
    for key, entry in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, entry.contents(), entry.types[0], *entry.types[1:2])
    left_out = change(reader, writer)
    for tensor in reader.tensors:
        if tensor.name not in left_out:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def test_an_unknown_architecture_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "rwkv7.gguf"
    architectures._write(path, "rwkv7", {}, {})
    with pytest.raises(ModelError) as caught:
        LLM(path)
    message = str(caught.value)
    assert "general.architecture is 'rwkv7', which is not supported; supported: bert, cohere2" in (
        message
    )
    assert "\n" not in message


def test_missing_misshaped_and_extra_tensors_are_named(model: Make) -> None:
    path = model("qwen3")

    def drop(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> set[str]:
        return {"blk.1.attn_q_norm.weight"}

    def bend(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> set[str]:
        writer.add_tensor("blk.0.ffn_norm.weight", np.ones(32, np.float32))
        return {"blk.0.ffn_norm.weight"}

    def extend(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> set[str]:
        writer.add_tensor("blk.0.spare.weight", np.ones(32, np.float32))
        return set()

    with pytest.raises(ModelError, match=r"blk\.1\.attn_q_norm\.weight is missing"):
        LLM(rewritten(path, drop))
    with pytest.raises(ModelError, match=r"ffn_norm\.weight has shape \[32\].*ask for \[64\]"):
        LLM(rewritten(path, bend))
    with LLM(rewritten(path, extend)) as llm:
        assert any("1 tensors of the file are not used: blk.0.spare" in n for n in llm.notices)


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [
        ("qwen3", {"attention__key_length": 24}, "heads must be a multiple of 16 long"),
        ("qwen3", {"attention__head_count": 3}, "3 heads cannot share 2 key-value heads"),
        ("qwen3", {"rope__scaling__type": "ntk"}, "supported: none, linear, yarn, longrope"),
        ("qwen3moe", {"expert_used_count": 9}, "expert_used_count is 9; allowed: .* at most 6"),
        ("qwen35", {"ssm__group_count": 3}, "ssm.inner_size must be 4 heads"),
        ("deepseek2", {"expert_group_count": 4}, "6 experts cannot be split so"),
    ],
)
def test_impossible_hyper_parameters_are_refused(
    tmp_path: Path, name: str, keys: dict[str, object], words: str
) -> None:
    good = architectures.write(tmp_path / "good.gguf", name)
    reader = gguf.GGUFReader(good)
    tiny = architectures.TINY[name]
    arch = tiny.architecture or name
    found = {
        key.removeprefix(f"{arch}."): entry.contents()
        for key, entry in reader.fields.items()
        if key.startswith(f"{arch}.") and "vocab" not in key
    }
    found |= {key.replace("__", "."): value for key, value in keys.items()}
    tensors = {
        t.name: (gguf.quants.dequantize(t.data, t.tensor_type).reshape(t.shape[::-1]),
                 architectures.Q.F32)
        for t in reader.tensors
    }  # fmt: skip
    bad = tmp_path / "bad.gguf"
    architectures._write(bad, arch, found, tensors)
    with GGUF(bad) as file, pytest.raises(GGUFError, match=words) as caught:
        build_graph(file)
    assert "\n" not in str(caught.value)


def test_learned_positions_end_the_context(model: Make) -> None:
    with LLM(model("gpt2"), n_ctx=4096) as llm:
        assert llm.n_ctx == 512 and any("learned no more" in n for n in llm.notices)
    with pytest.raises(EdgeLLMError, match="ring cannot be used"):
        LLM(model("gpt2"), context_policy="ring")
