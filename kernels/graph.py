"""The forward pass as a graph of ops over symbolic tensors.

A model file builds one ``Graph`` from a file's hyper-parameters; a back end compiles it once into
a program. The token dimension is unknown: a tensor is float32 [n_rows, dim], where the rows are
the step's tokens or, after ``select``, the tokens whose logits are wanted. Weights are named, not
loaded: a ``Weight`` is the GGUF tensor's name, type and shape.

Adding an op means a method here, a function in ``reference`` (its specification) and a lowering
in each back end that wants it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from edgellm.quant.block import QuantType

Rows = Literal["tokens", "out"]
STATE_OPS = ("conv1d", "delta_rule")
MATRIX_OPS = ("linear", "head_linear", "moe_linear")  # their "weight" is packed for the device

# ops whose rows depend on the same row of their inputs and on nothing else
ROW_WISE = {
    "slice", "join", "rms_norm", "layer_norm", "l2_norm", "linear", "head_linear", "add",
    "add_vector", "mul", "mul_vector", "mul_row", "scale", "softcap", "sigmoid", "softplus", "silu",
    "gelu", "swiglu", "swiglu_clamped", "geglu", "moe_route", "moe_linear", "moe_sum",
}  # fmt: skip


@dataclass(frozen=True)
class Weight:
    """A tensor of the file: ``shape`` in GGUF order, shape[0] is the length of a row."""

    name: str
    type: QuantType
    shape: tuple[int, ...]
    precise: bool = False  # its inputs have outliers: 8 bits are too few for them

    @property
    def n_in(self) -> int:
        return self.shape[0]

    @property
    def n_out(self) -> int:
        return self.shape[1] if len(self.shape) > 1 else 1


@dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv:2309.00071): fast elements keep their frequency, slow ones are interpolated.

    ``n_ctx`` is the context before the extension; an element that turns ``beta_fast`` times in it
    is fast, one that turns ``beta_slow`` times slow, between them a ramp leads from one to the
    other. ``ext_factor`` is how much of the ramp is used.
    """

    n_ctx: int
    ext_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class Rope:
    """Rotary embedding (arXiv:2104.09864) of the first ``dim`` elements of each head.

    ``layout`` pairs element i with i + dim/2 ("neox") or 2i with 2i + 1 ("norm"). Angles are
    position * freq_scale * base ** (-2i / dim) / factors[i], where ``yarn`` sets freq_scale apart
    for each i. ``long_factors`` take the place of ``factors`` when the context is longer than
    ``n_ctx_short`` (LongRoPE, arXiv:2402.13753). The turned elements are scaled by ``magnitude``.
    """

    dim: int
    base: float
    layout: Literal["neox", "norm"]
    freq_scale: float = 1.0
    factors: Weight | None = None
    long_factors: Weight | None = None
    n_ctx_short: int = 0
    yarn: Yarn | None = None
    magnitude: float = 1.0


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
    def n_state(self) -> int:
        """Floats that a recurrent op keeps of a sequence."""
        if self.kind == "conv1d":
            n_taps, channels = self.weights["weight"].shape
            return (n_taps - 1) * channels
        if self.kind == "delta_rule":  # d_k * d_v of each value head
            return self.inputs[0].dim // int(self.attrs["n_k_heads"]) * self.output.dim
        return 0

    @property
    def label(self) -> str:
        """How messages name the op: its layer and its kind or weight."""
        what = next(iter(self.weights.values())).name if self.weights else self.kind
        return what if self.layer is None or self.weights else f"blk.{self.layer}.{what}"


class Graph:
    """Builds the ops in order; every method returns the op's output tensor."""

    def __init__(self, precise: Collection[str] = ()) -> None:
        """``precise``: names of matrices (``attn_q``) whose inputs have outliers, which blocks of
        8 bits would take from their neighbours; back ends use 14 bits or more for them."""
        self.precise = precise
        self.ops: list[Op] = []
        self.adapted: dict[str, Tensor] = {}  # matrix name -> its output with what adapters add
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
        if kind in MATRIX_OPS:
            matrix = present["weight"]
            short = matrix.name.removesuffix(".weight").rpartition(".")[2]
            present["weight"] = replace(matrix, precise=short in self.precise)
        self.ops.append(Op(kind, inputs, output, self.layer, present, attrs))
        return output

    @property
    def output(self) -> Tensor:
        return self.ops[-1].output

    def readers(self) -> dict[Tensor, list[Op]]:
        """The ops that read each tensor; a tensor that nobody reads is left out."""
        found: dict[Tensor, list[Op]] = {}
        for op in self.ops:
            for tensor in op.inputs:
                found.setdefault(tensor, []).append(op)
        return found

    @property
    def n_vocab(self) -> int:
        return next(op for op in self.ops if op.kind == "embed").weights["table"].n_out

    @property
    def is_causal(self) -> bool:
        """Whether a token sees only what stands before it: what generates text does."""
        return all(op.attrs["causal"] for op in self.ops if op.kind == "attention")

    @property
    def is_recurrent(self) -> bool:
        """Whether a layer has a state that cannot be cut back to an earlier token."""
        return any(op.kind in STATE_OPS for op in self.ops)

    @property
    def n_positions(self) -> int | None:
        """How many positions there are at all, where they are learned."""
        tables = [op.weights["table"].n_out for op in self.ops if op.kind == "position_rows"]
        return min(tables, default=None)

    def embed(self, table: Weight) -> Tensor:
        """Rows of the table for the step's token ids."""
        return self._add("embed", (), table.n_in, {"table": table})

    def select(self, x: Tensor) -> Tensor:
        """Only the rows whose logits are wanted."""
        return self._add("select", (x,), x.dim, rows="out")

    def slice(self, x: Tensor, start: int, n: int, run: int | None = None) -> Tensor:
        """Elements start .. start + n - 1 of the row, or of each run of ``run`` elements in it."""
        run = run or x.dim
        return self._add("slice", (x,), x.dim // run * n, start=start, n=n, run=run)

    def join(self, x: Tensor, y: Tensor, n_heads: int, shared: bool = False) -> Tensor:
        """Head by head: the head of x, then that of y; ``shared``: y is one head for all."""
        n_x, n_y = x.dim // n_heads, y.dim if shared else y.dim // n_heads
        return self._add("join", (x, y), n_heads * (n_x + n_y),
                         n_heads=n_heads, n_x=n_x, n_y=n_y, shared=shared)  # fmt: skip

    # ---- normalization ------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over runs of weight.n_in elements: the row, or each
        head. A weight of several rows has one for each run."""
        return self._add("rms_norm", (x,), x.dim, {"weight": weight}, eps=eps)

    def layer_norm(self, x: Tensor, weight: Weight, bias: Weight | None, eps: float) -> Tensor:
        """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over runs as in rms_norm."""
        return self._add("layer_norm", (x,), x.dim, {"weight": weight, "bias": bias}, eps=eps)

    def l2_norm(self, x: Tensor, n: int, eps: float) -> Tensor:
        """x / sqrt(sum(x^2) + eps) over runs of n elements."""
        return self._add("l2_norm", (x,), x.dim, n=n, eps=eps)

    # ---- matrices and attention ---------------------------------------------------------------

    def linear(self, x: Tensor, weight: Weight, bias: Weight | None = None) -> Tensor:
        """x @ weight.T + bias"""
        return self._add("linear", (x,), weight.n_out, {"weight": weight, "bias": bias})

    def head_linear(self, x: Tensor, weight: Weight) -> Tensor:
        """Each head times its own matrix: x [n, n_heads * n_in], weight[h] for head h."""
        n_heads = x.dim // weight.n_in
        return self._add("head_linear", (x,), n_heads * weight.n_out, {"weight": weight},
                         n_used=n_heads)  # fmt: skip

    def position_rows(self, table: Weight) -> Tensor:
        """Rows of the table for the step's positions."""
        return self._add("position_rows", (), table.n_in, {"table": table})

    def rope(self, x: Tensor, head_dim: int, rope: Rope) -> Tensor:
        """Rotate each head by its token's position."""
        weights = {"factors": rope.factors, "long_factors": rope.long_factors}
        return self._add("rope", (x,), x.dim, weights, head_dim=head_dim, rope=rope)

    def temper(self, x: Tensor, scale: float, length: int) -> Tensor:
        """x * (1 + scale * log(1 + position // length)): sharper queries far into a text."""
        return self._add("temper", (x,), x.dim, scale=scale, length=length)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        n_heads: int,
        n_kv_heads: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Weight | None = None,
        causal: bool = True,
    ) -> Tensor:
        """Store k and v in the layer's cache and attend to what it holds up to the token itself
        (all of the sequence when not causal); with a window only to the last ``window`` positions,
        the token's own included. Scores are softcap * tanh(scale * q.k / softcap). ``sinks`` hold
        for each head the score of one more key, whose value is zero."""
        return self._add(
            "attention", (q, k, v), n_heads * (v.dim // n_kv_heads), {"sinks": sinks},
            n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=q.dim // n_heads,
            v_dim=v.dim // n_kv_heads, scale=scale, window=window, softcap=softcap, causal=causal,
        )  # fmt: skip

    # ---- recurrence ---------------------------------------------------------------------------

    def conv1d(self, x: Tensor, weight: Weight) -> Tensor:
        """Causal convolution over time of each channel on its own: weight [n_taps, channels], its
        last tap for the token itself. The last n_taps - 1 inputs of a sequence are its state."""
        return self._add("conv1d", (x,), x.dim, {"weight": weight})

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, *,
        n_k_heads: int, n_v_heads: int,
    ) -> Tensor:  # fmt: skip
        """Gated delta rule (arXiv:2412.06464). For each value head h, with key head h % n_k_heads
        and a state S [d_k, d_v] that starts at zero: S = exp(decay) * S;
        S += outer(k, beta * (v - k @ S)); out = q @ S / sqrt(d_k)."""
        return self._add("delta_rule", (q, k, v, decay, beta), v.dim,
                         n_k_heads=n_k_heads, n_v_heads=n_v_heads)  # fmt: skip

    # ---- element by element -------------------------------------------------------------------

    def add(self, x: Tensor, y: Tensor | Weight) -> Tensor:
        """x + y; a weight is one row (its first) for all."""
        if isinstance(y, Weight):
            return self._add("add_vector", (x,), x.dim, {"vector": y})
        return self._add("add", (x, y), x.dim)

    def mul(self, x: Tensor, y: Tensor | Weight) -> Tensor:
        """x * y; a weight is one row for all, a tensor of one element a factor for the row."""
        if isinstance(y, Weight):
            return self._add("mul_vector", (x,), x.dim, {"vector": y})
        return self._add("mul_row" if y.dim == 1 and x.dim > 1 else "mul", (x, y), x.dim)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return self._add("scale", (x,), x.dim, factor=factor)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap)"""
        return self._add("softcap", (x,), x.dim, cap=cap)

    def sigmoid(self, x: Tensor) -> Tensor:
        return self._add("sigmoid", (x,), x.dim)

    def softplus(self, x: Tensor) -> Tensor:
        """log(1 + exp(x))"""
        return self._add("softplus", (x,), x.dim)

    def silu(self, x: Tensor) -> Tensor:
        """x * sigmoid(x)"""
        return self._add("silu", (x,), x.dim)

    def gelu(self, x: Tensor) -> Tensor:
        """x * Phi(x) by its tanh approximation (arXiv:1606.08415)"""
        return self._add("gelu", (x,), x.dim)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up"""
        return self._add("swiglu", (gate, up), gate.dim)

    def geglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """gelu(gate) * up"""
        return self._add("geglu", (gate, up), gate.dim)

    def swiglu_clamped(self, gate: Tensor, up: Tensor) -> Tensor:
        """gpt-oss: g * sigmoid(1.702 g) * (u + 1) with g = min(gate, 7), u = clip(up, -7, 7)"""
        return self._add("swiglu_clamped", (gate, up), gate.dim)

    # ---- mixture of experts -------------------------------------------------------------------

    def moe_route(
        self, logits: Tensor, n_used: int, *, normalize: bool,
        gating: Literal["softmax", "sigmoid"] = "softmax", bias: Weight | None = None,
        scale: float = 1.0, n_groups: int = 1, n_groups_used: int = 1,
    ) -> Tensor:  # fmt: skip
        """The n_used best experts of each token: [n, 2 * n_used], ids then weights, best first,
        ties to the lower id. Shares are the softmax or sigmoid of the logits; experts are ranked by
        share + bias. With groups only those of the n_groups_used best groups take part, a group
        counting as its best expert or, with a bias, its two best. Weights are shares, which sum to
        1 when normalized, times scale."""
        return self._add(
            "moe_route", (logits,), 2 * n_used, {"bias": bias}, n_used=n_used, normalize=normalize,
            gating=gating, scale=scale, n_groups=n_groups, n_groups_used=n_groups_used,
        )  # fmt: skip

    def moe_linear(
        self, x: Tensor, route: Tensor, weight: Weight, bias: Weight | None = None
    ) -> Tensor:
        """For each chosen expert e of a token: x @ weight[e].T + bias[e]. x is [n, n_in], the same
        for all, or [n, n_used * n_in], one for each rank; the result is [n, n_used * n_out]."""
        n_used = route.dim // 2
        return self._add("moe_linear", (x, route), n_used * weight.n_out,
                         {"weight": weight, "bias": bias}, n_used=n_used)  # fmt: skip

    def moe_sum(self, x: Tensor, route: Tensor) -> Tensor:
        """The experts' outputs summed by their weights, in order of rank."""
        n_used = route.dim // 2
        return self._add("moe_sum", (x, route), x.dim // n_used, n_used=n_used)
