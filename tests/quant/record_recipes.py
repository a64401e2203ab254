"""Writes tests/data/recipes.json: which type llama.cpp's quantize gives each matrix of some models.

python tests/quant/record_recipes.py    (needs llama-cpp-python, a development tool only)

Only names and shapes matter, so the models hold zeros. Each mix has one letter for each tensor.
"""

from __future__ import annotations

import ctypes
import json
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp

from edgellm.quant import by_name, recipes
from edgellm.quant.gguf import GGUF
from edgellm.quant.values import encode
from edgellm.quant.writer import NewTensor, Writer

OUT = Path(__file__).parents[1] / "data" / "recipes.json"
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def dense(n_layers: int, n: int, n_ff: int, n_kv: int, tied: bool = False,
          fused: bool = False) -> dict[str, list[int]]:  # fmt: skip
    shapes = {"token_embd.weight": [n, 64], "output_norm.weight": [n]}
    if not tied:
        shapes["output.weight"] = [n, 64]
    for i in range(n_layers):
        qkv = {"attn_qkv": [n, n + 2 * n_kv]}
        if not fused:
            qkv = {"attn_q": [n, n], "attn_k": [n, n_kv], "attn_v": [n, n_kv]}
        parts = qkv | {"attn_output": [n, n], "ffn_up": [n, n_ff], "ffn_down": [n_ff, n]}
        parts |= {"attn_norm": [n], "ffn_norm": [n]} | ({} if fused else {"ffn_gate": [n, n_ff]})
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in parts.items()}
    return shapes


def experts(n_layers: int, n: int, n_ff: int, n_experts: int) -> dict[str, list[int]]:
    shapes = dense(n_layers, n, n_ff, n)
    for i in range(n_layers):
        for part in ("up", "gate", "down"):
            row, rows = shapes.pop(f"blk.{i}.ffn_{part}.weight")
            shapes[f"blk.{i}.ffn_{part}_exps.weight"] = [row, rows, n_experts]
        shapes[f"blk.{i}.ffn_gate_inp.weight"] = [n, n_experts]
    return shapes


# name: architecture, layers, heads, heads of keys and values, experts, shapes
MODELS: dict[str, tuple[str, int, int, int, int, dict[str, list[int]]]] = {
    "shared values": ("llama", 27, 8, 2, 0, dense(27, 256, 512, 64)),
    "eight experts": ("llama", 20, 4, 4, 8, experts(20, 256, 256, 8)),
    "many experts": ("llama", 20, 4, 4, 16, experts(20, 256, 256, 16)),
    "eighty layers": ("llama", 80, 8, 4, 0, dense(80, 256, 256, 128)),
    "tied, odd rows": ("qwen2", 16, 4, 2, 0, dense(16, 192, 288, 96, tied=True)),
    "fused": ("phi2", 18, 4, 4, 0, dense(18, 256, 512, 256, fused=True)),
}


def write(path: str, name: str) -> None:
    arch, n_layers, heads, kv_heads, n_experts, shapes = MODELS[name]
    n = shapes["token_embd.weight"][0]
    numbers = {"block_count": n_layers, "context_length": 64, "embedding_length": n,
               "feed_forward_length": 256, "attention.head_count": heads,
               "attention.head_count_kv": kv_heads}  # fmt: skip
    if n_experts:
        numbers |= {"expert_count": n_experts, "expert_used_count": 2}
    metadata = {"general.architecture": encode(arch)}
    metadata |= {f"{arch}.{key}": encode(value) for key, value in numbers.items()}
    for key in ("layer_norm_rms_epsilon", "layer_norm_epsilon"):
        metadata[f"{arch}.attention.{key}"] = encode(1e-5)
    metadata["tokenizer.ggml.model"] = encode("none")
    tensors = [
        NewTensor(name, tuple(shape), by_name("f32" if len(shape) == 1 else "f16"))
        for name, shape in shapes.items()
    ]
    with Writer(path, metadata, tensors, force=True) as out:
        for tensor in tensors:
            out.write(bytes(tensor.n_bytes))


def types_by_llama_cpp(path: str, mix: str) -> dict[str, str]:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.allow_requantize = recipes.MIXES[mix].file_type, 2, True
    out = f"{path}.{mix}"
    assert llama_cpp.llama_model_quantize(path.encode(), out.encode(), ctypes.byref(params)) == 0
    with GGUF(out) as gguf:
        return {name: tensor.type.name for name, tensor in gguf.tensors.items()}


def main() -> None:
    found: dict[str, Any] = {}
    letters: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (_, n_layers, heads, kv_heads, n_experts, shapes) in MODELS.items():
            path = f"{folder}/{name}.gguf"
            write(path, name)
            types = {}
            for mix in recipes.MIXES:
                chosen = types_by_llama_cpp(path, mix)
                kinds = [chosen[tensor] for tensor in shapes]
                types[mix] = "".join(
                    letters.setdefault(kind, LETTERS[len(letters)]) for kind in kinds
                )
            found[name] = {"facts": [n_layers, heads // kv_heads, n_experts], "types": types,
                           "shapes": shapes}  # fmt: skip
    data = {"letters": {letter: kind for kind, letter in letters.items()}, "models": found}
    OUT.write_text(json.dumps(data, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
