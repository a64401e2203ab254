"""`convert-lora` and `export-lora`: PEFT's directories against Hugging Face weights merged by
numpy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from edgellm import LLM
from edgellm.cli.main import run
from edgellm.convert.adapter import convert_adapter
from edgellm.convert.errors import ConvertError
from edgellm.convert.model import convert_model
from edgellm.lora import LoRAError

from . import directories, forward

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "gate_up_proj", "down_proj")


def write_peft(folder: Path, weights: directories.Weights, **settings: Any) -> directories.Weights:
    """A PEFT directory; returns the weights with it merged in."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(9)
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", **settings}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    rank = settings["r"]
    scale = settings["lora_alpha"] / (rank**0.5 if settings.get("use_rslora") else rank)
    stored: directories.Weights = {}
    merged = dict(weights)
    for name, values in weights.items():
        module = name.removesuffix(".weight")
        if not module.endswith(MODULES):
            continue
        n_out, n_in = values.shape
        a = (rng.standard_normal((rank, n_in)) / n_in**0.5).astype(np.float32)
        b = (0.2 * rng.standard_normal((n_out, rank))).astype(np.float32)
        stored[f"base_model.model.{module}.lora_A.weight"] = a
        stored[f"base_model.model.{module}.lora_B.weight"] = b
        merged[name] = (values + scale * (b.astype(np.float64) @ a)).astype(np.float32)
    save_file(stored, folder / "adapter_model.safetensors")
    return merged


def nmse(found: Any, expected: Any) -> float:
    return float(np.sum((found - expected) ** 2) / np.sum(expected**2))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "phi3"])
def test_adapters_equal_merged_original_weights(
    tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = directories.write(tmp_path / "hf", family)
    merged = write_peft(tmp_path / "peft", weights, use_rslora=family == "qwen3")
    base = convert_model(tmp_path / "hf", tmp_path / "base.gguf", outtype="f32")
    adapter, out = tmp_path / "adapter.gguf", tmp_path / "merged.gguf"
    assert run(["convert-lora", str(tmp_path / "peft"), str(adapter), "--base", str(base)]) == 0
    assert capsys.readouterr().out == f"{adapter}\n"
    config = json.loads((tmp_path / "hf/config.json").read_text())
    tokens = np.random.default_rng(3).integers(0, 300, 60)
    expected = forward.logits(family, config, merged, tokens)
    with LLM(base, n_threads=1, n_ctx=64, lora=[str(adapter)]) as llm:
        assert nmse(llm.logits(tokens.tolist()), expected) < 1e-5
    flags = ["-m", str(base), "--lora-scaled", f"{adapter}:1.0", "-o", str(out), "-t", "2"]
    assert run(["export-lora", *flags]) == 0
    said = capsys.readouterr()
    assert said.out == f"{out}\n" and "F32 matrices, which keep their type" in said.err
    with LLM(out, n_threads=1, n_ctx=64) as llm:
        assert nmse(llm.logits(tokens.tolist()), expected) < 1e-5


def test_what_peft_writes_otherwise_is_refused(tmp_path: Path) -> None:
    weights = directories.write(tmp_path / "hf", "llama")
    base = convert_model(tmp_path / "hf", tmp_path / "base.gguf")
    peft, out = tmp_path / "peft", tmp_path / "a.gguf"
    for settings, message in (
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; supported: LORA"),
        ({"use_dora": True}, "use_dora is True, which is not supported"),
        ({"bias": "all"}, "bias is 'all'; supported: none"),
        ({"lora_alpha": "x"}, "lora_alpha is 'x'; a number is needed"),
        ({"lora_alpha": 0}, "lora_alpha is 0: the adapter changes nothing"),
        ({"init_lora_weights": "pissa_niter_16"}, "by which the base's weights were changed"),
        ({"alora_invocation_tokens": [1]}, r"alora_invocation_tokens is \[1\], which is not"),
        ({"use_rslora": True, "r": 99}, r"r is 99, but the tensors have ranks \[4\]"),
        ({"use_rslora": True, "rank_pattern": {"q_proj": 2}}, "rank_pattern is"),
    ):
        write_peft(peft, weights)
        path = peft / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
        with pytest.raises(ConvertError, match=message):
            convert_adapter(peft, out, str(base))
    write_peft(peft, {"model.layers.0.mlp.odd.q_proj.weight": np.zeros((4, 4), np.float32)})
    with pytest.raises(ConvertError, match=r"odd\.q_proj\.lora_A\.weight is not known of llama"):
        convert_adapter(peft, out, str(base))
    write_peft(peft, {"model.layers.0.self_attn.q_proj.weight": np.zeros((64, 32), np.float32)})
    with pytest.raises(LoRAError, match=r"for blk\.0\.attn_q\.weight of shape \[64, 64\] has A"):
        convert_adapter(peft, out, str(base))
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    for value, rank, error, message in (
        (np.nan, 4, ConvertError, r"q_proj\.lora_A\.weight has numbers that are not finite"),
        (1.0, 0, LoRAError, r"has A \[64, 0\] and B \[0, 64\]; needed: \[64, rank\]"),
    ):
        a, b = np.full((rank, 64), value, np.float32), np.ones((64, rank), np.float32)
        save_file(
            {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b},
            peft / "adapter_model.safetensors",
        )
        with pytest.raises(error, match=message):
            convert_adapter(peft, out, str(base))
    assert not list(tmp_path.glob("a.gguf*"))


def test_flags_of_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = directories.write(tmp_path / "hf", "qwen2")
    base = convert_model(tmp_path / "hf", tmp_path / "base.gguf")
    write_peft(tmp_path / "peft", weights)
    adapter = convert_adapter(tmp_path / "peft", tmp_path / "a.gguf", str(base))

    def answer(*flags: str) -> str:
        line = ["run", str(base), "-p", "The", "--raw", "-n", "12", "--temp", "0", "--ignore-eos"]
        assert run([*line, "-c", "64", *flags]) == 0
        return capsys.readouterr().out

    plain, whole = answer(), answer("--lora", str(adapter))
    assert whole != plain
    assert answer("--lora", f"{adapter}:0") == plain
    assert answer("--lora", f"{adapter}:0.5,{adapter}:0.5") == whole
    assert answer("--lora", f"{adapter}:0.5", "--lora-scaled", f"{adapter}:0.5") == whole
    assert run(["run", str(base), "-p", "x", "--lora", str(base)]) == 2
    assert "is a model, no adapter" in capsys.readouterr().err
    assert run(["export-lora", "-m", str(base), "-o", str(base), "--lora", str(adapter)]) == 2
    assert "is what is read; write to another name" in capsys.readouterr().err
    export = ["export-lora", "-m", str(base), "--lora", str(adapter), "--force"]
    assert run([*export, "-o", str(adapter)]) == 2
    assert "a.gguf: file is what is read" in capsys.readouterr().err
    assert run(["serve", "--models-dir", str(tmp_path), "--lora", str(adapter)]) == 2
    assert "--models-dir serves several" in capsys.readouterr().err
    assert run(["run", str(base), "-p", "x", "--lora-scaled", str(adapter)]) == 2
    assert "has no scale; give FILE:SCALE" in capsys.readouterr().err
    assert run(["run", str(base), "-p", "x", "--lora", f"{adapter}:1e39"]) == 2
    assert "which float32 does not hold; give a smaller scale" in capsys.readouterr().err
    assert run(["run", str(adapter), "-p", "x"]) == 2
    assert "is adapter: give it as --lora, beside its model" in capsys.readouterr().err
    assert run(["export-lora", "-m", str(base)]) == 2
    assert "an adapter is needed" in capsys.readouterr().err
