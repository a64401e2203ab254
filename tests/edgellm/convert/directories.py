"""Tiny directories in Hugging Face's form: random weights under its names, safetensors by the
library, tokenizers trained by `tokenizers` and `sentencepiece`."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

Weights = dict[str, NDArray[np.float32]]

TEXT = (
    "The quick brown fox jumps over the lazy dog. It wasn't far, and they're back at 10:45 with "
    "1234567 apples! Größe, naïve café; 東京と大阪。 Привет.\n\n def f(x):\n\treturn x ** 2  # ok"
)
SAMPLES = [
    TEXT, "", " ", "  two  spaces ", "HELLO we'll SEE'S", "\n\n\n", "a\tb", "12 345 6789", "é",
    "🙂👍🏽", "x" * 50, "don't stop<|end|>now", "<tool>x</tool>", "東京", "https://example.org/a?b=c#d",
]  # fmt: skip

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def base(**more: Any) -> dict[str, Any]:
    return {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "rms_norm_eps": 1e-5,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "rope_theta": 10000.0, "tie_word_embeddings": False, **more,
    }  # fmt: skip


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": base(
        architectures=["LlamaForCausalLM"], model_type="llama", max_position_embeddings=2048,
        rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                      "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    ),
    "mistral": base(architectures=["MistralForCausalLM"], model_type="mistral", head_dim=32),
    "qwen2": base(
        architectures=["Qwen2ForCausalLM"], model_type="qwen2", use_sliding_window=False,
        tie_word_embeddings=True,
    ),
    "qwen3": base(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=32,
        rope_theta=1000000.0,
    ),
    "gemma3": {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "text_config": {
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7, "head_dim": 32,
            "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8,
            "max_position_embeddings": 512, "query_pre_attn_scalar": 32,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    },
    "phi3": base(
        architectures=["Phi3ForCausalLM"], model_type="phi3", num_key_value_heads=4,
        max_position_embeddings=1024, original_max_position_embeddings=128,
        rope_scaling={"type": "longrope", "short_factor": [1.0 + i / 8 for i in range(8)],
                      "long_factor": [2.0 + i for i in range(8)]},
    ),
}  # fmt: skip
BYTE_LEVEL = {"llama": LLAMA3, "qwen2": QWEN2, "qwen3": QWEN2}


def write(folder: Path, family: str, *, dtype: str = "F32", seed: int = 0, shards: int = 1,
          config: dict[str, Any] | None = None) -> Weights:  # fmt: skip
    """A directory of the family; returns its weights as they are after rounding to ``dtype``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(CONFIGS[family] if config is None else config)
    if family in BYTE_LEVEL:
        n_vocab = byte_level(folder, BYTE_LEVEL[family], ignore_merges=family == "llama")
    else:
        n_vocab = sentencepiece_model(folder)
    n_vocab += 3  # rows that no token has
    config["vocab_size"] = n_vocab
    (folder / "config.json").write_text(json.dumps(config))
    weights = random_weights(family, {**config, **config.get("text_config", {})}, n_vocab, seed)
    return save_weights(folder, weights, dtype, shards)


def random_weights(family: str, c: dict[str, Any], n_vocab: int, seed: int) -> Weights:
    rng = np.random.default_rng(seed)
    n, n_ff = c["hidden_size"], c["intermediate_size"]
    heads, kv = c["num_attention_heads"], c["num_key_value_heads"]
    d = c.get("head_dim") or n // heads
    found: Weights = {}

    def matrix(name: str, n_out: int, n_in: int) -> None:
        found[name] = (rng.standard_normal((n_out, n_in)) / n_in**0.5).astype(np.float32)

    def vector(name: str, length: int) -> None:
        mean = 0.0 if family == "gemma3" or name.endswith("bias") else 1.0
        found[name] = (mean + 0.2 * rng.standard_normal(length)).astype(np.float32)

    root = "language_model.model" if family == "gemma3" else "model"
    found[f"{root}.embed_tokens.weight"] = rng.standard_normal((n_vocab, n)).astype(np.float32)
    for i in range(c["num_hidden_layers"]):
        at = f"{root}.layers.{i}"
        vector(f"{at}.input_layernorm.weight", n)
        vector(f"{at}.post_attention_layernorm.weight", n)
        if family == "phi3":
            matrix(f"{at}.self_attn.qkv_proj.weight", (heads + 2 * kv) * d, n)
            matrix(f"{at}.mlp.gate_up_proj.weight", 2 * n_ff, n)
        else:
            for name, n_out in (("q", heads * d), ("k", kv * d), ("v", kv * d)):
                matrix(f"{at}.self_attn.{name}_proj.weight", n_out, n)
                if family == "qwen2":
                    vector(f"{at}.self_attn.{name}_proj.bias", n_out)
            matrix(f"{at}.mlp.gate_proj.weight", n_ff, n)
            matrix(f"{at}.mlp.up_proj.weight", n_ff, n)
        if family in ("qwen3", "gemma3"):
            vector(f"{at}.self_attn.q_norm.weight", d)
            vector(f"{at}.self_attn.k_norm.weight", d)
        if family == "gemma3":
            vector(f"{at}.pre_feedforward_layernorm.weight", n)
            vector(f"{at}.post_feedforward_layernorm.weight", n)
        matrix(f"{at}.self_attn.o_proj.weight", n, heads * d)
        matrix(f"{at}.mlp.down_proj.weight", n, n_ff)
    vector(f"{root}.norm.weight", n)
    if family == "gemma3":
        matrix("vision_tower.vision_model.head.weight", 8, 8)  # left out of the file
    if not c.get("tie_word_embeddings", family == "gemma3"):
        matrix("lm_head.weight", n_vocab, n)
    return found


def save_weights(folder: Path, weights: Weights, dtype: str, shards: int = 1) -> Weights:
    """In one file, or in several with an index."""
    stored, rounded = {}, {}
    for name, values in weights.items():
        if dtype == "BF16":
            bits = values.view(np.uint32)
            codes = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
            stored[name], rounded[name] = codes, (codes.astype(np.uint32) << 16).view(np.float32)
        else:
            stored[name] = values.astype(np.float16 if dtype == "F16" else np.float32)
            rounded[name] = stored[name].astype(np.float32)
    names = list(stored)
    index: dict[str, str] = {}
    for shard in range(shards):
        part = f"-{shard + 1:05}-of-{shards:05}" if shards > 1 else ""
        path = folder / f"model{part}.safetensors"
        mine = names[shard::shards]
        save_file({name: stored[name] for name in mine}, path)
        index |= dict.fromkeys(mine, path.name)
        if dtype == "BF16":  # numpy has no such type: written as uint16, then called what it is
            _rename_type(path, b'"U16"', b'"BF16"')
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return rounded


def _rename_type(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    head = data[8 : 8 + length].rstrip().replace(old, new)
    head = head.ljust(-(-len(head) // 8) * 8)
    path.write_bytes(len(head).to_bytes(8, "little") + head + data[8 + length :])


def byte_level(folder: Path, pattern: str, *, ignore_merges: bool = False) -> int:
    """A byte-level tokenizer.json with added tokens; the number of its tokens."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>"])
    tokenizer.add_tokens(["<tool>", "</tool>"])
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"},
        "chat_template": [{"name": "default", "template": "{{ messages }}"},
                          {"name": "tool_use", "template": "{{ tools }}"}],
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [tokenizer.token_to_id("<|end|>"),
                                     tokenizer.token_to_id("</tool>")]})
    )  # fmt: skip
    return tokenizer.get_vocab_size()


def sentencepiece_model(folder: Path, kind: str = "bpe", n: int = 340) -> int:
    """A tokenizer.model with byte tokens, and two tokens added beside it."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.split("\n") * 3), model_writer=model, vocab_size=n,
        model_type=kind, byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, user_defined_symbols=["<tool>"],
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    n = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).get_piece_size()
    settings = {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True,
        "added_tokens_decoder": {str(n): {"content": "<|end|>", "special": True}},
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return n + 1
