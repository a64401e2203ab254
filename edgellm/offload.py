"""Which layer runs where: what a plan is made of and what it says; ``offload_plan`` makes it.

Everything here is numbers, without a device; what a layer weighs is asked of ``device_sizes``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from edgellm.errors import EdgeLLMError
from edgellm.kernels.split import staging_bytes

CPU = "cpu"
LEAST_MARGIN, MARGIN_SHARE = 64 << 20, 0.05  # of a device's memory, for what is not ours
ALL = 1 << 30  # layers
Stream = Literal["auto", "on", "off"]
STREAM: tuple[Stream, ...] = get_args(Stream)


class OffloadError(EdgeLLMError):
    """Options that ask for something that is not there."""


@dataclass(frozen=True)
class Matrix:
    name: str
    n_bytes: int
    is_expert: bool = False


@dataclass(frozen=True)
class Layer:
    """``why`` says why it cannot leave the CPU; empty: it can. ``other`` are vectors and tables."""

    matrices: tuple[Matrix, ...]
    kv: int = 0
    other: int = 0
    why: str = ""

    @property
    def weights(self) -> int:
        return sum(m.n_bytes for m in self.matrices) + self.other

    @property
    def experts(self) -> int:
        return sum(m.n_bytes for m in self.matrices if m.is_expert)


@dataclass(frozen=True)
class Sizes:
    """Bytes on a device. ``workspace`` is what a device with anything on it needs for rows."""

    layers: tuple[Layer, ...]
    output: Layer
    workspace: int

    @property
    def total(self) -> int:
        return self.workspace + sum(x.weights + x.kv for x in (*self.layers, self.output))


@dataclass(frozen=True)
class Room:
    """A device: ``free`` bytes now, of ``total``."""

    name: str
    free: int
    total: int

    def budget(self, margin: int | None) -> int:
        """What may be taken; ``margin`` None leaves a twentieth, 64 MiB at least."""
        kept = max(LEAST_MARGIN, int(MARGIN_SHARE * self.total)) if margin is None else margin
        return max(0, self.free - kept)


@dataclass(frozen=True)
class Options:
    """``n_gpu_layers`` None: what fits. ``n_cpu_moe``: the experts of the first so many layers stay
    on the CPU. ``overrides``: (pattern of a matrix's name, where it goes). ``stream`` "on": layers
    that do not fit run on the GPU all the same, and their matrices are copied to it for each step;
    "auto": where that is foretold to be faster than the CPU. ``strict``: prompts take the GPU's
    kernels of generated tokens, so that it makes no bit of difference which a token was."""

    n_gpu_layers: int | None = None
    fit_margin: int | None = None
    overrides: tuple[tuple[str, str], ...] = ()
    n_cpu_moe: int = 0
    kv_offload: bool = True
    tensor_split: tuple[float, ...] = ()
    stream: Stream = "auto"
    strict: bool = False

    def __post_init__(self) -> None:
        for name, n in (("n_gpu_layers", self.n_gpu_layers), ("fit_margin", self.fit_margin),
                        ("n_cpu_moe", self.n_cpu_moe)):  # fmt: skip
            if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 0):
                raise OffloadError(f"{name} must be a number of at least 0, not {n!r}.")
        if not isinstance(self.overrides, tuple) or not all(
            isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(x, str) for x in pair)
            for pair in self.overrides
        ):
            raise OffloadError(
                f"overrides must be a tuple of (pattern, place), not {self.overrides!r}."
            )
        if not isinstance(self.strict, bool):
            raise OffloadError(f"strict must be True or False, not {self.strict!r}.")
        if self.stream not in STREAM:
            raise OffloadError(f"stream must be auto, on or off, not {self.stream!r}.")
        shares = self.tensor_split
        if not isinstance(shares, tuple) or not all(
            isinstance(x, int | float) and 0 <= x < math.inf for x in shares
        ) or (shares and not sum(shares)):  # fmt: skip
            raise OffloadError(
                f"tensor_split must be shares of at least 0, not all 0, as (3, 1), not {shares!r}."
            )


@dataclass
class Taken:
    """Bytes planned on a device. ``streamed`` are those of matrices that wait in the host's memory,
    by layer; they share the ``staging`` memory of the device."""

    weights: int = 0
    kv: int = 0
    workspace: int = 0
    streamed: dict[int, int] = field(default_factory=dict)

    @property
    def staging(self) -> int:
        return staging_bytes(self.streamed.values())

    @property
    def total(self) -> int:
        return self.weights + self.staging + self.kv + self.workspace


@dataclass
class Plan:
    """``places`` of the layers and, last, of the output matrix; ``matrices`` that lie elsewhere
    than their layer; ``streamed`` are matrices that come to their place for each step, from the
    host's memory; ``strict`` is that of Options; ``notes`` say what was decided and why."""

    places: list[str]
    matrices: dict[str, str] = field(default_factory=dict)
    kv_offload: bool = True
    taken: dict[str, Taken] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    streamed: set[str] = field(default_factory=set)
    strict: bool = False

    @property
    def uses_device(self) -> bool:
        return any(t.total for t in self.taken.values())

    @property
    def uses_cpu(self) -> bool:
        """Whether the CPU has more to do than to look up embeddings."""
        return CPU in (*self.places, *self.matrices.values()) or not self.kv_offload

    @property
    def n_gpu_layers(self) -> int:
        """Layers that are not on the CPU, the output matrix counted as one."""
        return sum(place != CPU for place in self.places)

    def place_of(self, layer: int | None, matrix: str = "") -> str:
        at = self.places[-1 if layer is None else layer]
        return self.matrices.get(matrix, at)

    def kv_place(self, layer: int) -> str:
        return self.places[layer] if self.kv_offload else CPU


def cpu_only(n_layers: int, note: str = "") -> Plan:
    return Plan([CPU] * (n_layers + 1), notes=[note] if note else [])
