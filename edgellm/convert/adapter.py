"""PEFT's LoRA directories to GGUF adapters: adapter_config.json and adapter_model.safetensors.

B's rows are those of the matrix it corrects, so they are reordered with it; alpha is written as it
is, by which A and B are divided by the rank of each pair.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

from edgellm.convert import outtype as types
from edgellm.convert.architectures import TABLE, Architecture
from edgellm.convert.checkpoint import Checkpoint, Source
from edgellm.convert.config import HFConfig
from edgellm.convert.errors import ConvertError
from edgellm.convert.model import model_name, write_tensors
from edgellm.convert.tensors import Planned, arrangement, language_model_name, name_in_gguf
from edgellm.gguf_files import Counter, Progress, refuse_own, refuse_read
from edgellm.kernels.cpu.convert import Converter
from edgellm.lora import check_pair
from edgellm.quant.gguf import GGUF
from edgellm.quant.recipes import MIXES
from edgellm.quant.values import encode
from edgellm.quant.writer import Writer, refuse_existing

_NAME = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)(?:\.default)?\.weight")
_UNSUPPORTED = (
    "use_dora", "modules_to_save", "alpha_pattern", "lora_bias", "trainable_token_indices",
    "alora_invocation_tokens", "layer_replication", "use_qalora",
)  # fmt: skip
# Ways of beginning that subtract from the base's weights: the adapter fits what is left only.
_OF_OTHER_WEIGHTS = ("pissa", "olora", "corda", "loftq")


def convert_adapter(
    folder: str | os.PathLike[str], target: str | os.PathLike[str], base_path: str, *,
    outtype: str = "f32", force: bool = False, progress: Progress | None = None,
) -> Path:  # fmt: skip
    """Write a GGUF adapter for the model at ``base_path``. ConvertError, LoRAError and GGUFError
    name what does not fit."""
    checkpoint = Checkpoint(folder, "adapter_model.safetensors")
    settings = HFConfig(checkpoint.folder / "adapter_config.json", _settings(checkpoint))
    refuse_read(checkpoint.files(), os.fspath(target))
    refuse_existing(os.fspath(target), force)
    with GGUF(base_path) as base:
        refuse_own(base, os.fspath(target))
        row = next((row for row in TABLE.values() if row.name == base.architecture), None)
        if row is None:
            known = ", ".join(sorted({row.name for row in TABLE.values()}))
            raise ConvertError(
                f"{base.path}: adapters for {base.architecture} are not converted; supported: "
                f"{known}."
            )
        tensors = _plan(checkpoint, row, base)
        alpha = _alpha(settings, {t.shape[0] for t in tensors if t.name.endswith("lora_a")})
        metadata = {
            "general.architecture": encode(base.architecture),
            "general.type": encode("adapter"),
            "general.name": encode(model_name(checkpoint.folder)),
            "general.file_type": encode(MIXES[outtype.upper()].file_type),
            "adapter.type": encode("lora"),
            "adapter.lora.alpha": encode(alpha),
        }
        new = [types.adapter_tensor(tensor, outtype) for tensor in tensors]
        tell = Counter(sum(tensor.n_bytes for tensor in new), progress)
        with Converter(1) as converter, Writer(target, metadata, new, force=force) as out:
            write_tensors(out, tensors, new, converter, tell)
    return Path(target)


def _settings(checkpoint: Checkpoint) -> dict[str, Any]:
    path = checkpoint.folder / "adapter_config.json"
    settings = checkpoint.json(path.name)
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise ConvertError(f"{path}: peft_type is {kind!r}; supported: LORA.")
    for name in _UNSUPPORTED:
        if settings.get(name):
            raise ConvertError(f"{path}: {name} is {settings[name]!r}, which is not supported.")
    if settings.get("bias", "none") != "none":
        raise ConvertError(f"{path}: bias is {settings['bias']!r}; supported: none.")
    begun = settings.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_OF_OTHER_WEIGHTS):
        raise ConvertError(
            f"{path}: init_lora_weights is {begun!r}, by which the base's weights were changed; "
            "have PEFT convert it to an ordinary adapter when it saves it."
        )
    return settings


def _alpha(settings: HFConfig, ranks: set[int]) -> float:
    """What GGUF divides by the rank. Rank-stabilized adapters (arXiv:2312.03732) divide by its root
    instead, which comes to the same while all pairs have one rank."""
    alpha = settings.number("lora_alpha")
    if not alpha:  # in GGUF it would mean the whole of it
        raise settings.refuse("lora_alpha", "is 0: the adapter changes nothing")
    if not settings.flag("use_rslora", False):
        return alpha
    settings.must_be("rank_pattern", {}, {})
    rank = settings.integer("r")
    if ranks != {rank}:
        raise settings.refuse("r", f"is {rank}, but the tensors have ranks {sorted(ranks)}")
    return alpha * math.sqrt(rank)


def _plan(checkpoint: Checkpoint, row: Architecture, base: GGUF) -> list[Planned]:
    config = _config_of(base)
    pairs: dict[str, dict[str, Source]] = {}
    for full, source in checkpoint.tensors.items():
        match = _NAME.fullmatch(full)
        name = (
            name_in_gguf(f"{language_model_name(match[1])}.weight", row, config) if match else None
        )
        if match is None or name is None:
            raise ConvertError(f"{source.path}: tensor {full} is not known of {row.name} models.")
        pairs.setdefault(name, {})[match[2]] = source
    found = []
    for name, halves in pairs.items():
        if len(halves) < 2:
            source = next(iter(halves.values()))
            raise ConvertError(f"{source.path}: {source.name} is there without its other half.")
        a, b = halves["A"], halves["B"]
        check_pair(str(a.path), base, name, a.shape[::-1], b.shape[::-1])
        short = name.removesuffix(".weight").rpartition(".")[2]
        found.append(Planned(f"{name}.lora_a", a.shape, (a,)))
        reordered = arrangement(b, short, row, config) if row.pairs else None
        found.append(Planned(f"{name}.lora_b", b.shape, (b,), reordered))
    return found


def _config_of(base: GGUF) -> HFConfig:
    """What names and the order of rows depend on, from the base's metadata."""
    prefix = base.architecture
    keys = {"num_hidden_layers": "block_count", "num_attention_heads": "attention.head_count",
            "num_key_value_heads": "attention.head_count_kv"}  # fmt: skip
    values = {name: base.integer(f"{prefix}.{key}", None) for name, key in keys.items()}
    return HFConfig(Path(base.path), values)
