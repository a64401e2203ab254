"""A tiny random model of every architecture, whatever tensors it asks for.

The architecture's own ``build`` runs over a recorder that notes each tensor it wants instead of
looking it up; random ones are then written under those names. So this file knows hyper-parameters
and which optional tensors a file has, but no lists of tensors.

    python tests/architectures.py NAME ...

writes tests/data/arch/NAME.gguf, for which oracle.py finds the expected logits.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize
from numpy.typing import NDArray

from edgellm.kernels.graph import Weight
from edgellm.models import _module
from edgellm.models.config import Config, Weights
from edgellm.quant import by_name
from edgellm.quant.gguf import GGUF

Q = gguf.GGMLQuantizationType
N_VOCAB, N_EMBD, N_CTX = 96, 64, 512
MIXED = (Q.Q4_1, Q.Q5_0, Q.Q8_0, Q.Q4_0, Q.Q5_1)


@dataclass(frozen=True)
class Tiny:
    """An architecture's keys beside those that all have, the optional tensors of the file, and
    those that it leaves out although blocks would take them."""

    keys: dict[str, Any] = field(default_factory=dict)
    has: tuple[str, ...] = ("output", "ffn_gate", "ffn_gate_shexp")
    architecture: str = ""
    is_float: bool = False  # layer norms


RMS, NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
PLAIN = ("output", "ffn_gate", "ffn_gate_shexp")
EXPERTS = {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 64}
SHARED = {"expert_shared_count": 1, "leading_dense_block_count": 1}
BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
ALL_BIASES = (*BIASES, "attn_output.bias", "ffn_up.bias", "ffn_down.bias", "attn_norm.bias",
              "ffn_norm.bias", "output_norm.bias")  # fmt: skip
WINDOW = {"attention.sliding_window": 24, "attention.sliding_window_pattern": [True, False]}
ENCODER = (*BIASES, "attn_output.bias", "attn_output_norm.bias", "layer_output_norm.bias",
           "token_embd_norm.bias", "token_types")  # fmt: skip
LATENT = {"attention.kv_lora_rank": 64, "attention.head_count_kv": 1, "rope.dimension_count": 16,
          "attention.head_count": 2, "expert_gating_func": 2, "expert_weights_norm": True,
          "expert_weights_scale": 1.5, **EXPERTS, **SHARED}  # fmt: skip
DELTA = {"ssm.inner_size": 64, "ssm.state_size": 16, "ssm.time_step_rank": 4, "ssm.group_count": 2,
         "ssm.conv_kernel": 4, "full_attention_interval": 2, "rope.dimension_count": 16,
         "rope.dimension_sections": [3, 3, 2, 0]}  # fmt: skip

TINY: dict[str, Tiny] = {
    "bert": Tiny({NORM: 1e-5, "attention.causal": False, "pooling_type": 1},
                 (*ENCODER, "ffn_up.bias", "ffn_down.bias")),
    "cohere2": Tiny({NORM: 1e-5, "logit_scale": 0.5, **WINDOW}, ("ffn_gate",)),
    "deepseek2": Tiny({**LATENT, "attention.key_length": 80, "attention.value_length": 64,
                       "attention.key_length_mla": 48, "attention.value_length_mla": 32,
                       "attention.q_lora_rank": 32, "expert_group_count": 3,
                       "expert_group_used_count": 2},
                      (*PLAIN, "attn_k_b", "ffn_gate_up_exps", "exp_probs_b.bias")),
    "deepseek2-lite": Tiny({**LATENT, "attention.key_length": 48, "attention.value_length": 32,
                            "attention.head_count_kv": 2, "expert_gating_func": 1},
                           (*PLAIN, "attn_q"), "deepseek2"),
    "gemma": Tiny(has=("ffn_gate",)),
    "gemma2": Tiny(WINDOW, ("ffn_gate",)),
    "gemma3": Tiny(WINDOW, ("ffn_gate",)),
    "glm4": Tiny({"rope.dimension_count": 8}, ("output", *BIASES)),
    "glm4moe": Tiny({**EXPERTS, **SHARED, "expert_gating_func": 2, "expert_weights_norm": True,
                     "rope.dimension_count": 8, "expert_weights_scale": 2.0},
                    (*PLAIN, *BIASES, "exp_probs_b.bias", "attn_q_norm", "attn_k_norm")),
    "gpt-oss": Tiny({**EXPERTS, "attention.sliding_window": 24},
                    ("output", *BIASES, "attn_output.bias", "ffn_gate_inp.bias")),
    "gpt2": Tiny({NORM: 1e-5, "attention.head_count_kv": 4},
                 ("attn_qkv", "attn_qkv.bias", *ALL_BIASES)),
    "granite": Tiny({"logit_scale": 4.0, "residual_scale": 0.5, "embedding_scale": 3.0,
                     "attention.scale": 0.1}),
    "lfm2": Tiny({"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3}),
    "llama": Tiny(has=(*PLAIN, "rope_freqs")),
    "llama-moe": Tiny({"expert_count": 6, "expert_used_count": 2}, architecture="llama"),
    "mistral3": Tiny({"attention.temperature_scale": 0.3, "rope.scaling.type": "yarn",
                      "rope.scaling.factor": 4.0, "rope.scaling.yarn_log_multiplier": 1.0,
                      "rope.scaling.original_context_length": 32}),
    "nomic-bert": Tiny({NORM: 1e-5, "attention.causal": False, "pooling_type": 1},
                       ("ffn_gate", "attn_qkv", "attn_output_norm.bias", "layer_output_norm.bias",
                        "token_embd_norm.bias", "token_types")),
    "olmo2": Tiny(WINDOW),
    "olmoe": Tiny({"expert_count": 6, "expert_used_count": 2, "attention.head_count_kv": 4}),
    "phi2": Tiny({NORM: 1e-5, "rope.dimension_count": 8},
                 ("output", "output.bias", "attn_qkv", "attn_qkv.bias", *ALL_BIASES)),
    "phi3": Tiny({"rope.scaling.type": "longrope", "rope.scaling.attn_factor": 1.19,
                  "rope.scaling.original_context_length": 128},
                 ("output", "attn_qkv", "rope_factors_long", "rope_factors_short")),
    "qwen2": Tiny(has=(*PLAIN, *BIASES)),
    "qwen2moe": Tiny({**EXPERTS, "expert_shared_feed_forward_length": 96}, (*PLAIN, *BIASES)),
    "qwen3": Tiny(),
    "qwen35": Tiny(DELTA),
    "qwen35moe": Tiny({**DELTA, **EXPERTS, "expert_shared_feed_forward_length": 64}),
    "qwen3moe": Tiny(EXPERTS),
    "smollm3": Tiny({"block_count": 4}),
    "stablelm": Tiny({NORM: 1e-5, "rope.dimension_count": 8},
                     (*PLAIN, "attn_q_norm", "attn_k_norm", "attn_norm.bias", "output_norm.bias")),
    "starcoder2": Tiny({NORM: 1e-5}, ("output", *ALL_BIASES)),
}  # fmt: skip


class Recorder(Weights):
    """Notes what an architecture asks for; optional tensors are there as ``has`` says."""

    def __init__(self, gguf: GGUF, has: tuple[str, ...]) -> None:
        super().__init__(gguf)
        self.has = has
        self.asked: dict[str, tuple[tuple[int, ...], bool]] = {}  # name -> shape, is a vector

    def __contains__(self, name: str) -> bool:
        return name.split(".", 2)[-1] in self.has

    def __call__(self, name: str, *shape: int, suffix: str = "weight") -> Weight:
        full = f"{name}.{suffix}" if suffix else name
        self.asked.setdefault(full, (shape, False))
        return Weight(full, by_name("f32"), shape)

    def vector(self, name: str, *shape: int, suffix: str = "weight") -> Weight:
        weight = self(name, *shape, suffix=suffix)
        self.asked[weight.name] = (shape, True)
        return weight

    def optional(self, name: str, *shape: int, suffix: str = "weight") -> Weight | None:
        short = name.removeprefix("blk.").split(".", 1)[-1] if name.startswith("blk.") else name
        wanted = short if suffix == "weight" else f"{short}.{suffix}"
        return self.vector(name, *shape, suffix=suffix) if wanted in self.has else None


def write(
    path: Path, name: str, *, seed: int = 0, types: tuple[Q, ...] = MIXED, **more: Any
) -> Path:
    """A model file; matrices take the types in turn, as far as their rows allow. ``more`` are keys
    with "__" for a dot."""
    tiny, rng, kinds = TINY[name], np.random.default_rng(seed), itertools.cycle(types)
    arch = tiny.architecture or name
    keys = {
        "context_length": N_CTX, "embedding_length": N_EMBD, "block_count": 2,
        "feed_forward_length": 128, "attention.head_count": 4, "attention.head_count_kv": 2,
        "attention.key_length": 16, "attention.value_length": 16, "rope.freq_base": 10000.0,
        "rope.dimension_count": 16,
    }  # fmt: skip
    keys |= {} if NORM in tiny.keys else {RMS: 1e-5}
    keys |= tiny.keys | {key.replace("__", "."): value for key, value in more.items()}
    _write(path, arch, keys, {})
    with GGUF(path) as empty:
        config = Config.read(empty)
        recorder = Recorder(empty, tiny.has)
        config.__dict__["weights"] = recorder
        _module(arch).build(config)
    tensors = {}
    for tensor, (shape, is_vector) in recorder.asked.items():
        shape = tuple(N_VOCAB if n == 0 else n for n in shape)  # no table was there to count
        values = _values(rng, tensor, shape)
        kind = Q.F32
        if not is_vector and not tensor.endswith("_inp.weight"):
            kind = next(kinds)
            while shape[0] % gguf.GGML_QUANT_SIZES[kind][0]:
                kind = Q.F16
        tensors[tensor] = (values, kind)
    _write(path, arch, keys, tensors)
    return path


def _values(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Of a size at which signals neither vanish nor explode."""
    noise = rng.standard_normal(shape[::-1]).astype(np.float32)
    if name.endswith("ssm_a"):
        return -np.exp(0.5 * noise)
    if name.endswith("norm.weight"):
        return 1 + 0.1 * noise
    if "rope_f" in name:
        return 1 + np.abs(noise)
    if len(shape) == 1 or name.endswith("bias"):
        return 0.2 * noise
    gain = 1.0 if "embd" in name or "token_types" in name else shape[0] ** -0.5
    return gain * noise


def _write(
    path: Path, arch: str, keys: dict[str, Any],
    tensors: dict[str, tuple[NDArray[np.float32], Q]],
) -> None:  # fmt: skip
    writer = gguf.GGUFWriter(path, arch)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(N_VOCAB)
    writer.add_token_type_count(2)
    for key, value in keys.items():
        full = f"{arch}.{key}"
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        else:
            writer.add_array(full, value)
    for name, (values, kind) in tensors.items():
        if kind == Q.F32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    for architecture in sys.argv[1:]:
        write(Path(__file__).parent / f"data/arch/{architecture}.gguf", architecture, seed=1)
