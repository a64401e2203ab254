"""The forward pass as a graph of ops over symbolic tensors.

A model file builds one ``Graph`` from a file's hyper-parameters; a back end compiles it once into
a program. The token dimension is unknown: a tensor is float32 [n_rows, dim], where the rows are
the step's tokens or, after ``select``, the tokens whose logits are wanted. Weights are named, not
loaded: a ``Weight`` is the GGUF tensor's name, type and shape.

Adding an op means a method here, a function in ``reference`` (its specification) and a lowering
in each back end that wants it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from edgellm.quant.block import QuantType

Rows = Literal["tokens", "out"]

# ops whose rows depend on the same row of their inputs and on nothing else
ROW_WISE = {
    "rms_norm", "linear", "add", "scale", "swiglu", "geglu", "moe_route", "moe_linear", "moe_sum",
}  # fmt: skip


@dataclass(frozen=True)
class Weight:
    """A tensor of the file: ``shape`` in GGUF order, shape[0] is the length of a row."""

    name: str
    type: QuantType
    shape: tuple[int, ...]

    @property
    def n_in(self) -> int:
        return self.shape[0]

    @property
    def n_out(self) -> int:
        return self.shape[1] if len(self.shape) > 1 else 1


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of the first ``dim`` elements of each head.

    ``layout`` pairs element i with i + dim/2 ("neox") or 2i with 2i + 1 ("norm"). Angles are
    position * freq_scale * base ** (-2i / dim) / factors[i].
    """

    dim: int
    base: float
    layout: Literal["neox", "norm"]
    freq_scale: float = 1.0
    factors: Weight | None = None  # Llama-3 frequency factors, rope_freqs.weight


@dataclass(eq=False)
class Tensor:
    """The result of an op: float32 [n_rows, dim]."""

    dim: int
    rows: Rows
    index: int


@dataclass(eq=False)
class Op:
    """One step of the forward pass. ``layer`` is None outside the layers."""

    kind: str
    inputs: tuple[Tensor, ...]
    output: Tensor
    layer: int | None
    weights: dict[str, Weight] = field(default_factory=dict)
    attrs: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """How messages name the op: its layer and its kind or weight."""
        what = next(iter(self.weights.values())).name if self.weights else self.kind
        return what if self.layer is None or self.weights else f"blk.{self.layer}.{what}"


class Graph:
    """Builds the ops in order; every method returns the op's output tensor."""

    def __init__(self, precise: bool = False) -> None:
        """``precise``: the model's activations have outliers, which blocks of 8 bits would take
        from their neighbours; back ends use 15 bits or more."""
        self.precise = precise
        self.ops: list[Op] = []
        self.layer: int | None = None
        self._n_tensors = 0

    def _add(
        self,
        kind: str,
        inputs: tuple[Tensor, ...],
        dim: int,
        weights: dict[str, Weight | None] | None = None,
        rows: Rows | None = None,
        **attrs: Any,
    ) -> Tensor:
        output = Tensor(dim, rows or (inputs[0].rows if inputs else "tokens"), self._n_tensors)
        self._n_tensors += 1
        present = {k: w for k, w in (weights or {}).items() if w is not None}
        self.ops.append(Op(kind, inputs, output, self.layer, present, attrs))
        return output

    @property
    def output(self) -> Tensor:
        return self.ops[-1].output

    def embed(self, table: Weight) -> Tensor:
        """Rows of the table for the step's token ids."""
        return self._add("embed", (), table.n_in, {"table": table})

    def select(self, x: Tensor) -> Tensor:
        """Only the rows whose logits are wanted."""
        return self._add("select", (x,), x.dim, rows="out")

    def rms_norm(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over runs of len(weight): the row, or each head."""
        return self._add("rms_norm", (x,), x.dim, {"weight": weight}, eps=eps)

    def linear(self, x: Tensor, weight: Weight, bias: Weight | None = None) -> Tensor:
        """x @ weight.T + bias"""
        return self._add("linear", (x,), weight.n_out, {"weight": weight, "bias": bias})

    def rope(self, x: Tensor, head_dim: int, rope: Rope) -> Tensor:
        """Rotate each head by its token's position."""
        weights = {"factors": rope.factors}
        return self._add("rope", (x,), x.dim, weights, head_dim=head_dim, rope=rope)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """Store k and v in the layer's cache and attend causally to what it holds; with a window
        only to the last ``window`` positions, the token's own included."""
        return self._add(
            "attention", (q, k, v), n_heads * head_dim,
            n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim, scale=scale, window=window,
        )  # fmt: skip

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return self._add("add", (x, y), x.dim)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return self._add("scale", (x,), x.dim, factor=factor)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate * sigmoid(gate) * up"""
        return self._add("swiglu", (gate, up), gate.dim)

    def geglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """gelu(gate) * up, gelu by its tanh approximation"""
        return self._add("geglu", (gate, up), gate.dim)

    def moe_route(self, logits: Tensor, n_used: int, normalize: bool) -> Tensor:
        """The n_used best experts of each token: [n, 2 * n_used], ids then softmax weights, best
        first, ties to the lower id; weights sum to 1 when normalized."""
        return self._add(
            "moe_route", (logits,), 2 * n_used, n_used=n_used, normalize=normalize
        )  # fmt: skip

    def moe_linear(self, x: Tensor, route: Tensor, weight: Weight) -> Tensor:
        """For each chosen expert e of a token: x @ weight[e].T. x is [n, n_in], the same for all,
        or [n, n_used * n_in], one for each rank; the result is [n, n_used * n_out]."""
        n_used = route.dim // 2
        return self._add("moe_linear", (x, route), n_used * weight.n_out, {"weight": weight},
                         n_used=n_used)  # fmt: skip

    def moe_sum(self, x: Tensor, route: Tensor) -> Tensor:
        """The experts' outputs summed by their weights, in order of rank."""
        n_used = route.dim // 2
        return self._add("moe_sum", (x, route), x.dim // n_used, n_used=n_used)
