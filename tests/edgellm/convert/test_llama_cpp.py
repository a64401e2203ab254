"""What conversion writes, read by llama.cpp (where llama-cpp-python is installed)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

llama_cpp = pytest.importorskip("llama_cpp")

import oracle  # noqa: E402  needs llama_cpp

from edgellm.convert.adapter import convert_adapter  # noqa: E402
from edgellm.convert.model import convert_model  # noqa: E402
from edgellm.tokenizer import Tokenizer  # noqa: E402

from . import directories, families, forward  # noqa: E402
from .test_adapter import nmse, write_peft  # noqa: E402

TOKENS = np.random.default_rng(5).integers(0, 300, 60).astype(np.int32)
N_CTX = 256  # what llama.cpp makes of less


@pytest.fixture(autouse=True)
def quiet() -> Any:
    callback = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(callback, None)
    yield callback
    llama_cpp.llama_log_set(llama_cpp.llama_log_callback(0), None)


@pytest.mark.parametrize("family", directories.CONFIGS)
def test_it_computes_the_original_logits(tmp_path: Path, family: str) -> None:
    config = dict(directories.CONFIGS[family])
    if family == "phi3":
        config["original_max_position_embeddings"] = N_CTX
    weights = directories.write(tmp_path / "hf", family, config=config)
    path = convert_model(tmp_path / "hf", tmp_path / "out.gguf", outtype="f32")
    expected = forward.logits(family, config, weights, TOKENS)
    assert nmse(oracle._run(path, TOKENS, N_CTX), expected) < 1e-7


# yarn-betas: llama.cpp (0.3.36 of its Python package) computes as if beta_slow were 1
@pytest.mark.parametrize("name", sorted(families.FAMILIES.keys() - {"yarn-betas"}))
def test_it_computes_other_architectures_too(tmp_path: Path, name: str) -> None:
    family = families.FAMILIES[name]
    n_vocab = directories.byte_level(tmp_path, directories.QWEN2)
    (tmp_path / "config.json").write_text(json.dumps(family.config))
    weights = directories.save_weights(tmp_path, families.random_weights(family, n_vocab), "F32")
    path = convert_model(tmp_path, outtype="f32")
    expected = families.logits(family, weights, TOKENS)
    assert nmse(oracle._run(path, TOKENS, N_CTX), expected) < 1e-6


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_it_takes_our_adapters(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = directories.write(tmp_path / "hf", family)
    merged = write_peft(tmp_path / "peft", weights)
    base = convert_model(tmp_path / "hf", tmp_path / "base.gguf", outtype="f32")
    adapter = convert_adapter(tmp_path / "peft", tmp_path / "a.gguf", str(base))
    plain = llama_cpp.llama_init_from_model

    def with_adapter(model: Any, params: Any) -> Any:
        context = plain(model, params)
        loaded = llama_cpp.llama_adapter_lora_init(model, str(adapter).encode())
        assert loaded and llama_cpp.llama_set_adapter_lora(context, loaded, 1.0) == 0
        return context

    monkeypatch.setattr(llama_cpp, "llama_init_from_model", with_adapter)
    expected = forward.logits(family, directories.CONFIGS[family], merged, TOKENS)
    assert nmse(oracle._run(base, TOKENS, N_CTX), expected) < 1e-7


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_it_has_the_same_tokens(tmp_path: Path, family: str) -> None:
    directories.write(tmp_path, family)
    path = convert_model(tmp_path)
    ours = Tokenizer.from_gguf(path)
    theirs = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    for text in directories.SAMPLES:
        if text:
            found = theirs.tokenize(text.encode(), add_bos=False, special=True)
            assert found == ours.encode(text, parse_special=True), text
