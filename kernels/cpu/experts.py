"""Mixture of experts: routing, grouping tokens by expert, and linear layers over the groups.

A *pair* is (token, rank): the rank-th best expert of a token. Pairs are sorted by expert, so that
each expert's weights are read once for all its tokens with the ordinary linear tiles; results go
back to [token][rank] and are summed in order of rank (architecture, rule 6).
"""

from __future__ import annotations

from edgellm.kernels.cpu.linear import N_ARGUMENTS, Tile, emit_groups
from edgellm.kernels.cpu.store import EmitKernel
from edgellm.kernels.cpu.vector import F32, I32, I64, Emitter, Value


def make_route(n_experts: int, n_used: int, normalize: bool) -> EmitKernel:
    """Over tokens. 0 logits, 1 their row bytes, 2 route, 3 its row bytes (n_used ids as float32,
    then n_used weights)."""

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        logits, logit_bytes, route, route_bytes = e.arguments(args, 4)
        left = e.stack(4 * n_experts)
        with e.loop(hi, lo) as token:
            source, target = logits + token * logit_bytes, route + token * route_bytes
            top = e.var(e.load(F32, source))
            with e.loop(n_experts) as i:
                value = e.load(F32, source + i * 4)
                e.store(value, left + i * 4)
                top.set(e.maximum(top.get(), value))

            def share(value: Value, top: Value) -> Value:
                return e.exp((value - top).splat(e.lanes))[0]

            total = e.var(e.const(0.0, F32))
            if not normalize:
                with e.loop(n_experts) as i:
                    value = share(e.load(F32, source + i * 4), top.get())
                    total.set(total.get() + value)
            with e.loop(n_used) as rank:
                best = e.var(e.const(float("-inf"), F32))
                chosen = e.var(0)
                with e.loop(n_experts) as i:
                    value = e.load(F32, left + i * 4)
                    better = value > best.get()
                    best.set(e.select(better, value, best.get()))
                    chosen.set(e.select(better, i, chosen.get()))
                e.store(e.const(float("-inf"), F32), left + chosen.get() * 4)
                weight = share(best.get(), top.get())
                e.store(chosen.get().f32(), target + rank * 4)
                e.store(weight, target + (rank + n_used) * 4)
                if normalize:
                    total.set(total.get() + weight)
            with e.loop(n_used) as rank:
                at = target + (rank + n_used) * 4
                e.store(e.load(F32, at) / total.get(), at)

    return emit


def make_group(n_experts: int, n_used: int) -> EmitKernel:
    """Sort the step's pairs by expert, in order of token and rank (one call does all). 0 route,
    1 its row bytes, 2 address of the number of tokens, 3 first place of each expert
    [n_experts + 1], 4 place of each pair."""

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        route, route_bytes, count, starts, places = e.arguments(args, 5)
        n_tokens, following = e.load(I64, count), e.stack(8 * n_experts)

        with e.loop(n_experts + 1) as i:
            e.store(e.const(0), starts + i * 8)
        with e.loop(n_tokens) as token, e.loop(n_used) as rank:
            expert = e.load(F32, route + token * route_bytes + rank * 4).i64()
            at = starts + (expert + 1) * 8
            e.store(e.load(I64, at) + 1, at)
        with e.loop(n_experts) as i:
            begin = e.load(I64, starts + i * 8)
            e.store(begin, following + i * 8)
            e.store(e.load(I64, starts + i * 8 + 8) + begin, starts + i * 8 + 8)
        with e.loop(n_tokens) as token, e.loop(n_used) as rank:
            expert = e.load(F32, route + token * route_bytes + rank * 4).i64()
            at = following + expert * 8
            place = e.load(I64, at)
            e.store(place, places + (token * n_used + rank) * 8)
            e.store(place + 1, at)

    return emit


def make_gather(n_used: int) -> EmitKernel:
    """Over tokens: pairs' activation rows to their places. 0 x, 1 bytes from token to token,
    2 bytes from rank to rank (0: all ranks share a row), 3 places, 4 out, 5 bytes of a pair."""
    return _copy_pairs(n_used, to_places=True)


def make_scatter(n_used: int) -> EmitKernel:
    """Over tokens: pairs' results back to [token][rank]. Arguments as ``make_gather``, 0 the
    [token][rank] side and 4 the grouped side."""
    return _copy_pairs(n_used, to_places=False)


def _copy_pairs(n_used: int, to_places: bool) -> EmitKernel:
    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        x, token_bytes, rank_bytes, places, grouped, n_bytes = e.arguments(args, 6)
        with e.loop(hi, lo) as token, e.loop(n_used) as rank:
            place = e.load(I64, places + (token * n_used + rank) * 8)
            mine, other = x + token * token_bytes + rank * rank_bytes, grouped + place * n_bytes
            source, target = (mine, other) if to_places else (other, mine)
            with e.loop(n_bytes, step=4) as i:
                e.store(e.load(I32, source + i), target + i)

    return emit


def make_expert_linear(tile: Tile) -> EmitKernel:
    """Over (expert, run of row groups). Arguments 0-10 as every linear kernel, with 1 and 2 the
    grouped activations and outputs, 11 first place of each expert, 12 bytes of an expert's
    weights, 13 chunks of an expert."""

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        a = e.arguments(args, N_ARGUMENTS + 3)
        with e.loop(hi, lo) as chunk:
            expert, part = chunk // a[13], chunk % a[13]
            begin = e.load(I64, a[11] + expert * 8)
            n_pairs = e.load(I64, a[11] + expert * 8 + 8) - begin
            with e.when(n_pairs > 0):
                emit_groups(
                    e, tile, a, part * a[8], e.minimum((part + 1) * a[8], a[7]),
                    a[0] + expert * a[12], a[1] + begin * a[4], a[2] + begin * a[5], n_pairs,
                )  # fmt: skip

    return emit


def make_sum(n_used: int) -> EmitKernel:
    """Over tokens. 0 x [rank][n], 1 its row bytes, 2 route, 3 its row bytes, 4 out, 5 its row
    bytes, 6 elements n."""

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        x, x_bytes, route, route_bytes, out, out_bytes, n = e.arguments(args, 7)
        with e.loop(hi, lo) as token:
            source, target = x + token * x_bytes, out + token * out_bytes
            shares = route + token * route_bytes + 4 * n_used
            with e.loop(n, step=e.lanes) as i:
                total = e.f32(source + i * 4) * e.broadcast(F32, shares)
                for rank in range(1, n_used):
                    part = e.f32(source + (n * rank + i) * 4)
                    total = e.fma(part, e.broadcast(F32, shares + 4 * rank), total)
                e.store(total, target + i * 4)

    return emit
