"""Which tensors the file will hold, and what each is made of.

Names come from the gguf package's maps. A tensor is made of one of the checkpoint's, or of several
that are stacked: the experts of a layer, the norms of its heads. Numbers are only moved here, so
they stay in the type they have in the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.convert.architectures import Architecture
from edgellm.convert.checkpoint import Source, as_float32
from edgellm.convert.config import HFConfig
from edgellm.convert.errors import ConvertError, library

Arrange = Callable[[NDArray[Any]], NDArray[Any]]

# parts of a model that do more than text, and tables that are no weights
_OTHER = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|audio_tower)\."
    r"|.*(\.rotary_emb\.inv_freq|\.attn\.(masked_)?bias|embeddings\.position_ids)$"
    r"|pooler\."  # of classifiers: embeddings are pooled from all rows
)
_PREFIX = re.compile(r"^(model\.)?language_model\.(model\.)?")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_CORRECTION = "e_score_correction.bias"  # as the map has it
_STACKED = re.compile(r"(.*\.experts|.*layernorm)\.(?:norms\.)?(\d+)\.(.+)")


@dataclass(frozen=True)
class Planned:
    """A tensor of the file. ``shape`` is numpy's."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]  # stacked, when there are several
    arrange: Arrange | None = None  # on the elements of one source
    offset: float = 0.0  # added to every element

    def read(self) -> Iterator[NDArray[Any]]:
        """The elements in order, one source after the other, in the checkpoint's types."""
        for source in self.sources:
            elements = source.read()
            if self.arrange is not None:
                elements = self.arrange(elements)
            yield as_float32(elements) + np.float32(self.offset) if self.offset else elements


def plan(
    sources: dict[str, Source], row: Architecture, config: HFConfig
) -> list[Planned]:  # fmt: skip
    """All tensors in the checkpoint's order; ConvertError for one that has no name in GGUF."""
    is_tied = config.flag("tie_word_embeddings", row.is_tied)
    found: dict[str, Planned] = {}
    for name, group in _grouped(sources, config).items():
        gguf_name = name_in_gguf(name, row, config)
        if gguf_name is None:
            raise ConvertError(
                f"{group[0].path}: tensor {group[0].name} is not known of {row.name} models."
            )
        if gguf_name == "output.weight" and is_tied:
            continue
        if gguf_name in found:
            raise ConvertError(f"{group[0].path}: {gguf_name} is there twice: {group[0].name}.")
        found[gguf_name] = _planned(gguf_name, group, row, config)
    if config.get("tie_word_embeddings") is False and "output.weight" not in found:
        raise config.refuse("tie_word_embeddings", "is false, but there is no tensor lm_head")
    return list(found.values())


def name_in_gguf(name: str, row: Architecture, config: HFConfig) -> str | None:
    """A tensor's name by the gguf package's map."""
    names = _name_map(row.name, config.n_layers)
    found: str | None = names.get_name(name, try_suffixes=(".weight", ".bias"))
    return found


@cache
def _name_map(architecture: str, n_layers: int) -> Any:
    gguf = library("gguf")
    number = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture)
    return gguf.get_tensor_name_map(number, n_layers)


def _grouped(sources: dict[str, Source], config: HFConfig) -> dict[str, list[Source]]:
    """Sources by the name of what they become together."""
    groups: dict[str, dict[int, Source]] = {}
    # layers behind the last are drafts of further tokens, which are not run
    end = config.n_layers + config.integer("num_nextn_predict_layers", 0)
    for full, source in sources.items():
        if _OTHER.match(full):
            continue
        name = language_model_name(full).replace("e_score_correction_bias", _CORRECTION)
        layer = _LAYER.match(name)
        if layer and config.n_layers <= int(layer[1]) < end:
            continue
        number, stacked = 0, _STACKED.fullmatch(name)
        if stacked:
            name, number = f"{stacked[1]}.{stacked[3]}", int(stacked[2])
        groups.setdefault(name, {})[number] = source
    for name, group in groups.items():
        if sorted(group) != list(range(len(group))):
            path = next(iter(group.values())).path
            raise ConvertError(f"{path}: of {name} only the numbers {sorted(group)} are there.")
        if len({source.shape for source in group.values()}) != 1:
            raise config.refuse("architectures", f"has tensors {name} of several shapes")
    return {name: [group[i] for i in range(len(group))] for name, group in groups.items()}


def language_model_name(full: str) -> str:
    """A tensor's name without the prefix that models with more than text have."""
    return _PREFIX.sub("model." if "lm_head" not in full else "", full)


def _planned(name: str, group: list[Source], row: Architecture, config: HFConfig) -> Planned:
    shape, is_bias = group[0].shape, name.endswith(".bias")
    short = name.rpartition(".")[0].rpartition(".")[2]  # attn_q of blk.0.attn_q.weight
    arrange = arrangement(group[0], short, row, config)
    if short in row.transposed:
        arrange, shape = (None, shape) if is_bias else (arrange, shape[::-1])
    elif arrange is _without_ones:
        shape = tuple(n for n in shape if n != 1)
    is_norm = short.endswith("norm") and not is_bias
    if len(group) > 1 or _STACKED.fullmatch(group[0].name):
        shape = (len(group), *shape)
    return Planned(name, shape, tuple(group), arrange, row.norm_offset if is_norm else 0.0)


def arrangement(
    source: Source, short: str, row: Architecture, config: HFConfig
) -> Arrange | None:  # fmt: skip
    """How the elements of a matrix or bias are moved, by its name in GGUF (attn_q)."""
    if row.pairs and short in ("attn_q", "attn_k"):
        n_heads = config.integer("num_attention_heads")
        if short == "attn_k":
            n_heads = config.integer("num_key_value_heads", n_heads)
        if not n_heads or source.shape[0] % (2 * n_heads):
            raise ConvertError(f"{source.path}: {source.name} does not fit {n_heads} heads.")
        return partial(neighbours, n_heads=n_heads)
    if short in row.transposed:
        return np.transpose
    # one gate for all is a vector in GGUF; each channel has a convolution of its own
    return _without_ones if short in ("ffn_gate_inp_shexp", "conv") else None


def _without_ones(x: NDArray[Any]) -> NDArray[Any]:
    return x.squeeze()


def neighbours(x: NDArray[Any], n_heads: int) -> NDArray[Any]:
    """Rows of each head so that what a rotation pairs lies side by side: halves [0 1 2 | 3 4 5]
    become [0 3 1 4 2 5]."""
    halves = x.reshape(n_heads, 2, x.shape[0] // n_heads // 2, *x.shape[1:])
    return halves.swapaxes(1, 2).reshape(x.shape)
