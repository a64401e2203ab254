"""Norms over runs of a row: the row itself, or each of its heads. Runs are whole vectors.

Arguments: 0 x, 1 x row bytes, 2 weight, 3 bytes from a run's weights to the next's (0: the same for
all), 4 bias or 0, 5 out, 6 out row bytes, 7 runs in a row, 8 elements in a run, 9 eps (float32
bits).
"""

from __future__ import annotations

from collections.abc import Callable

from edgellm.kernels.cpu.store import EmitKernel
from edgellm.kernels.cpu.vector import F32, Emitter, Value

N_ARGUMENTS = 9


def _total(e: Emitter, n: Value, term: Callable[[Value, Value], Value]) -> Value:
    """The sum over a run, in every lane: term(byte offset, sum so far) goes on with it."""
    total = e.var(e.zeros())
    with e.loop(n, step=e.lanes) as i:
        total.set(term(i * 4, total.get()))
    return e.sum(total.get())


def make_rms_norm() -> EmitKernel:
    """Times weight; without a bias."""

    def run(e: Emitter, source: Value, target: Value, a: list[Value], weight: Value, eps: Value
            ) -> None:  # fmt: skip
        n = a[8]
        squares = _total(e, n, lambda at, sum_: e.fma(e.f32(source + at), e.f32(source + at), sum_))
        mean = squares[0] / n.f32()
        factor = (1.0 / e.sqrt(mean + eps)).splat(e.lanes)
        with e.loop(n, step=e.lanes) as i:
            v = e.f32(source + i * 4) * factor * e.f32(weight + i * 4)
            e.store(v, target + i * 4)

    return _make(run)


def make_layer_norm() -> EmitKernel:
    """Less the mean, times weight, plus bias where there is one."""

    def run(e: Emitter, source: Value, target: Value, a: list[Value], weight: Value, eps: Value
            ) -> None:  # fmt: skip
        bias, n = a[4], a[8]
        total = _total(e, n, lambda at, sum_: sum_ + e.f32(source + at))
        mean = (total[0] / n.f32()).splat(e.lanes)

        def square(at: Value, sum_: Value) -> Value:
            v = e.f32(source + at) - mean
            return e.fma(v, v, sum_)

        variance = _total(e, n, square)[0] / n.f32()
        factor = (1.0 / e.sqrt(variance + eps)).splat(e.lanes)
        with e.loop(n, step=e.lanes) as i:
            v = (e.f32(source + i * 4) - mean) * factor * e.f32(weight + i * 4)
            e.store(v, target + i * 4)
        with e.when(bias.ne(0)), e.loop(n, step=e.lanes) as i:
            e.store(e.f32(target + i * 4) + e.f32(bias + i * 4), target + i * 4)

    return _make(run)


def make_l2_norm() -> EmitKernel:
    """To length 1; neither weight nor bias."""

    def run(e: Emitter, source: Value, target: Value, a: list[Value], weight: Value, eps: Value
            ) -> None:  # fmt: skip
        n = a[8]
        squares = _total(e, n, lambda at, sum_: e.fma(e.f32(source + at), e.f32(source + at), sum_))
        factor = (1.0 / e.sqrt(squares[0] + eps)).splat(e.lanes)
        with e.loop(n, step=e.lanes) as i:
            e.store(e.f32(source + i * 4) * factor, target + i * 4)

    return _make(run)


def _make(run: Callable[[Emitter, Value, Value, list[Value], Value, Value], None]) -> EmitKernel:
    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        a = e.arguments(args, N_ARGUMENTS)
        x, x_bytes, weight, weight_bytes, _, out, out_bytes, n_runs, n = a
        eps = e.load(F32, args + 8 * N_ARGUMENTS)
        with e.loop(hi, lo) as row, e.loop(n_runs) as r:
            source, target = x + row * x_bytes + r * n * 4, out + row * out_bytes + r * n * 4
            run(e, source, target, a, weight + r * weight_bytes, eps)

    return emit
