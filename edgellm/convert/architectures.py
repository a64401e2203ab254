"""What each architecture's configuration and tensors need beyond what all have: one row each.

Keys are those that models/<name>.py reads. Fields are those of Hugging Face's config.json; where a
model varies in a way that no GGUF file states, other values than the usual are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgellm.convert.config import HFConfig
from edgellm.convert.rope import rope_parameters

Keys = dict[str, Any]


def _none(config: HFConfig) -> Keys:
    return {}


@dataclass(frozen=True)
class Architecture:
    """How a class of Hugging Face models becomes a GGUF architecture."""

    name: str  # general.architecture
    keys: Callable[[HFConfig], Keys] = _none  # without the architecture's prefix
    pairs: bool = False  # rotation pairs neighbours: rows of q and k are reordered for that
    norm_offset: float = 0.0  # added to norms: the model multiplies by 1 + weight
    layer_norm: bool = False  # with a mean, not RMS
    act: str = "silu"  # hidden_act; "" where the row or the class sees to it
    is_tied: bool = False  # what tie_word_embeddings is where the file does not say
    transposed: tuple[str, ...] = ()  # matrices stored [n_in, n_out]
    has_rope: bool = True
    n_ff_by_n_embd: int = 0  # width of the feed-forward network where the file does not say it
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of fields left out
    names: Mapping[str, str] = field(default_factory=dict)  # fields that are called otherwise


def common(config: HFConfig, row: Architecture) -> Keys:
    """Keys of every architecture but those of the rotation."""
    n_heads = config.integer("num_attention_heads")
    head_dim = config.head_dim
    n_embd = config.integer("hidden_size")
    if row.n_ff_by_n_embd:
        n_ff = config.integer("intermediate_size", row.n_ff_by_n_embd * n_embd)
    else:
        n_ff = config.integer("intermediate_size")
    if row.act:
        config.must_be("hidden_act", row.act, row.act)
    eps = "layer_norm_epsilon" if row.layer_norm else "layer_norm_rms_epsilon"
    keys: Keys = {
        "block_count": config.n_layers,
        "context_length": config.integer("max_position_embeddings"),
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "attention.head_count": n_heads,
        "attention.head_count_kv": config.integer("num_key_value_heads", n_heads),
        f"attention.{eps}": config.number("rms_norm_eps"),
    }
    if head_dim * n_heads != n_embd:
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    return keys | row.keys(config)


def rotated(config: HFConfig) -> int:
    """Elements of a head that are rotated."""
    part = rope_parameters(config).get("partial_rotary_factor")
    share = config.number("partial_rotary_factor", 1.0 if part is None else part)
    if not 0 < share <= 1:
        raise config.refuse("partial_rotary_factor", f"is {share}; needed: above 0, at most 1")
    return int(share * config.head_dim)


def _llama(c: HFConfig) -> Keys:
    if c.get("num_local_experts"):
        return _experts(c, "num_local_experts")
    return {}


def _experts(c: HFConfig, n_experts: str = "num_experts") -> Keys:
    keys = {
        "expert_count": c.integer(n_experts),
        "expert_used_count": c.integer("num_experts_per_tok"),
    }
    if "moe_intermediate_size" in c:
        keys["expert_feed_forward_length"] = c.integer("moe_intermediate_size")
    return keys


def _qwen_moe(normalized: bool) -> Callable[[HFConfig], Keys]:
    def keys(c: HFConfig) -> Keys:
        c.must_be("norm_topk_prob", normalized, False)
        c.must_be("decoder_sparse_step", 1, 1)
        c.must_be("mlp_only_layers", [], [])
        found = _experts(c)
        if "shared_expert_intermediate_size" in c:
            width = c.integer("shared_expert_intermediate_size")
            found["expert_shared_feed_forward_length"] = width
        return found

    return keys


def _olmoe(c: HFConfig) -> Keys:
    c.must_be("norm_topk_prob", False, False)
    c.must_be("clip_qkv", None, None)
    return _experts(c)


def _query_scale(c: HFConfig, n_layers_of_27b: int) -> None:
    """Gemma's scale is no key: a runner takes the head's length, but for one size of the model."""
    of_27b = c.n_layers == n_layers_of_27b
    usual = c.integer("hidden_size") // c.integer("num_attention_heads") if of_27b else c.head_dim
    c.must_be("query_pre_attn_scalar", usual, usual)


def _gemma2(c: HFConfig) -> Keys:
    _query_scale(c, 46)
    return {
        "attention.sliding_window": c.integer("sliding_window"),
        "attn_logit_softcapping": c.number("attn_logit_softcapping"),
        "final_logit_softcapping": c.number("final_logit_softcapping"),
        **_sliding_layers(c, 2),
    }


def _gemma3(c: HFConfig) -> Keys:
    _query_scale(c, 62)
    local = rope_parameters(c, "sliding_attention").get("rope_theta")
    local_base = c.number("rope_local_base_freq", 10000.0 if local is None else local)
    keys: Keys = {"attention.sliding_window": c.integer("sliding_window"),
                  "rope.freq_base_swa": local_base, **_sliding_layers(c, 6)}  # fmt: skip
    if "final_logit_softcapping" in c:
        keys["final_logit_softcapping"] = c.number("final_logit_softcapping")
    c.must_be("attn_logit_softcapping", None, None)
    c.must_be("use_bidirectional_attention", False, False)
    return keys


def _sliding_layers(c: HFConfig, usual_period: int) -> Keys:
    """Which layers see a window only, where that is not every one but each period-th."""
    n_layers = c.n_layers
    usual = [(i + 1) % usual_period != 0 for i in range(n_layers)]
    flags = usual
    kinds = c.get("layer_types")
    known = ("sliding_attention", "full_attention")
    if isinstance(kinds, list) and len(kinds) == n_layers and all(k in known for k in kinds):
        flags = [kind == "sliding_attention" for kind in kinds]
    elif kinds is not None:
        raise c.refuse(
            "layer_types", f"must name the kind of each of {n_layers} layers: {' or '.join(known)}"
        )
    elif period := c.integer("sliding_window_pattern", 0):
        flags = [(i + 1) % period != 0 for i in range(n_layers)]
    return {} if flags == usual else {"attention.sliding_window_pattern": flags}


def _granite(c: HFConfig) -> Keys:
    return {
        "attention.scale": c.number("attention_multiplier", 1.0),
        "embedding_scale": c.number("embedding_multiplier", 1.0),
        "residual_scale": c.number("residual_multiplier", 1.0),
        "logit_scale": c.number("logits_scaling", 1.0),
    }


def _cohere2(c: HFConfig) -> Keys:
    return {
        "attention.sliding_window": c.integer("sliding_window"),
        "logit_scale": c.number("logit_scale"),
        **_sliding_layers(c, 4),
    }


def _smollm3(c: HFConfig) -> Keys:
    n_layers = c.n_layers
    usual = [int((i + 1) % 4 != 0) for i in range(n_layers)]
    c.must_be("no_rope_layers", usual, usual)
    return {}


def _stablelm(c: HFConfig) -> Keys:
    return {"use_parallel_residual": c.flag("use_parallel_residual", False)}


def _phi3(c: HFConfig) -> Keys:
    return (
        {"attention.sliding_window": c.integer("sliding_window")} if "sliding_window" in c else {}
    )


def _ministral3(c: HFConfig) -> Keys:
    growth = rope_parameters(c).get("llama_4_scaling_beta")
    if growth is None:
        return {}
    if isinstance(growth, bool) or not isinstance(growth, int | float):
        raise c.refuse("rope_parameters", f"has llama_4_scaling_beta {growth!r}")
    return {"attention.temperature_scale": float(growth)}


def _glm4_moe(c: HFConfig) -> Keys:
    return {
        **_experts(c, "n_routed_experts"),
        "expert_shared_count": c.integer("n_shared_experts"),
        "leading_dense_block_count": c.integer("first_k_dense_replace"),
        "expert_gating_func": 2,  # sigmoid
        "expert_weights_norm": c.flag("norm_topk_prob", True),
        "expert_weights_scale": c.number("routed_scaling_factor", 1.0),
        "expert_group_count": c.integer("n_group", 1),
        "expert_group_used_count": c.integer("topk_group", 1),
    }


def _lfm2(c: HFConfig) -> Keys:
    """Layers of attention have heads for keys and values, those of convolutions none. The width of
    the feed-forward network is reckoned as Lfm2MLP does."""
    n_kv, kinds = c.integer("num_key_value_heads"), c.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != c.n_layers:
        raise c.refuse("layer_types", f"must name the kind of each of {c.n_layers} layers")
    c.must_be("conv_bias", False, False)
    n_ff = c.integer("intermediate_size")
    if c.flag("block_auto_adjust_ff_dim", True):
        multiple = max(1, c.integer("block_multiple_of", 256))
        n_ff = int(c.number("block_ffn_dim_multiplier", 1.0) * int(2 * n_ff / 3))
        n_ff = -(-n_ff // multiple) * multiple
    heads = [n_kv if kind == "full_attention" else 0 for kind in kinds]
    return {
        "feed_forward_length": n_ff,
        "attention.head_count_kv": np.array(heads, np.int32),
        "shortconv.l_cache": c.integer("conv_L_cache"),
    }


def _bert(c: HFConfig) -> Keys:
    c.must_be("hidden_act", "gelu", "gelu")
    c.must_be("position_embedding_type", "absolute", "absolute")
    return {"attention.causal": False}


_GEMMA = {"head_dim": 256, "rms_norm_eps": 1e-6, "max_position_embeddings": 8192}
_NORM_EPS = {"rms_norm_eps": "norm_epsilon"}
_LAYER_NORM_EPS = {"rms_norm_eps": "layer_norm_eps"}

_LLAMA = Architecture("llama", _llama, pairs=True, defaults={"rms_norm_eps": 1e-6})
TABLE: dict[str, Architecture] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "MixtralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": Architecture("qwen2", defaults={"rms_norm_eps": 1e-6}),
    "Qwen3ForCausalLM": Architecture("qwen3", defaults={"rms_norm_eps": 1e-6, "head_dim": 128}),
    "Qwen2MoeForCausalLM": Architecture("qwen2moe", _qwen_moe(False)),
    "Qwen3MoeForCausalLM": Architecture("qwen3moe", _qwen_moe(True)),
    "GemmaForCausalLM": Architecture("gemma", act="", norm_offset=1, is_tied=True, defaults=_GEMMA),
    "Gemma2ForCausalLM": Architecture(
        "gemma2", _gemma2, act="", norm_offset=1, is_tied=True,
        defaults={**_GEMMA, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
                  "final_logit_softcapping": 30.0},
    ),
    "Gemma3ForCausalLM": Architecture(
        "gemma3", _gemma3, act="", norm_offset=1, is_tied=True,
        defaults={**_GEMMA, "max_position_embeddings": 131072, "num_attention_heads": 8,
                  "num_key_value_heads": 4, "sliding_window": 4096, "rope_theta": 1e6,
                  "num_hidden_layers": 26, "hidden_size": 2304, "intermediate_size": 9216},
    ),
    "Phi3ForCausalLM": Architecture("phi3", _phi3, defaults={"rms_norm_eps": 1e-5}),
    "PhiForCausalLM": Architecture(
        "phi2", act="gelu_new", layer_norm=True, names=_LAYER_NORM_EPS,
        defaults={"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    ),
    "BertModel": Architecture(
        "bert", _bert, act="", layer_norm=True, has_rope=False, names=_LAYER_NORM_EPS,
        defaults={"layer_norm_eps": 1e-12},
    ),
    "Lfm2ForCausalLM": Architecture(
        "lfm2", _lfm2, is_tied=True, defaults={"norm_eps": 1e-5, "rope_theta": 1e6},
        names={"rms_norm_eps": "norm_eps", "intermediate_size": "block_ff_dim"},
    ),
    "Olmo2ForCausalLM": Architecture("olmo2", defaults={"rms_norm_eps": 1e-5}),
    "OlmoeForCausalLM": Architecture("olmoe", _olmoe, defaults={"rms_norm_eps": 1e-5}),
    "GraniteForCausalLM": Architecture(
        "granite", _granite, pairs=True, defaults={"rms_norm_eps": 1e-6}
    ),
    "SmolLM3ForCausalLM": Architecture(
        "smollm3", _smollm3, pairs=True, is_tied=True,
        defaults={"rms_norm_eps": 1e-6, "rope_theta": 2e6},
    ),
    "Starcoder2ForCausalLM": Architecture(
        "starcoder2", act="gelu_pytorch_tanh", layer_norm=True, is_tied=True, names=_NORM_EPS,
        defaults={"norm_epsilon": 1e-5},
    ),
    "StableLmForCausalLM": Architecture(
        "stablelm", _stablelm, layer_norm=True, names=_LAYER_NORM_EPS,
        defaults={"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
    ),
    "Cohere2ForCausalLM": Architecture(
        "cohere2", _cohere2, layer_norm=True, is_tied=True, names=_LAYER_NORM_EPS,
        defaults={"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "sliding_window": 4096},
    ),
    "Glm4ForCausalLM": Architecture(
        "glm4", defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5}
    ),
    "Glm4MoeForCausalLM": Architecture(
        "glm4moe", _glm4_moe, defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5}
    ),
    "Ministral3ForCausalLM": Architecture(
        "mistral3", _ministral3, pairs=True, defaults={"rms_norm_eps": 1e-5}
    ),
    "GPT2LMHeadModel": Architecture(
        "gpt2", act="gelu_new", layer_norm=True, is_tied=True, has_rope=False, n_ff_by_n_embd=4,
        transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
        defaults={"layer_norm_epsilon": 1e-5},
        names={"hidden_act": "activation_function", "rms_norm_eps": "layer_norm_epsilon",
               "hidden_size": "n_embd",
               "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
               "max_position_embeddings": "n_positions", "intermediate_size": "n_inner"},
    ),
}  # fmt: skip
# one model with text only, and with a part that sees
TABLE["Gemma3ForConditionalGeneration"] = TABLE["Gemma3ForCausalLM"]


def row_of(values: Mapping[str, Any]) -> Architecture | None:
    """The row of a config.json. Mistral 3 that sees holds one of two classes of text models."""
    names = values.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    inner = values.get("text_config")
    if name == "Mistral3ForConditionalGeneration" and isinstance(inner, dict):
        kinds = {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}
        name = kinds.get(str(inner.get("model_type")))
    return TABLE.get(name) if isinstance(name, str) else None
