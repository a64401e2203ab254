"""LoRA adapters: at run time and merged, against weights merged by numpy; refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import adapters
import numpy as np
import pytest

from edgellm import LLM, SamplingParams
from edgellm.errors import EdgeLLMError
from edgellm.kernels import reference
from edgellm.lora import Adapter, LoRAError, parse
from edgellm.lora_merge import merge
from edgellm.models import build_graph
from edgellm.quant import by_name
from edgellm.quant.gguf import GGUF
from edgellm.quant.writer import NewTensor, Writer

Make = Callable[..., Path]
TOKENS = np.random.default_rng(1).integers(0, 256, 90)
FLOATS = {"types": (adapters.Q.F32,), "n_embd": 64, "n_ff": 96}
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def merged_logits(base: Path, given: list[tuple[Path, float]]) -> Any:
    """By the specification, with the merged weights in place of the file's."""
    weights = adapters.merged(base, given)
    with GGUF(base) as file:
        _, graph = build_graph(file)
        return reference.run(
            graph, TOKENS, lambda w: weights[w.name].reshape(w.shape[::-1]).astype(np.float32)
        )


def nmse(found: Any, expected: Any) -> float:
    return float(np.sum((found - expected) ** 2) / np.sum(expected**2))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3"])
def test_an_adapter_equals_merged_weights(
    tiny_model: Make, tmp_path: Path, architecture: str
) -> None:
    base = tiny_model(architecture, **FLOATS)
    adapter = adapters.write(tmp_path / "a.gguf", base, names=(*adapters.ALL, "output"))
    expected = merged_logits(base, [(adapter, 1.0)])
    with LLM(base, n_threads=1) as plain, LLM(base, n_threads=2, lora=[str(adapter)]) as llm:
        found = llm.logits(TOKENS.tolist())
        assert nmse(found, expected) < 1e-5  # keys and values in f16
        assert nmse(plain.logits(TOKENS.tolist()), expected) > 1e-2  # it does something


@pytest.mark.parametrize("kind", [adapters.Q.F16, adapters.Q.BF16, adapters.Q.Q8_0])
def test_number_formats_of_adapters(tiny_model: Make, tmp_path: Path, kind: Any) -> None:
    base = tiny_model("llama", **FLOATS)
    adapter = adapters.write(tmp_path / "a.gguf", base, kind=kind, rank=32)
    with LLM(base, n_threads=1, lora=[str(adapter)]) as llm:
        found = llm.logits(TOKENS.tolist())
    bound = 1e-3 if kind == adapters.Q.Q8_0 else 1e-5  # its inputs are 8 bits too
    assert nmse(found, merged_logits(base, [(adapter, 1.0)])) < bound


def test_several_adapters_and_scales_add_up(tiny_model: Make, tmp_path: Path) -> None:
    base = tiny_model("llama", **FLOATS)
    one = adapters.write(tmp_path / "1.gguf", base, seed=1, rank=3, names=("attn_q", "ffn_down"))
    two = adapters.write(tmp_path / "2.gguf", base, seed=2, alpha=0.0, names=("attn_q", "ffn_up"))
    given = [f"{one}:0.5", Adapter(str(two), -0.25)]
    with LLM(base, n_threads=1, lora=given) as llm:
        found = llm.logits(TOKENS.tolist())
    assert nmse(found, merged_logits(base, [(one, 0.5), (two, -0.25)])) < 1e-5
    with LLM(base, n_threads=1) as plain, LLM(base, n_threads=1, lora=f"{one}:0") as nothing:
        assert np.array_equal(plain.logits(TOKENS.tolist()), nothing.logits(TOKENS.tolist()))


def test_quantized_bases_keep_their_kernels(tiny_model: Make, tmp_path: Path) -> None:
    base = tiny_model("llama")
    adapter = adapters.write(tmp_path / "a.gguf", base)
    with LLM(base, n_threads=1, lora=[str(adapter)]) as llm:
        found = llm.logits(TOKENS.tolist())
    assert nmse(found, merged_logits(base, [(adapter, 1.0)])) < 1e-3


def test_the_same_bits_in_any_company(tiny_model: Make, tmp_path: Path) -> None:
    base = tiny_model("llama")
    adapter = adapters.write(tmp_path / "a.gguf", base)
    prompts = [TOKENS[: 20 + 9 * i].tolist() for i in range(5)]
    with LLM(base, n_threads=1, lora=[str(adapter)], prefix_cache=False) as llm:
        alone = [llm.generate(prompt, GREEDY).tokens for prompt in prompts]
        rows = llm.logits(prompts[-1])
    options = {"n_threads": 2, "max_num_batched_tokens": 16}
    with LLM(base, lora=[str(adapter)], **options) as llm:  # type: ignore[arg-type]
        assert [done.tokens for done in llm.generate(prompts, GREEDY)] == alone
        assert np.array_equal(llm.logits(prompts[-1]), rows)


def test_every_op_agrees_with_the_specification(
    tiny_model: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("EDGELLM_TRACE", "ops")
    base = tiny_model("gemma3")
    adapter = adapters.write(tmp_path / "a.gguf", base)
    with LLM(base, n_threads=2, lora=adapter) as llm:
        llm.generate(TOKENS[:40].tolist(), GREEDY)
    assert "agree with the reference" in capfd.readouterr().err


def test_on_the_gpu_it_equals_merged_weights(
    tiny_model: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, emulator: None
) -> None:
    monkeypatch.setenv("EDGELLM_DEVICE", "emulated")
    base = tiny_model("llama")
    adapter = adapters.write(tmp_path / "a.gguf", base, rank=8)
    with LLM(base, n_threads=1, n_gpu_layers=99, lora=[str(adapter)]) as llm:
        assert llm.placement.plan.uses_device
        found = llm.logits(TOKENS[:40].tolist())
    assert nmse(found, merged_logits(base, [(adapter, 1.0)])[:40]) < 1e-3


def test_hooks_see_the_sum(tiny_model: Make, tmp_path: Path) -> None:
    base = tiny_model("llama", **FLOATS)
    adapter = adapters.write(tmp_path / "a.gguf", base, names=("attn_v",))
    seen: list[Any] = []
    with LLM(base, n_threads=1, lora=[str(adapter)]) as llm:
        llm.on("blk.0.attn_v", lambda x: seen.append(x.copy()))
        llm.logits([1, 2, 3])
    with LLM(base, n_threads=1) as llm:
        llm.on("blk.0.attn_v", lambda x: seen.append(x.copy()))
        llm.logits([1, 2, 3])
    assert np.abs(seen[0] - seen[1]).max() > 1e-3


def test_saved_caches_belong_to_their_adapters(tiny_model: Make, tmp_path: Path) -> None:
    base = tiny_model("llama")
    adapter = adapters.write(tmp_path / "a.gguf", base)
    saved, tokens = tmp_path / "talk.kv", TOKENS[:70].tolist()
    with LLM(base, n_threads=1, lora=[f"{adapter}:0.5"]) as llm:
        llm.generate(tokens, GREEDY)
        llm.save_cache(saved, tokens)
    with LLM(base, n_threads=1, lora=[f"{adapter}:0.5"]) as llm:
        llm.load_cache(saved)
    for others in ([], [str(adapter)]):
        with LLM(base, n_threads=1, lora=others) as llm:
            with pytest.raises(EdgeLLMError, match="saved by another model"):
                llm.load_cache(saved)


# ---- merging ------------------------------------------------------------------------------------


def test_merging_equals_numpy_and_keeps_types(tiny_model: Make, tmp_path: Path) -> None:
    base = tiny_model("llama", types=(*adapters.PACKED, adapters.Q.F16, adapters.Q.F32))
    adapter = adapters.write(tmp_path / "a.gguf", base)
    out = tmp_path / "merged.gguf"
    changed = merge(str(base), [f"{adapter}:0.5"], str(out), n_threads=2)
    assert sum(changed.values()) == 14
    expected = adapters.merged(base, [(adapter, 0.5)])
    with GGUF(base) as old, GGUF(out) as new:
        assert dict(old.encoded_metadata()) == dict(new.encoded_metadata())
        for name, info in new.tensors.items():
            assert (info.type, info.shape) == (old.tensors[name].type, old.tensors[name].shape)
            raw = np.empty((info.rows, info.row_bytes), np.uint8)
            new.read_into(info, 0, raw.reshape(-1))
            stored = info.type.quantize(expected[name].astype(np.float32).reshape(info.rows, -1))
            # a sum in float32 may round to another code here and there
            assert nmse(info.type.dequantize(raw), info.type.dequantize(stored)) < 1e-5, name


def test_merging_gives_the_logits_of_the_adapter(tiny_model: Make, tmp_path: Path) -> None:
    base = tiny_model("qwen2", **FLOATS)
    adapter = adapters.write(tmp_path / "a.gguf", base)
    merge(str(base), [str(adapter)], str(tmp_path / "merged.gguf"))
    with (
        LLM(tmp_path / "merged.gguf", n_threads=1) as llm,
        LLM(base, n_threads=1, lora=[str(adapter)]) as adapted,
    ):
        found, expected = (m.logits(TOKENS.tolist()) for m in (llm, adapted))
    assert nmse(found, expected) < 1e-5


def test_types_without_an_encoder_are_refused_before_anything_is_written(
    tiny_model: Make, tmp_path: Path
) -> None:
    base, path = tiny_model("llama", n_embd=256, n_ff=256), tmp_path / "iq2.gguf"
    adapter = adapters.write(tmp_path / "a.gguf", base, names=("ffn_up",))
    with GGUF(base) as file:
        new = [
            NewTensor(t.name, t.shape, by_name("iq2_xxs") if "ffn_up" in t.name else t.type)
            for t in file.tensors.values()
        ]
        with Writer(path, file.encoded_metadata(), new) as out:
            for tensor in new:
                out.write(bytes(tensor.n_bytes))
    with pytest.raises(
        LoRAError, match=r"ffn_up\.weight is IQ2_XXS, which cannot be written again"
    ):
        merge(str(path), [str(adapter)], str(tmp_path / "merged.gguf"))
    assert not list(tmp_path.glob("merged*"))


def test_sums_out_of_range_are_refused(tiny_model: Make, tmp_path: Path) -> None:
    base = tiny_model("llama", **FLOATS)
    adapter = adapters.write(tmp_path / "a.gguf", base)
    for scale, message in ((1.6e38, "after merging has numbers out of range"), (1e39, "float32")):
        given = [Adapter(str(adapter), scale)] * 100
        with pytest.raises(LoRAError, match=message):
            merge(str(base), given, str(tmp_path / "merged.gguf"))
    assert not list(tmp_path.glob("merged*"))


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general_type": "model"}, "is a model, no adapter"),
        ({"adapter_type": "control"}, "adapter.type is 'control'; supported: lora"),
        ({"general_architecture": "qwen2"}, "is an adapter for qwen2 models; .* is llama"),
        ({"alpha": float("nan")}, "adapter.lora.alpha is nan; a finite number"),
        ({"names": ("token_embd",)}, "corrects token_embd.weight; adapters for embeddings"),
        ({"names": ()}, "has no tensors"),
    ],
)
def test_what_is_no_adapter_of_the_base_is_refused(
    tiny_model: Make, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    base = tiny_model("llama")
    adapter = adapters.write(tmp_path / "a.gguf", base, **changes)
    with pytest.raises(ValueError, match=message):
        LLM(base, lora=[str(adapter)])


def test_shapes_names_and_numbers_have_to_fit(tiny_model: Make, tmp_path: Path) -> None:
    base, other = tiny_model("llama"), tiny_model("llama", n_embd=192, n_layers=3)
    adapter = adapters.write(tmp_path / "a.gguf", other, names=("attn_q",))
    with pytest.raises(LoRAError, match=r"attn_q.weight of shape \[128, 128\] has A \[192, 4\]"):
        LLM(base, lora=[str(adapter)])
    deeper = tiny_model("llama", n_layers=3)
    adapters.write(tmp_path / "b.gguf", deeper, names=("attn_q",))
    with pytest.raises(LoRAError, match=r"corrects blk\.2\.attn_q\.weight, which .* not have"):
        LLM(base, lora=[str(tmp_path / "b.gguf")])
    data = bytearray(adapters.write(tmp_path / "c.gguf", base, names=("ffn_up",)).read_bytes())
    data[-4:] = np.float32(np.nan).tobytes()
    (tmp_path / "c.gguf").write_bytes(data)
    with pytest.raises(LoRAError, match=r"lora_b has numbers that are not finite"):
        LLM(base, lora=[str(tmp_path / "c.gguf")])
    with pytest.raises(
        ValueError, match="none.gguf: file does not exist|none.gguf.*does not exist"
    ):
        LLM(base, lora=[str(tmp_path / "none.gguf")])


def test_files_and_scales_are_told_apart(tmp_path: Path) -> None:
    assert parse("a.gguf") == Adapter("a.gguf")
    assert parse("a.gguf:0.5") == Adapter("a.gguf", 0.5)
    assert parse(r"C:\a.gguf") == Adapter(r"C:\a.gguf")
    (tmp_path / "b:2").write_text("")
    assert parse(f"{tmp_path}/b:2") == Adapter(f"{tmp_path}/b:2")
    with pytest.raises(LoRAError, match="is inf; a finite number"):
        parse("a.gguf:inf")


def test_what_is_no_file_is_refused(tiny_model: Make) -> None:
    for given in (5, [None], ""):
        with pytest.raises(LoRAError, match="is given as FILE or FILE:scale"):
            LLM(tiny_model("llama"), lora=given)  # type: ignore[arg-type]
