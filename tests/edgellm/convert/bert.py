"""A tiny BertModel in Hugging Face's form, and its embedding of a text in float64."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from . import directories

N, N_FF, LAYERS, HEADS, N_CTX = 64, 96, 2, 4, 128


def write(folder: Path) -> tuple[directories.Weights, Any]:
    """Returns the weights and the tokenizer."""
    folder.mkdir()
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=220, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([directories.TEXT.lower()] * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[(text, tokenizer.token_to_id(text)) for text in ("[CLS]", "[SEP]")],
    )  # fmt: skip
    tokenizer.save(str(folder / "tokenizer.json"))
    names = ("pad", "unk", "cls", "sep", "mask")
    settings = {f"{name}_token": f"[{name.upper()}]" for name in names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {
        "architectures": ["BertModel"], "hidden_size": N, "intermediate_size": N_FF,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "layer_norm_eps": 1e-12,
        "max_position_embeddings": N_CTX, "type_vocab_size": 2, "hidden_act": "gelu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "1_Pooling").mkdir()
    pooling = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    rng, found = np.random.default_rng(1), directories.Weights()

    def matrix(name: str, n_out: int, n_in: int) -> None:
        found[f"{name}.weight"] = (rng.standard_normal((n_out, n_in)) / n_in**0.5).astype("f4")
        found[f"{name}.bias"] = (0.2 * rng.standard_normal(n_out)).astype("f4")

    def norm(name: str) -> None:
        found[f"{name}.weight"] = (1 + 0.2 * rng.standard_normal(N)).astype("f4")
        found[f"{name}.bias"] = (0.2 * rng.standard_normal(N)).astype("f4")

    tables = {"word": tokenizer.get_vocab_size(), "position": N_CTX, "token_type": 2}
    for name, n in tables.items():
        values = rng.standard_normal((n, N)).astype("f4")
        found[f"embeddings.{name}_embeddings.weight"] = values
    norm("embeddings.LayerNorm")
    for i in range(LAYERS):
        at = f"encoder.layer.{i}"
        for name in ("query", "key", "value"):
            matrix(f"{at}.attention.self.{name}", N, N)
        matrix(f"{at}.attention.output.dense", N, N)
        norm(f"{at}.attention.output.LayerNorm")
        matrix(f"{at}.intermediate.dense", N_FF, N)
        matrix(f"{at}.output.dense", N, N_FF)
        norm(f"{at}.output.LayerNorm")
    matrix("pooler.dense", N, N)
    return directories.save_weights(folder, found, "F32"), tokenizer


def embedding(weights: directories.Weights, tokens: list[int]) -> Any:
    """The mean of the last layer's rows, of length 1."""
    w = {name: values.astype(np.float64) for name, values in weights.items()}

    def norm(x: Any, name: str) -> Any:
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-12)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def matrix(x: Any, name: str) -> Any:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    n, d = len(tokens), N // HEADS
    x = w["embeddings.word_embeddings.weight"][tokens]
    x = x + w["embeddings.position_embeddings.weight"][:n]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for i in range(LAYERS):
        at = f"encoder.layer.{i}"
        q, k, v = (
            matrix(x, f"{at}.attention.self.{name}").reshape(n, HEADS, d)
            for name in ("query", "key", "value")
        )
        shares = np.exp(np.einsum("qhd,khd->hqk", q, k) / math.sqrt(d))
        shares /= shares.sum(-1, keepdims=True)
        h = np.einsum("hqk,khd->qhd", shares, v).reshape(n, N)
        x = norm(x + matrix(h, f"{at}.attention.output.dense"), f"{at}.attention.output.LayerNorm")
        h = matrix(x, f"{at}.intermediate.dense")
        h = h * 0.5 * (1 + np.vectorize(math.erf)(h / math.sqrt(2)))
        x = norm(x + matrix(h, f"{at}.output.dense"), f"{at}.output.LayerNorm")
    mean = x.mean(0)
    return mean / np.linalg.norm(mean)
