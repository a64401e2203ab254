"""Random LoRA adapters for tests, written by the gguf package, and their base merged by numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

Q = gguf.GGMLQuantizationType
PACKED = (Q.Q4_1, Q.Q5_0, Q.Q8_0, Q.Q4_0, Q.Q5_1)
ALL = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def write(
    path: Path, base: Path, *, seed: int = 0, rank: int = 4, alpha: float = 8.0,
    names: tuple[str, ...] = ALL, kind: Q = Q.F32, **changes: Any,
) -> Path:  # fmt: skip
    """An adapter for matrices of the base. ``changes``: metadata by key, with _ for the dots."""
    reader, rng = gguf.GGUFReader(base), np.random.default_rng(seed)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(path, changes.get("general_architecture", architecture))
    writer.add_type(changes.get("general_type", "adapter"))
    writer.add_string("adapter.type", changes.get("adapter_type", "lora"))
    writer.add_float32("adapter.lora.alpha", alpha)
    for tensor in reader.tensors:
        short = tensor.name.removesuffix(".weight").rpartition(".")[2]
        if short not in names:
            continue
        n_in, n_out = (int(n) for n in tensor.shape)
        a = rng.standard_normal((rank, n_in)).astype(np.float32) / n_in**0.5
        b = rng.standard_normal((n_out, rank)).astype(np.float32) * 0.2
        for half, values in (("lora_a", a), ("lora_b", b)):
            stored = quantize(values, kind)
            writer.add_tensor(f"{tensor.name}.{half}", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def merged(base: Path, adapters: list[tuple[Path, float]]) -> dict[str, NDArray[np.float64]]:
    """The base's tensors in float64 with alpha / rank * scale * B A added."""
    found = {
        tensor.name: dequantize(tensor.data, tensor.tensor_type)
        .astype(np.float64)
        .reshape(tensor.shape[::-1])
        for tensor in gguf.GGUFReader(base).tensors
    }
    for path, scale in adapters:
        reader = gguf.GGUFReader(path)
        alpha = float(reader.fields["adapter.lora.alpha"].contents())
        halves = {t.name: dequantize(t.data, t.tensor_type) for t in reader.tensors}
        for name in {name.rpartition(".")[0] for name in halves}:
            a, b = (halves[f"{name}.{half}"].astype(np.float64) for half in ("lora_a", "lora_b"))
            found[name] += (alpha / len(a) if alpha else 1.0) * scale * (b @ a)
    return found
