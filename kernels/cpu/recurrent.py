"""Layers with a state that each token changes: short convolutions and the gated delta rule.

Time goes token by token in one order, heads and channels side by side, so a result depends neither
on the cut of a prompt nor on the company (architecture, rule 6). A *run* is what a sequence brings
to a step:

    int64: first row | tokens | slot its state is read from, -1: a fresh one | slot it is left in

A step reads one slot and writes another: one that fails can be repeated, because what it began
with is still there.
"""

from __future__ import annotations

from edgellm.kernels.cpu.store import EmitKernel
from edgellm.kernels.cpu.vector import F32, I64, Emitter, Value, Var

RUN_WORDS = 4
_ROWS = 4  # rows of a delta rule's state whose sums run beside each other


def make_conv1d(n_taps: int) -> EmitKernel:
    """Over vectors of channels. 0 x, 1 x row bytes, 2 taps [n_taps][channels], 3 channels, 4 out,
    5 out row bytes, 6 states [slot][n_taps - 1][channels], 7 runs, 8 address of their number."""

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        x, x_bytes, taps, n, out, out_bytes, states, runs, count = e.arguments(args, 9)
        n_runs, row_bytes = e.load(I64, count), n * 4
        with e.loop(hi, lo) as vector:
            column = vector * (4 * e.lanes)
            weights = [e.f32(taps + column + row_bytes * t) for t in range(n_taps)]
            with e.loop(n_runs) as r:
                first, n_tokens, old, new = _run(e, runs, r)
                past = [e.var(e.zeros()) for _ in range(n_taps - 1)]
                with e.when(old >= 0):
                    for t, slot in enumerate(past):
                        at = states + (old * (n_taps - 1) + t) * row_bytes
                        slot.set(e.f32(at + column))
                with e.loop(n_tokens) as i:
                    newest = e.f32(x + (first + i) * x_bytes + column)
                    inputs = [*(slot.get() for slot in past), newest]
                    total = inputs[0] * weights[0]
                    for value, weight in zip(inputs[1:], weights[1:], strict=True):
                        total = e.fma(value, weight, total)
                    e.store(total, out + (first + i) * out_bytes + column)
                    for slot, value in zip(past, inputs[1:], strict=True):
                        slot.set(value)
                for t, slot in enumerate(past):
                    at = states + (new * (n_taps - 1) + t) * row_bytes
                    e.store(slot.get(), at + column)

    return emit


def make_delta_rule(n_k_heads: int, n_v_heads: int, d_k: int, d_v: int) -> EmitKernel:
    """Over (head, vector of its values). For q, k, v, decay, beta, out: address, row bytes; then
    12 states [slot][head][vector][d_k][lanes], 13 runs, 14 address of their number."""

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        a = e.arguments(args, 15)
        states, runs, n_runs = a[12], a[13], e.load(I64, a[14])
        n_vectors, line = d_v // e.lanes, 4 * e.lanes
        part_bytes = d_k * line
        with e.loop(hi, lo) as work, e.loop(n_runs) as r:
            head, k_head = work // n_vectors, work // n_vectors % n_k_heads
            first, n_tokens, old, new = _run(e, runs, r)
            part = states + (new * (n_v_heads * n_vectors) + work) * part_bytes
            before = states + (old * (n_v_heads * n_vectors) + work) * part_bytes
            with e.loop(d_k) as j:
                e.store(e.zeros(), part + j * line)
            with e.when(old >= 0), e.loop(d_k) as j:
                e.store(e.f32(before + j * line), part + j * line)
            with e.loop(n_tokens) as i:
                row = first + i
                q, k = (a[2 * t] + row * a[2 * t + 1] + k_head * (4 * d_k) for t in (0, 1))
                v, out = (a[t] + row * a[t + 1] + work * line for t in (4, 10))
                decay, beta = (e.broadcast(F32, a[t] + row * a[t + 1] + head * 4) for t in (6, 8))
                _token(e, d_k, part, q, k, v, e.exp(decay), beta, out)

    return emit


def _token(
    e: Emitter, d_k: int, state: Value, q: Value, k: Value, v: Value, decay: Value, beta: Value,
    out: Value,
) -> None:  # fmt: skip
    """One vector of values through one token: the state is decayed, corrected and read."""
    line = 4 * e.lanes
    known = [e.var(e.zeros()) for _ in range(_ROWS)]
    with e.loop(d_k, step=_ROWS) as j:
        for t, total in enumerate(known):
            s = e.f32(state + j * line + t * line) * decay
            total.set(e.fma(e.broadcast(F32, k + j * 4 + 4 * t), s, total.get()))
    change = (e.f32(v) - _sum(known)) * beta
    read = [e.var(e.zeros()) for _ in range(_ROWS)]
    with e.loop(d_k, step=_ROWS) as j:
        for t, total in enumerate(read):
            at = state + j * line + t * line
            s = e.fma(e.broadcast(F32, k + j * 4 + 4 * t), change, e.f32(at) * decay)
            e.store(s, at)
            total.set(e.fma(e.broadcast(F32, q + j * 4 + 4 * t), s, total.get()))
    e.store(_sum(read) * d_k**-0.5, out)


def _sum(parts: list[Var]) -> Value:
    return (parts[0].get() + parts[1].get()) + (parts[2].get() + parts[3].get())


def _run(e: Emitter, runs: Value, r: Value) -> list[Value]:
    return [e.load(I64, runs + r * (8 * RUN_WORDS) + 8 * w) for w in range(RUN_WORDS)]
