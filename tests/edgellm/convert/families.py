"""More model classes of Hugging Face: names of their tensors by role, and one float64 forward with
what tells the classes apart as fields, written from their definitions (modeling_<name>.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .directories import Weights, base

Array = NDArray[np.float64]
LLAMA = {
    "embed": "model.embed_tokens", "final": "model.norm", "head": "lm_head",
    "in": "input_layernorm", "mid": "post_attention_layernorm",
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
    "o": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
    "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm", "router": "mlp.gate",
    "expert_gate": "mlp.experts.{}.gate_proj", "expert_up": "mlp.experts.{}.up_proj",
    "expert_down": "mlp.experts.{}.down_proj",
}  # fmt: skip
GEMMA = {**LLAMA, "after_attention": "post_attention_layernorm",
         "mid": "pre_feedforward_layernorm", "after_ffn": "post_feedforward_layernorm"}  # fmt: skip


@dataclass(frozen=True)
class Family:
    config: dict[str, Any]
    names: dict[str, str] = field(default_factory=lambda: LLAMA)
    layers: str = "model.layers"
    norm: str = "rms"  # or layer
    offset: float = 0.0  # of norms
    before: bool = True  # norms before the blocks
    after: bool = False  # norms behind the blocks
    parallel: bool = False  # both blocks read the same input
    biases: tuple[str, ...] = ()  # roles
    qk_norm: str = ""  # head, heads (each its own) or all
    pairs: bool = False  # rotation of neighbours
    rotary: float = 1.0
    rotated: Any = None  # which layers; None: all
    local: Any = None  # which layers see the window
    gated: str = "two"  # gate and up; or one matrix for both, or none
    act: str = "silu"
    embed_scale: float = 1.0
    conv1d: bool = False  # matrices are stored [n_in, n_out]
    normalized: bool = False  # shares of the chosen experts sum to 1
    shared_expert: bool = False
    n_dense: int = 0  # first layers without experts
    gating: str = "softmax"  # or sigmoid, with a bias that counts for the choice alone
    convolved: Any = None  # which layers are short convolutions; None: none


def experts(name: str, **more: Any) -> dict[str, Any]:
    return base(architectures=[name], num_experts=4, num_experts_per_tok=2,
                moe_intermediate_size=32, **more)  # fmt: skip


def architecture(name: str, **more: Any) -> dict[str, Any]:
    return base(architectures=[name], **more)


FAMILIES: dict[str, Family] = {
    "mixtral": Family(
        architecture("MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2),
        {**LLAMA, "router": "block_sparse_moe.gate",
         "expert_gate": "block_sparse_moe.experts.{}.w1",
         "expert_up": "block_sparse_moe.experts.{}.w3",
         "expert_down": "block_sparse_moe.experts.{}.w2"}, normalized=True),
    "qwen2moe": Family(
        experts("Qwen2MoeForCausalLM", shared_expert_intermediate_size=48),
        biases=("q", "k", "v"), shared_expert=True),
    "qwen3moe": Family(experts("Qwen3MoeForCausalLM", norm_topk_prob=True, head_dim=32),
                       qk_norm="head", normalized=True),
    "olmoe": Family({**experts("OlmoeForCausalLM", num_key_value_heads=4),
                     "moe_intermediate_size": None}, qk_norm="all"),
    "gemma": Family(architecture("GemmaForCausalLM", head_dim=32, tie_word_embeddings=None),
                    offset=1, act="gelu", embed_scale=8),
    "gemma2": Family(
        architecture("Gemma2ForCausalLM", head_dim=32, query_pre_attn_scalar=32, sliding_window=8,
                     attn_logit_softcapping=5.0, final_logit_softcapping=3.0,
                     tie_word_embeddings=None),
        GEMMA, offset=1, after=True, act="gelu", embed_scale=8, local=lambda i: i % 2 == 0),
    "olmo2": Family(
        architecture("Olmo2ForCausalLM"),
        {**GEMMA, "in": "", "mid": ""}, before=False, after=True, qk_norm="all"),
    "granite": Family(architecture(
        "GraniteForCausalLM", embedding_multiplier=3.0, attention_multiplier=0.1,
        residual_multiplier=0.5, logits_scaling=4.0)),
    "smollm3": Family(architecture("SmolLM3ForCausalLM", num_hidden_layers=5,
                                   tie_word_embeddings=True),
                      rotated=lambda i: (i + 1) % 4 != 0),
    "starcoder2": Family(
        architecture("Starcoder2ForCausalLM", norm_epsilon=1e-5, tie_word_embeddings=True),
        {**LLAMA, "up": "mlp.c_fc", "down": "mlp.c_proj"}, norm="layer", gated="none", act="gelu",
        biases=("in", "mid", "final", "q", "k", "v", "o", "up", "down")),
    "stablelm": Family(
        architecture("StableLmForCausalLM", layer_norm_eps=1e-5, partial_rotary_factor=0.5,
                     qk_layernorm=True),
        {**LLAMA, "q_norm": "self_attn.q_layernorm.norms.{}",
         "k_norm": "self_attn.k_layernorm.norms.{}"},
        norm="layer", biases=("in", "mid", "final"), rotary=0.5, qk_norm="heads"),
    "cohere2": Family(
        architecture("Cohere2ForCausalLM", layer_norm_eps=1e-5, logit_scale=0.5, sliding_window=8,
                     num_hidden_layers=5, tie_word_embeddings=None),
        norm="layer", parallel=True, pairs=True, rotated=lambda i: (i + 1) % 4 != 0,
        local=lambda i: (i + 1) % 4 != 0),
    "glm4": Family(
        architecture("Glm4ForCausalLM", partial_rotary_factor=0.5),
        {**LLAMA, "after_attention": "post_self_attn_layernorm", "after_ffn": "post_mlp_layernorm",
         "up": "mlp.gate_up_proj"},
        after=True, pairs=True, rotary=0.5, gated="one", biases=("q", "k", "v")),
    "phi2": Family(
        architecture("PhiForCausalLM", layer_norm_eps=1e-5, partial_rotary_factor=0.5,
                     num_key_value_heads=4),
        {**LLAMA, "o": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2",
         "final": "model.final_layernorm"},
        norm="layer", parallel=True, rotary=0.5, gated="none", act="gelu",
        biases=("in", "final", "q", "k", "v", "o", "up", "down", "head")),
    "lfm2": Family(
        {**base(architectures=["Lfm2ForCausalLM"], norm_eps=1e-5, conv_L_cache=3,
                block_ff_dim=144, block_multiple_of=32, num_hidden_layers=4,
                layer_types=["conv", "conv", "full_attention", "conv"],
                tie_word_embeddings=None), "intermediate_size": 96},
        {**LLAMA, "final": "model.embedding_norm", "in": "operator_norm", "mid": "ffn_norm",
         "o": "self_attn.out_proj", "q_norm": "self_attn.q_layernorm",
         "k_norm": "self_attn.k_layernorm", "gate": "feed_forward.w1", "up": "feed_forward.w3",
         "down": "feed_forward.w2"},
        qk_norm="head", convolved=lambda i: i != 2),
    "glm4moe": Family(
        {**experts("Glm4MoeForCausalLM", norm_topk_prob=True, routed_scaling_factor=1.5,
                   n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1,
                   partial_rotary_factor=0.5), "n_routed_experts": 4},
        {**LLAMA, **{f"shared_expert.{role}": f"mlp.shared_experts.{role}_proj"
                     for role in ("gate", "up", "down")}},
        rotary=0.5, biases=("q", "k", "v"), normalized=True, n_dense=1, gating="sigmoid"),
    "yarn": Family(architecture(
        "Qwen2ForCausalLM", max_position_embeddings=256, hidden_size=128,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
        biases=("q", "k", "v")),
    "yarn-factor": Family(architecture(
        "MistralForCausalLM", max_position_embeddings=256, head_dim=32,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
                      "attention_factor": 0.9})),
    "yarn-betas": Family(architecture(
        "MistralForCausalLM", max_position_embeddings=256, head_dim=32,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
                      "beta_fast": 16.0, "beta_slow": 2.0})),
    "ministral3": Family(
        {**architecture("Ministral3ForCausalLM", max_position_embeddings=256, head_dim=32),
         "rope_theta": None, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.3}}),
    "gpt2": Family(
        {"architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 3, "n_head": 4,
         "n_positions": 512, "layer_norm_epsilon": 1e-5},
        {"embed": "wte", "final": "ln_f", "in": "ln_1", "mid": "ln_2", "qkv": "attn.c_attn",
         "o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"},
        "h", norm="layer", gated="none", act="gelu", conv1d=True, rotated=lambda i: False,
        biases=("in", "mid", "final", "qkv", "o", "up", "down")),
}  # fmt: skip


def yarn(scaling: dict[str, Any], frequencies: Any, dim: int, base_: float) -> tuple[Any, float]:
    """_compute_yarn_parameters of modeling_rope_utils.py"""
    factor, n_ctx = scaling["factor"], scaling["original_max_position_embeddings"]

    def correction(turns: float) -> float:
        return float(dim * math.log(n_ctx / (turns * 2 * math.pi)) / (2 * math.log(base_)))

    low = max(math.floor(correction(scaling.get("beta_fast", 32))), 0)
    high = min(math.ceil(correction(scaling.get("beta_slow", 1))), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    scaled = frequencies / factor * ramp + frequencies * (1 - ramp)

    def mscale(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1

    if "mscale" in scaling:
        return scaled, mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return scaled, scaling.get("attention_factor") or mscale(1)


def sizes(f: Family) -> dict[str, Any]:
    """The fields of config.json under the names that most have."""
    c = dict(f.config)
    if f.conv1d:
        n = c["n_embd"]
        c |= {"hidden_size": n, "intermediate_size": 4 * n, "num_hidden_layers": c["n_layer"],
              "num_attention_heads": c["n_head"], "num_key_value_heads": c["n_head"],
              "rms_norm_eps": c["layer_norm_epsilon"], "rope_theta": 10000.0}  # fmt: skip
    c["rope_theta"] = c.get("rope_theta") or c["rope_parameters"]["rope_theta"]
    c.setdefault("head_dim", c["hidden_size"] // c["num_attention_heads"])
    return c


def random_weights(f: Family, n_vocab: int, seed: int = 0) -> Weights:
    rng, c = np.random.default_rng(seed), sizes(f)
    n, d, found = c["hidden_size"], c["head_dim"], Weights()
    n_q, n_kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    n_experts = c.get("num_experts") or c.get("num_local_experts") or 0
    n_ff = c["intermediate_size"]
    shapes = {"q": (n_q, n), "k": (n_kv, n), "v": (n_kv, n), "o": (n, n_q), "in": (n,), "mid": (n,),
              "qkv": (n_q + 2 * n_kv, n), "after_attention": (n,), "after_ffn": (n,)}  # fmt: skip
    if f.qk_norm:
        whole = {"head": (d, d), "heads": (d, d), "all": (n_q, n_kv)}[f.qk_norm]
        shapes |= {"q_norm": whole[:1], "k_norm": whole[1:]}
    if n_experts:
        width = c.get("moe_intermediate_size") or n_ff
        shapes |= {"router": (n_experts, n), "expert_gate": (width, n), "expert_up": (width, n),
                   "expert_down": (n, width)}  # fmt: skip
        if f.shared_expert or f.gating == "sigmoid":
            shared = c.get("shared_expert_intermediate_size") or width
            for role, shape in (("gate", (shared, n)), ("up", (shared, n)), ("down", (n, shared))):
                shapes[f"shared_expert.{role}"] = shape
        if f.shared_expert:
            shapes["shared_expert_gate"] = (1, n)
    if not n_experts or f.n_dense:
        up = 2 * n_ff if f.gated == "one" else n_ff
        shapes |= {"up": (up, n), "down": (n, n_ff)}
        if f.gated == "two":
            shapes["gate"] = (n_ff, n)

    def put(role: str, name: str, shape: tuple[int, ...]) -> None:
        if len(shape) == 1:
            mean = 0.0 if f.offset else 1.0
            values = mean + 0.2 * rng.standard_normal(shape)
        else:
            gain = 1.0 if role == "embed" else shape[1] ** -0.5
            values = gain * rng.standard_normal(shape)
        if f.conv1d and len(shape) == 2 and role not in ("embed", "head"):
            values = values.T
        found[f"{name}.weight"] = np.ascontiguousarray(values, np.float32)
        if role in f.biases:
            found[f"{name}.bias"] = (0.2 * rng.standard_normal(shape[0])).astype(np.float32)

    put("embed", f.names["embed"], (n_vocab, n))
    if f.conv1d:
        put("embed", "wpe", (c["n_positions"], n))
    for i in range(c["num_hidden_layers"]):
        for role, shape in shapes.items():
            name = f.names.get(role)
            if role.startswith("shared_expert") and not name:
                name = f"mlp.{role}" + ("_proj" if "." in role else "")
            of_experts, is_dense = "expert" in role or role == "router", i < f.n_dense
            if n_experts and (of_experts if is_dense else role in ("gate", "up", "down")):
                continue
            if not name or (role == "mid" and f.parallel):
                continue
            copies = n_experts if role.startswith("expert_") else 0
            if f.qk_norm == "heads" and role.endswith("_norm"):
                copies = c["num_attention_heads" if role == "q_norm" else "num_key_value_heads"]
            if role == "router" and f.gating == "sigmoid":
                bias = (0.3 * rng.standard_normal(n_experts)).astype(np.float32)
                found[f"{f.layers}.{i}.{name}.e_score_correction_bias"] = bias
            for k in range(copies or 1):
                put(role, f"{f.layers}.{i}.{name.format(k)}", shape)
        if f.convolved is not None and f.convolved(i):
            for name in [name for name in found if name.startswith(f"{f.layers}.{i}.self_attn")]:
                del found[name]
            put("", f"{f.layers}.{i}.conv.in_proj", (3 * n, n))
            put("", f"{f.layers}.{i}.conv.out_proj", (n, n))
            taps = rng.standard_normal((n, 1, c["conv_L_cache"])).astype(np.float32)
            found[f"{f.layers}.{i}.conv.conv.weight"] = taps
    put("final", f.names["final"], (n,))
    if c.get("tie_word_embeddings") is False:
        put("head", f.names["head"], (n_vocab, n))
    return found


def logits(f: Family, weights: Weights, tokens: Any) -> Array:
    c, n = sizes(f), len(tokens)
    w = {name: values.astype(np.float64) for name, values in weights.items()}
    n_heads, n_kv, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    positions = np.arange(n)
    distance = positions[:, None] - positions[None, :]

    def norm(x: Array, name: str) -> Array:
        if f.norm == "layer":
            x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + c["rms_norm_eps"])
        return x * (f.offset + w[f"{name}.weight"]) + w.get(f"{name}.bias", 0.0)

    def matrix(x: Array, name: str) -> Array:
        values = w[f"{name}.weight"]
        return x @ (values if f.conv1d else values.T) + w.get(f"{name}.bias", 0.0)

    def act(x: Array) -> Array:
        if f.act == "gelu":
            return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return x / (1 + np.exp(-x))

    def head_norm(x: Array, at: str, role: str) -> Array:
        name = f"{at}.{f.names[role]}"
        if f.qk_norm == "heads":
            parts = [norm(x[:, h], name.format(h)) for h in range(x.shape[1])]
            return np.stack(parts, 1)
        if f.qk_norm == "all":
            return norm(x.reshape(n, -1), name).reshape(x.shape)
        return norm(x, name)

    def rotate(x: Array) -> Array:
        dim = int(f.rotary * d)
        frequencies, magnitude = c["rope_theta"] ** -(np.arange(0, dim, 2) / dim), 1.0
        if scaling := c.get("rope_scaling") or c.get("rope_parameters"):
            frequencies, magnitude = yarn(scaling, frequencies, dim, c["rope_theta"])
        angles = positions[:, None] * frequencies
        cos, sin = (magnitude * part[:, None] for part in (np.cos(angles), np.sin(angles)))
        turned, out = x[..., :dim], x.copy()
        first, second = (
            (turned[..., 0::2], turned[..., 1::2])
            if f.pairs
            else (turned[..., : dim // 2], turned[..., dim // 2 :])
        )
        a, b = first * cos - second * sin, second * cos + first * sin
        out[..., :dim] = np.stack([a, b], -1).reshape(turned.shape) if f.pairs else (
            np.concatenate([a, b], -1))  # fmt: skip
        return out

    def attention(h: Array, at: str, i: int) -> Array:
        if f.conv1d:
            q, k, v = np.split(matrix(h, f"{at}.{f.names['qkv']}"), 3, axis=1)
        else:
            q, k, v = (matrix(h, f"{at}.{f.names[role]}") for role in "qkv")
        q, k, v = q.reshape(n, n_heads, d), k.reshape(n, n_kv, d), v.reshape(n, n_kv, d)
        if f.qk_norm:
            q, k = head_norm(q, at, "q_norm"), head_norm(k, at, "k_norm")
        if f.rotated is None or f.rotated(i):
            q, k = rotate(q), rotate(k)
        if growth := (c.get("rope_parameters") or {}).get("llama_4_scaling_beta"):
            whole = positions // c["rope_parameters"]["original_max_position_embeddings"]
            q = q * (1 + growth * np.log(1 + whole))[:, None, None]
        k, v = (np.repeat(part, n_heads // n_kv, axis=1) for part in (k, v))
        scale = c.get("query_pre_attn_scalar", d) ** -0.5
        scores = np.einsum("qhd,khd->hqk", q, k) * c.get("attention_multiplier", scale)
        if cap := c.get("attn_logit_softcapping"):
            scores = cap * np.tanh(scores / cap)
        hidden = distance < 0
        if f.local is not None and f.local(i):
            hidden = hidden | (distance >= c["sliding_window"])
        scores = np.where(hidden, -np.inf, scores)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        out = np.einsum("hqk,khd->qhd", shares, v).reshape(n, -1)
        return matrix(out, f"{at}.{f.names['o']}")

    def convolution(h: Array, at: str) -> Array:
        """Lfm2ShortConv"""
        before, after, x = np.split(matrix(h, f"{at}.conv.in_proj"), 3, axis=1)
        taps = w[f"{at}.conv.conv.weight"][:, 0]
        padded = np.concatenate([np.zeros((taps.shape[1] - 1, x.shape[1])), before * x])
        out = sum(padded[k : k + n] * taps[:, k] for k in range(taps.shape[1]))
        return matrix(after * out, f"{at}.conv.out_proj")

    def gated(h: Array, gate: str, up: str, down: str) -> Array:
        return matrix(act(matrix(h, gate)) * matrix(h, up), down)

    def ffn(h: Array, at: str) -> Array:
        names = {role: f"{at}.{name}" for role, name in f.names.items()}
        if f"{names.get('router')}.weight" in w:  # not in dense layers
            return mixture(h, at, names)
        if f.gated == "two":
            return gated(h, names["gate"], names["up"], names["down"])
        hidden = matrix(h, names["up"])
        if f.gated == "one":
            gate, up = np.split(hidden, 2, axis=1)
            return matrix(act(gate) * up, names["down"])
        return matrix(act(hidden), names["down"])

    def mixture(h: Array, at: str, names: dict[str, str]) -> Array:
        scores = matrix(h, names["router"])
        if f.gating == "sigmoid":
            shares = 1 / (1 + np.exp(-scores))
            ranks = shares + w[f"{names['router']}.e_score_correction_bias"]
        else:
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            ranks = shares = shares / shares.sum(-1, keepdims=True)
        out = np.zeros_like(h)
        for t in range(n):
            chosen = np.argsort(-ranks[t])[: c["num_experts_per_tok"]]
            total = shares[t, chosen].sum() if f.normalized else 1.0
            for e in chosen:
                parts = (names[f"expert_{role}"].format(e) for role in ("gate", "up", "down"))
                out[t] += shares[t, e] / total * gated(h[t], *parts)
        if f.gating == "sigmoid":
            out *= c["routed_scaling_factor"]
            return out + gated(
                h, *(names[f"shared_expert.{role}"] for role in ("gate", "up", "down"))
            )
        if f.shared_expert:
            at = f"{at}.mlp.shared_expert"
            gate = 1 / (1 + np.exp(-matrix(h, f"{at}_gate")))
            out += gate * gated(h, f"{at}.gate_proj", f"{at}.up_proj", f"{at}.down_proj")
        return out

    x = w[f"{f.names['embed']}.weight"][tokens] * f.embed_scale
    x = x * c.get("embedding_multiplier", 1.0)
    if f.conv1d:
        x = x + w["wpe.weight"][:n]
    residual = c.get("residual_multiplier", 1.0)
    for i in range(c["num_hidden_layers"]):
        at = f"{f.layers}.{i}"
        first = norm(x, f"{at}.{f.names['in']}") if f.before else x
        is_convolved = f.convolved is not None and f.convolved(i)
        h = convolution(first, at) if is_convolved else attention(first, at, i)
        if f.parallel:
            x = x + h + ffn(first, at)
            continue
        x = x + residual * (norm(h, f"{at}.{f.names['after_attention']}") if f.after else h)
        h = ffn(norm(x, f"{at}.{f.names['mid']}") if f.before else x, at)
        x = x + residual * (norm(h, f"{at}.{f.names['after_ffn']}") if f.after else h)
    x = norm(x, f.names["final"])
    head = f.names["head"] if c.get("tie_word_embeddings") is False else f.names["embed"]
    x = x @ w[f"{head}.weight"].T + w.get(f"{head}.bias", 0.0)
    x = x * c.get("logit_scale", 1.0) / c.get("logits_scaling", 1.0)
    if cap := c.get("final_logit_softcapping"):
        x = cap * np.tanh(x / cap)
    return x
