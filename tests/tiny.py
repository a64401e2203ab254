"""Tiny random models for tests, written by the gguf package: other seeds, shapes and mixes of
number formats at will. The vocabulary is byte-level, so any text has tokens."""

from __future__ import annotations

import itertools
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import quantize

Q = gguf.GGMLQuantizationType
PACKED = (Q.Q4_1, Q.Q5_0, Q.Q8_0, Q.Q4_0, Q.Q5_1)  # types the gguf package can quantize to
ARCHITECTURES = ("llama", "llama-moe", "qwen2", "gemma3")
MESSAGE_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def build(
    path: Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    n_layers: int = 2,
    n_embd: int = 128,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int = 32,
    n_ff: int = 192,
    n_ctx: int = 512,
    window: int = 48,
    n_experts: int = 6,
    types: tuple[Q, ...] = PACKED,
    tied: bool = False,
    template: str | None = None,
    controls: tuple[str, ...] = (),
) -> Path:
    """Write a model; matrices take the types in turn."""
    rng, kinds = np.random.default_rng(seed), itertools.cycle(types)
    arch = architecture.removesuffix("-moe")
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(n_layers)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_heads)
    writer.add_head_count_kv(n_kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if architecture.endswith("-moe"):
        writer.add_expert_count(n_experts)
        writer.add_expert_used_count(2)
    if arch == "gemma3":
        writer.add_sliding_window(window)
        writer.add_sliding_window_pattern([True, False] * (n_layers // 2) + [True] * (n_layers % 2))
    n_vocab = _vocabulary(writer, controls)
    if template is not None:
        writer.add_chat_template(template)

    def matrix(name: str, n_in: int, n_out: int, *more: int, gain: float = 1.0) -> None:
        kind = next(kinds)
        values = rng.standard_normal((*more, n_out, n_in), np.float32) * (gain / n_in**0.5)
        writer.add_tensor(f"{name}.weight", quantize(values, kind), raw_dtype=kind)

    def vector(name: str, n: int, mean: float = 1.0) -> None:
        values = (mean + 0.1 * rng.standard_normal(n)).astype(np.float32)
        writer.add_tensor(name, values)

    matrix("token_embd", n_embd, n_vocab, gain=n_embd**0.5)
    n_q, n_kv = n_heads * head_dim, n_kv_heads * head_dim
    for block in (f"blk.{i}" for i in range(n_layers)):
        vector(f"{block}.attn_norm.weight", n_embd)
        matrix(f"{block}.attn_q", n_embd, n_q)
        matrix(f"{block}.attn_k", n_embd, n_kv)
        matrix(f"{block}.attn_v", n_embd, n_kv)
        matrix(f"{block}.attn_output", n_q, n_embd)
        if arch == "qwen2":
            for name, n in (("q", n_q), ("k", n_kv), ("v", n_kv)):
                vector(f"{block}.attn_{name}.bias", n, 0.0)
        if arch == "gemma3":
            for name, n in (
                ("attn_q_norm", head_dim),
                ("attn_k_norm", head_dim),
                ("post_attention_norm", n_embd),
                ("post_ffw_norm", n_embd),
            ):
                vector(f"{block}.{name}.weight", n)
        vector(f"{block}.ffn_norm.weight", n_embd)
        if architecture.endswith("-moe"):
            router = rng.standard_normal((n_experts, n_embd)).astype(np.float32)
            writer.add_tensor(f"{block}.ffn_gate_inp.weight", router)
            matrix(f"{block}.ffn_gate_exps", n_embd, n_ff, n_experts)
            matrix(f"{block}.ffn_up_exps", n_embd, n_ff, n_experts)
            matrix(f"{block}.ffn_down_exps", n_ff, n_embd, n_experts)
        else:
            matrix(f"{block}.ffn_gate", n_embd, n_ff)
            matrix(f"{block}.ffn_up", n_embd, n_ff)
            matrix(f"{block}.ffn_down", n_ff, n_embd)
    vector("output_norm.weight", n_embd)
    if not tied:
        matrix("output", n_embd, n_vocab)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _vocabulary(writer: gguf.GGUFWriter, controls: tuple[str, ...]) -> int:
    """Bytes as GPT-2 spells them, no merges, an end token and ``controls``; returns its size."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    spelled = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    tokens = [spelled[b] for b in range(256)] + ["<|end|>", "<|start|>", *controls]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] * (2 + len(controls)))
    writer.add_token_merges([])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(256)
    writer.add_add_bos_token(False)
    return len(tokens)
