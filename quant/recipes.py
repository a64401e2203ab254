"""Which tensor of a model gets which number format: the mixes that llama.cpp's quantize knows.

A mix such as Q4_K_M is a format for most matrices and a better one for those that matter more: the
output, values, and some layers' second half of the feed-forward network. Whoever asks for Q4_K_M
expects the size and quality of llama.cpp's; tests compare each choice with its.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from edgellm.quant import QuantType, by_name

QUANTIZATION_VERSION = 2  # of the block formats, as files state it
OUTPUT, EMBEDDING = "output.weight", "token_embd.weight"


class Mix(NamedTuple):
    """What one may ask for."""

    base: str  # the format of most matrices
    file_type: int  # general.file_type of a file of this mix


MIXES = {
    "F32": Mix("f32", 0), "F16": Mix("f16", 1), "BF16": Mix("bf16", 32),
    "Q4_0": Mix("q4_0", 2), "Q4_1": Mix("q4_1", 3), "Q5_0": Mix("q5_0", 8),
    "Q5_1": Mix("q5_1", 9), "Q8_0": Mix("q8_0", 7), "Q2_K": Mix("q2_k", 10),
    "Q3_K_S": Mix("q3_k", 11), "Q3_K_M": Mix("q3_k", 12),
    "Q3_K_L": Mix("q3_k", 13), "Q4_K_S": Mix("q4_k", 14), "Q4_K_M": Mix("q4_k", 15),
    "Q5_K_S": Mix("q5_k", 16), "Q5_K_M": Mix("q5_k", 17), "Q6_K": Mix("q6_k", 18),
    "IQ4_NL": Mix("iq4_nl", 25), "IQ4_XS": Mix("iq4_xs", 30), "MXFP4_MOE": Mix("mxfp4", 38),
}  # fmt: skip
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "MXFP4": "MXFP4_MOE"}

# Matrices that stay as they are: routers, convolutions, positions and what is added to rather than
# multiplied with activations. They are small, and errors in them cost more than elsewhere.
_KEPT = re.compile(
    r".*_norm\.weight|.*ffn_gate_inp\.weight|position_embd\.weight|token_types\.weight"
    r"|.*ssm_conv1d\.weight|.*shortconv\.conv\.weight|.*attn_rel_b\.weight"
    r"|.*\.(altup_|laurel_|per_layer_).*|.*time_mix_.*"
)
# Where values come from, alone or with others.
_VALUES = ("attn_v.weight", "attn_qkv.weight", "attn_kv_b.weight")
# Where rows are no whole number of a format's blocks: the nearest format of blocks of 32.
_SMALLER_BLOCKS = {
    "q2_k": "q4_0", "q3_k": "q4_0", "iq4_xs": "iq4_nl",
    "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0",
}  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """What a mix asks about the model."""

    n_layers: int
    n_gqa: int  # query heads for each head of keys and values
    n_experts: int
    has_importance: bool = False

    @property
    def is_70b(self) -> bool:
        """80 layers with shared values: attn_v is small beside the rest there."""
        return self.n_layers == 80 and self.n_gqa > 1


@dataclass(frozen=True)
class Wishes:
    """What the user says instead of the mix."""

    pure: bool = False  # the mix's base format everywhere
    output: QuantType | None = None
    embedding: QuantType | None = None
    leave_output: bool = False
    by_pattern: Sequence[tuple[re.Pattern[str], QuantType]] = field(default=())


NONE = Wishes()


def mix_of(name: str) -> str | None:
    """The name of the mix, however it is written; None if there is none."""
    upper = name.upper()
    upper = ALIASES.get(upper, upper)
    return upper if upper in MIXES else None


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether a mix decides about the tensor; the others are copied."""
    is_wide = len(shape) > 1 and shape[1] > 1
    return name.endswith("weight") and is_wide and not _KEPT.fullmatch(name)


def choose(tensors: Mapping[str, Sequence[int]], mix: str, facts: Facts, wishes: Wishes = NONE
           ) -> dict[str, QuantType]:  # fmt: skip
    """The format of each matrix. tensors: shape by name, in the order of the file."""
    state = _State(mix, facts, tensors)
    found = {}
    for name, shape in tensors.items():
        if not is_matrix(name, shape) or (wishes.leave_output and name == OUTPUT):
            continue
        is_output = name == OUTPUT or (name == EMBEDDING and OUTPUT not in tensors)
        wanted = MIXES[mix].base
        if not wishes.pure:
            wanted = state.format_of(name, shape, is_output)
        kind = by_name(wanted)
        if wishes.output is not None and is_output:
            kind = wishes.output
        if wishes.embedding is not None and name == EMBEDDING:
            kind = wishes.embedding
        for pattern, asked in wishes.by_pattern:  # the last that fits
            if pattern.search(name):
                kind = asked
        found[name] = fitting(kind, shape[0])
    return found


def fitting(kind: QuantType, row: int) -> QuantType:
    """The format itself, or the one that takes its place for rows of that length."""
    if row % kind.block and kind.name in _SMALLER_BLOCKS:
        kind = by_name(_SMALLER_BLOCKS[kind.name])
    return by_name("f16") if row % kind.block else kind


class _State:
    """Walks over the tensors: some choices depend on how many of a kind came before."""

    def __init__(self, mix: str, facts: Facts, names: Iterable[str]) -> None:
        self.mix, self.facts = mix, facts
        self.base = MIXES[mix].base
        self.n_values = sum(name.endswith(_VALUES) for name in names)
        self.value = self.down = 0  # how many of attn_v and ffn_down there were

    def format_of(self, name: str, shape: Sequence[int], is_output: bool) -> str:
        if self.base in ("f32", "f16", "bf16"):
            return self.base
        if is_output:
            return self._output(shape[0])
        if self.mix == "MXFP4_MOE":
            return "mxfp4" if len(shape) > 2 and shape[2] > 1 else "q8_0"
        if name.endswith("_embd.weight"):
            return self.base
        for part, chosen in _BY_PART.items():
            if part in name:
                return chosen(self, name) or self.base
        return self.base

    def _output(self, row: int) -> str:
        if self.base in ("mxfp4", "q8_0") or row % by_name(self.base).block:
            return "q8_0"
        return "q6_k"

    def attn_v(self, name: str) -> str | None:
        i, self.value = self.value, self.value + 1
        if self.facts.n_experts == 8:
            return "q8_0"
        found = self._attn_v(i)
        if self.facts.is_70b and (found or self.base) in ("q3_k", "q4_k"):
            return "q5_k"
        return found

    def _attn_v(self, i: int) -> str | None:
        is_shared = self.facts.n_gqa >= 4
        match self.mix:
            case "Q2_K":
                return "q4_k" if is_shared else "q3_k"
            case "IQ4_NL" | "IQ4_XS":
                return "q5_k" if is_shared else None
            case "Q3_K_M":
                return "q5_k" if i < 2 else "q4_k"
            case "Q3_K_L":
                return "q5_k"
            case "Q4_K_M" | "Q5_K_M":
                return "q6_k" if _more_bits(i, self.n_values) else None
            case "Q4_K_S":
                return "q5_k" if i < 4 else None
        return None

    def attn_k(self, name: str) -> str | None:
        return "q8_0" if self.facts.n_experts == 8 else None

    def ffn_down(self, name: str) -> str | None:
        i, self.down = self.down, self.down + 1
        n = self.facts.n_layers
        if self.facts.n_experts > 1 and (match := re.match(r"blk\.(\d+)\.", name)):
            i = int(match[1])  # files may hold one such tensor for each expert
        is_early = i < n // 8
        match self.mix:
            case "Q2_K":
                return "q3_k"
            case "Q3_K_M":
                return "q5_k" if i < n // 16 else "q4_k"
            case "Q3_K_L":
                return "q5_k"
            case "Q4_K_M" | "Q5_K_M":
                return "q6_k" if _more_bits(i, n) else None
            case "Q4_K_S":
                return "q5_k" if is_early else None
            case "IQ4_NL" | "IQ4_XS":
                return "q5_k" if is_early and not self.facts.has_importance else None
            case "Q4_0" | "Q5_0":
                if is_early and self.facts.has_importance:
                    return {"Q4_0": "q4_1", "Q5_0": "q5_1"}[self.mix]
        return None

    def attn_output(self, name: str) -> str | None:
        if self.facts.n_experts == 8:
            small = ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M", "IQ4_NL", "IQ4_XS")
            return "q5_k" if self.mix in small else None
        return {"Q2_K": "q3_k", "Q3_K_M": "q4_k", "Q3_K_L": "q5_k"}.get(self.mix)


_BY_PART: dict[str, Callable[[_State, str], str | None]] = {
    "attn_v.weight": _State.attn_v,
    "attn_k.weight": _State.attn_k,
    "ffn_down": _State.ffn_down,
    "attn_output.weight": _State.attn_output,
    "attn_qkv.weight": _State.attn_v,
    "attn_kv_b.weight": _State.attn_v,
}


def _more_bits(i: int, n: int) -> bool:
    """The first and last eighth of the layers, and every third between them."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2
