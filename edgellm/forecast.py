"""How fast a model will be at most, from its graph and what the machine was measured to reach.

Decode is bound by memory: a token costs the bytes of all weights it meets, and of the keys and
values in sight, over the bandwidth of where they lie. A prompt is bound by arithmetic: a n for the
matrices, b n^2 for attention. With streamed weights a step takes at least the time of copying them,
while the device computes. All are floors of the time: kernels reach 0.3 to 1 of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from edgellm.kernels.graph import MATRIX_OPS, Graph, Op
from edgellm.kernels.rows import select_early
from edgellm.kernels.split import CPU, places, split
from edgellm.memory import STEP_TOKENS, kv_row_bytes
from edgellm.offload import Plan
from edgellm.speeds import Speeds

USUAL_PROMPT, USUAL_ANSWER = 512, 128  # tokens of a request
FLOAT_COST = 4  # multiply-adds of bytes that one of floats takes the time of


@dataclass
class Share:
    """What one place has to do. ``experts`` are (bytes of one, how many, of them used, times used
    multiply-adds)."""

    weights: int = 0  # bytes that every step reads
    streamed: int = 0  # bytes that every step copies, all experts among them
    dots: int = 0  # multiply-adds of bytes for each token of a prompt
    experts: list[tuple[int, int, int]] = field(default_factory=list)
    attention: list[tuple[int, int, int | None]] = field(default_factory=list)
    crossing: int = 0  # floats of a row that are handed over
    hops: int = 0

    def step_bytes(self, n_seqs: int, depth: int) -> float:
        """Read by a step that generates one token for each sequence behind ``depth`` others."""
        total = float(self.weights)
        for size, there, used in self.experts:
            total += size * min(there, used * n_seqs)
        for row, _, window in self.attention:
            total += n_seqs * row * min(depth + 1, window or depth + 1)
        return total

    def prompt_dots(self, n_tokens: int) -> float:
        """Multiply-adds of bytes, those of floats counted as FLOAT_COST."""
        total = float(self.dots) * n_tokens
        for _, heads, window in self.attention:
            seen = n_tokens * n_tokens / 2
            if window is not None and window < n_tokens:
                seen = window * window / 2 + (n_tokens - window) * window
            total += FLOAT_COST * heads * seen
        return total


class Forecast:
    """Of one plan. ``type_k`` and ``type_v`` are what keys and values are kept in."""

    def __init__(self, graph: Graph, plan: Plan, type_k: str, type_v: str, speeds: Speeds) -> None:
        self._speeds, self.shares = speeds, dict[str, Share]()
        self._streamed = plan.streamed
        whole = select_early(graph, ())
        at = places(whole, plan.place_of, plan.kv_place)
        for op in whole.ops:
            self._add(self.shares.setdefault(at[op], Share()), op, type_k, type_v)
        for part in split(whole, at):
            if part.place != CPU:
                share = self.shares[part.place]
                share.hops += 2
                share.crossing += sum(t.dim for t in (*part.reads, *part.writes))

    def _add(self, share: Share, op: Op, type_k: str, type_v: str) -> None:
        if op.kind in MATRIX_OPS:
            weight = op.weights["weight"]
            n_bytes, n = weight.type.row_bytes(weight.n_in) * weight.n_out, weight.shape[2:]
            dots = weight.n_in * weight.n_out
            if weight.name in self._streamed:
                share.streamed += n_bytes * (n[0] if n else 1)
            if op.kind == "moe_linear":
                share.experts.append((n_bytes, n[0], op.attrs["n_used"]))
                share.dots += dots * op.attrs["n_used"]
            else:
                share.weights += n_bytes * (n[0] if n else 1)
                share.dots += dots * (n[0] if n else 1) * (op.output.rows == "tokens")
        elif op.kind == "attention":
            a = op.attrs
            heads = a["n_heads"] * (a["head_dim"] + a["v_dim"])
            share.attention.append((kv_row_bytes(op, type_k, type_v), heads, a["window"]))

    def step_seconds(self, n_seqs: int = 1, depth: int = 0) -> float:
        """At least, of a step that generates one token for each of n_seqs sequences."""
        total = 0.0
        for place, share in self.shares.items():
            speed = self._speeds[place]
            read = share.step_bytes(n_seqs, depth) / speed.read
            total += max(read, share.streamed / speed.copy)
            total += share.hops * speed.hop + 4 * n_seqs * share.crossing / speed.copy
        return total

    def tokens_per_second(self, n_seqs: int = 1, depth: int = 0) -> float:
        """At most, of all sequences together."""
        return n_seqs / self.step_seconds(n_seqs, depth)

    def dot_seconds(self, n_tokens: int) -> float:
        """At least, of the arithmetic of a prompt of n_tokens."""
        return sum(
            share.prompt_dots(n_tokens) / self._speeds[place].dots
            for place, share in self.shares.items()
            if self._speeds[place].dots
        )

    def first_token_seconds(self, n_tokens: int) -> float:
        """At least, from a prompt of n_tokens to the first token of the answer."""
        n_steps = -(-n_tokens // STEP_TOKENS)
        total = 0.0
        for place, share in self.shares.items():
            speed = self._speeds[place]
            dots = share.prompt_dots(n_tokens) / speed.dots if speed.dots else 0.0
            read = share.step_bytes(STEP_TOKENS, 0) / speed.read
            total += max(dots, n_steps * max(read, share.streamed / speed.copy))
            total += n_steps * share.hops * speed.hop + 4 * n_tokens * share.crossing / speed.copy
        return total

    def request_seconds(self, n_seqs: int = 1, n_prompt: int = USUAL_PROMPT) -> float:
        """At least, of n_seqs requests at once with usual answers: what placements are compared
        by."""
        prompts = n_seqs * self.first_token_seconds(n_prompt)
        return prompts + USUAL_ANSWER * self.step_seconds(n_seqs, n_prompt)


def fit_prompt_curve(lengths: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """a and b of a n + b n^2 through measured prompts, none of them negative."""
    n = np.asarray(lengths, np.float64)
    weight = 1 / np.asarray(seconds)  # relative errors count
    rows = np.stack([n, n * n], axis=1) * weight[:, None]
    a, b = np.linalg.lstsq(rows, np.ones(len(n)), rcond=None)[0]
    if b < 0:
        a, b = float(np.mean(np.asarray(seconds) / n)), 0.0
    if a < 0:
        a, b = 0.0, float(np.mean(np.asarray(seconds) / (n * n)))
    return float(a), float(b)
