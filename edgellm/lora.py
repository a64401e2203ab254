"""LoRA adapters (arXiv:2106.09685) in GGUF files, as llama.cpp writes and reads them.

An adapter holds a pair of tensors NAME.lora_a [n_in, rank] and NAME.lora_b [rank, n_out] for each
matrix NAME of the base that it corrects by alpha / rank * scale * B A (by scale alone where alpha
is 0).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import EdgeLLMError
from edgellm.quant.gguf import GGUF, LowRank, TensorInfo


class LoRAError(EdgeLLMError):
    """An adapter is damaged, or is not of this model."""


@dataclass(frozen=True)
class Adapter:
    """An adapter's file and how much of it is wanted."""

    path: str
    scale: float = 1.0

    def __str__(self) -> str:
        return f"{self.path}:{self.scale:g}"


Given = str | os.PathLike[str] | Adapter


def parse(text: Given) -> Adapter:
    """A path, or FILE:scale; LoRAError for a scale that is not finite."""
    if isinstance(text, Adapter):
        return text
    if isinstance(text, os.PathLike):
        return Adapter(os.fspath(text))
    if not isinstance(text, str) or not text:
        raise LoRAError(f"An adapter is given as FILE or FILE:scale, not {text!r}.")
    path, colon, number = text.rpartition(":")
    if not colon or os.path.exists(text):
        return Adapter(text)
    try:
        scale = float(number)
    except ValueError:
        return Adapter(text)  # a colon of its name, most of all behind a drive
    if not math.isfinite(scale):
        raise LoRAError(f"The scale of adapter {path} is {number}; a finite number is needed.")
    return Adapter(path, scale)


@dataclass(frozen=True)
class Pair:
    """What an adapter has for a matrix of the base; ``scale`` without the caller's own."""

    name: str
    a: TensorInfo
    b: TensorInfo
    scale: float

    def factor(self, adapter: Adapter) -> np.float32:
        """Of B A. LoRAError where float32 does not hold it."""
        with np.errstate(over="ignore"):
            found = np.float32(self.scale * adapter.scale)
        if not np.isfinite(found):
            raise LoRAError(
                f"{adapter.path}: {self.name} would be corrected by {self.scale:g} times "
                f"{adapter.scale:g}, which float32 does not hold; give a smaller scale."
            )
        return found


def attach(base: GGUF, adapters: Given | Iterable[Given]) -> list[Adapter]:
    """Have a graph built from the base add what the adapters say; LoRAError in one sentence for
    what does not fit. Returns the adapters."""
    if isinstance(adapters, str | os.PathLike | Adapter) or not isinstance(adapters, Iterable):
        adapters = [adapters]
    found = [parse(adapter) for adapter in adapters]
    for number, adapter in enumerate(found):
        file = GGUF(adapter.path)
        try:
            pairs = read_pairs(file, base)
            names: dict[str, str] = {}
            for pair in pairs:
                a, b = (f"lora.{number}.{info.name}" for info in (pair.a, pair.b))
                names |= {pair.a.name: a, pair.b.name: b}
                added = LowRank(a, b, float(pair.factor(adapter)))
                base.low_rank.setdefault(pair.name, []).append(added)
            base.attach(file, names)
        finally:
            file.close()
    return found


def read_pairs(file: GGUF, base: GGUF) -> list[Pair]:
    """The adapter's pairs, checked against the base."""
    _check_head(file, base)
    alpha = file.number("adapter.lora.alpha")
    halves: dict[str, dict[str, TensorInfo]] = {}
    for info in file.tensors.values():
        name, dot, half = info.name.rpartition(".")
        if half not in ("lora_a", "lora_b"):
            raise LoRAError(f"{file.path}: tensor {info.name} is no part of a LoRA adapter.")
        halves.setdefault(name, {})[half] = info
    if not halves:
        raise LoRAError(f"{file.path}: has no tensors.")
    pairs = []
    for name, found in halves.items():
        if len(found) < 2:
            raise LoRAError(f"{file.path}: of {name} only {next(iter(found))} is there.")
        a, b = found["lora_a"], found["lora_b"]
        check_pair(file.path, base, name, a.shape, b.shape)
        for info in (a, b):
            if not np.isfinite(values(file, info)).all():
                raise LoRAError(f"{file.path}: tensor {info.name} has numbers that are not finite.")
        pairs.append(Pair(name, a, b, alpha / a.shape[1] if alpha else 1.0))
    return pairs


def _check_head(file: GGUF, base: GGUF) -> None:
    kind = file.string("general.type", "model")
    if kind != "adapter":
        raise LoRAError(f"{file.path}: is a {kind}, no adapter (general.type).")
    if (kind := file.string("adapter.type", "")) != "lora":
        raise LoRAError(f"{file.path}: adapter.type is {kind!r}; supported: lora.")
    if "adapter.alora.invocation_tokens" in file.metadata:
        raise LoRAError(
            f"{file.path}: adapters that a token switches on (aLoRA) are not supported."
        )
    if file.architecture != base.architecture:
        raise LoRAError(
            f"{file.path}: is an adapter for {file.architecture} models; {base.path} is "
            f"{base.architecture}."
        )


def check_pair(
    path: str, base: GGUF, name: str, a: tuple[int, ...], b: tuple[int, ...]
) -> None:  # fmt: skip
    """Whether matrices of these shapes (GGUF order) correct the base's; LoRAError."""
    info = base.tensors.get(name)
    if info is None:
        raise LoRAError(f"{path}: corrects {name}, which {base.path} does not have.")
    if name == "token_embd.weight" or len(info.shape) != 2:
        raise LoRAError(
            f"{path}: corrects {name}; adapters for embeddings, vectors and experts are not "
            "supported."
        )
    if len(a) != 2 or len(b) != 2 or (a[0], b[1]) != info.shape or not 0 < a[1] == b[0]:
        raise LoRAError(
            f"{path}: for {name} of shape {list(info.shape)} has A {list(a)} and B {list(b)}; "
            f"needed: [{info.shape[0]}, rank] and [rank, {info.shape[1]}]."
        )


def values(file: GGUF, info: TensorInfo) -> NDArray[np.float32]:
    """A tensor's elements, float32 in numpy's order."""
    raw = np.empty((info.rows, info.row_bytes), np.uint8)
    file.read_into(info, 0, raw.reshape(-1))
    return info.type.dequantize(raw).reshape(info.shape[::-1])
