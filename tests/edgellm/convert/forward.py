"""Logits of Hugging Face weights in float64, written from the definitions of its model classes
(LlamaModel, Qwen2Model, Qwen3Model, Gemma3TextModel, Phi3Model), not from edgellm's graphs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def logits(family: str, config: dict[str, Any], weights: dict[str, Any], tokens: Any) -> Array:
    """float64 [n_tokens, n_vocab] of one sequence from position 0."""
    c = {"rms_norm_eps": 1e-6, **config, **config.get("text_config", {})}
    is_gemma = family == "gemma3"
    root = "language_model.model" if is_gemma else "model"
    w = {name: np.asarray(values, np.float64) for name, values in weights.items()}
    n_heads, n_kv = c["num_attention_heads"], c["num_key_value_heads"]
    d = c.get("head_dim") or c["hidden_size"] // n_heads
    eps, n = c["rms_norm_eps"], len(tokens)
    scale = (c["query_pre_attn_scalar"] if is_gemma else d) ** -0.5
    positions = np.arange(n)

    def norm(x: Array, name: str) -> Array:
        x = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps)
        return x * (1 + w[name] if is_gemma else w[name])

    x = w[f"{root}.embed_tokens.weight"][tokens]
    if is_gemma:
        x = x * math.sqrt(c["hidden_size"])
    for i in range(c["num_hidden_layers"]):
        at = f"{root}.layers.{i}"
        is_local = is_gemma and (i + 1) % 6 != 0
        h = norm(x, f"{at}.input_layernorm.weight")
        if family == "phi3":
            qkv = h @ w[f"{at}.self_attn.qkv_proj.weight"].T
            q, k, v = np.split(qkv, [n_heads * d, (n_heads + n_kv) * d], axis=1)
        else:
            q, k, v = (h @ w[f"{at}.self_attn.{name}_proj.weight"].T for name in "qkv")
        if family == "qwen2":
            q, k, v = (
                part + w[f"{at}.self_attn.{name}_proj.bias"]
                for name, part in zip("qkv", (q, k, v), strict=True)
            )
        q, k, v = q.reshape(n, n_heads, d), k.reshape(n, n_kv, d), v.reshape(n, n_kv, d)
        if f"{at}.self_attn.q_norm.weight" in w:
            q, k = (
                norm(q, f"{at}.self_attn.q_norm.weight"),
                norm(k, f"{at}.self_attn.k_norm.weight"),
            )
        cos, sin = rotation(family, c, d, positions, is_local)
        q, k = (part * cos + rotate_half(part) * sin for part in (q, k))
        k, v = (np.repeat(part, n_heads // n_kv, axis=1) for part in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) * scale
        distance = positions[:, None] - positions[None, :]
        hidden = distance < 0
        if is_local:
            hidden |= distance >= c["sliding_window"]
        scores = np.where(hidden, -np.inf, scores)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        h = np.einsum("hqk,khd->qhd", shares, v).reshape(n, -1)
        h = h @ w[f"{at}.self_attn.o_proj.weight"].T
        if is_gemma:
            x = x + norm(h, f"{at}.post_attention_layernorm.weight")
            h = norm(x, f"{at}.pre_feedforward_layernorm.weight")
        else:
            x = x + h
            h = norm(x, f"{at}.post_attention_layernorm.weight")
        if family == "phi3":
            gate, up = np.split(h @ w[f"{at}.mlp.gate_up_proj.weight"].T, 2, axis=1)
        else:
            gate, up = (h @ w[f"{at}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        if is_gemma:
            gate = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        else:
            gate = gate / (1 + np.exp(-gate))
        h = (gate * up) @ w[f"{at}.mlp.down_proj.weight"].T
        x = x + (norm(h, f"{at}.post_feedforward_layernorm.weight") if is_gemma else h)
    x = norm(x, f"{root}.norm.weight")
    head = w.get("lm_head.weight")
    return x @ (w[f"{root}.embed_tokens.weight"] if head is None else head).T


def rotate_half(x: Array) -> Array:
    half = x.shape[-1] // 2
    return np.concatenate([-x[..., half:], x[..., :half]], -1)


def rotation(family: str, c: dict[str, Any], d: int, positions: Any, is_local: bool) -> Any:
    base = c.get("rope_theta", 1e6)
    if is_local:
        base = 10000.0
    inverse = 1 / base ** (np.arange(0, d, 2) / d)
    scaling, magnitude = c.get("rope_scaling") or {}, 1.0
    if family == "llama":
        old, factor = scaling["original_max_position_embeddings"], scaling["factor"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        for i, frequency in enumerate(inverse):
            wave = 2 * math.pi / frequency
            if wave > old / low:
                inverse[i] = frequency / factor
            elif wave >= old / high:
                smooth = (old / wave - low) / (high - low)
                inverse[i] = (1 - smooth) * frequency / factor + smooth * frequency
    if family == "gemma3" and not is_local:
        inverse = inverse / scaling["factor"]
    if family == "phi3":  # texts up to the original context take the short factors
        short = c["original_max_position_embeddings"]
        kind = "short" if len(positions) <= short else "long"
        inverse = inverse / np.array(scaling[f"{kind}_factor"])
        magnitude = math.sqrt(1 + math.log(c["max_position_embeddings"] / short) / math.log(short))
    angles = positions[:, None] * inverse
    angles = np.concatenate([angles, angles], -1)[:, None]
    return np.cos(angles) * magnitude, np.sin(angles) * magnitude
