"""Mixture of experts: routing, grouping tokens by expert, and linear layers over the groups.

A *pair* is (token, rank): the rank-th best expert of a token. Pairs are sorted by expert, so that
each expert's weights are read once for all its tokens with the ordinary linear tiles; results go
back to [token][rank] and are summed in order of rank (architecture, rule 6).
"""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.kernels.cpu.linear import N_ARGUMENTS, Tile, emit_groups
from edgellm.kernels.cpu.memory import round_up
from edgellm.kernels.cpu.store import EmitKernel
from edgellm.kernels.cpu.vector import F32, I32, I64, Emitter, Value


@dataclass(frozen=True)
class Routing:
    """How experts are chosen and weighed: see Graph.moe_route."""

    n_experts: int
    n_used: int
    normalize: bool
    is_sigmoid: bool
    has_bias: bool
    n_groups: int = 1
    n_groups_used: int = 1

    @property
    def name(self) -> str:
        flags = "".join("ny"[f] for f in (self.normalize, self.is_sigmoid, self.has_bias))
        return f"{self.n_experts}_{self.n_used}_{flags}_{self.n_groups}_{self.n_groups_used}"


def make_route(routing: Routing) -> EmitKernel:
    """Over tokens. 0 logits, 1 their row bytes, 2 route, 3 its row bytes (n_used ids as float32,
    then n_used weights), 4 bias or 0, 5 scale (float32 bits)."""
    n_experts, n_used = routing.n_experts, routing.n_used

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        logits, logit_bytes, route, route_bytes, bias = e.arguments(args, 5)
        scale = e.load(F32, args + 40)
        shares = e.stack(4 * round_up(n_experts, 16))  # of all experts
        left = e.stack(4 * n_experts)  # what they are ranked by, until they are taken
        with e.loop(hi, lo) as token:
            source, target = logits + token * logit_bytes, route + token * route_bytes
            total = _shares(e, routing, source, shares)
            with e.loop(n_experts) as i:
                if routing.has_bias or routing.is_sigmoid or routing.n_groups > 1:
                    rank = e.load(F32, shares + i * 4)
                    if not routing.is_sigmoid:
                        rank = rank / total
                    if routing.has_bias:
                        rank = rank + e.load(F32, bias + i * 4)
                else:  # the same order without what rounding ties
                    rank = e.load(F32, source + i * 4)
                e.store(rank, left + i * 4)
            if routing.n_groups > 1:
                _limit_groups(e, routing, left)
            chosen_total = e.var(e.const(0.0, F32))
            with e.loop(n_used) as rank_number:
                expert, _ = _take_best(e, left, n_experts)
                share = e.load(F32, shares + expert * 4)
                e.store(expert.f32(), target + rank_number * 4)
                e.store(share, target + (rank_number + n_used) * 4)
                chosen_total.set(chosen_total.get() + share)
            divisor = chosen_total.get() if routing.normalize else total
            with e.loop(n_used) as rank_number:
                at = target + (rank_number + n_used) * 4
                share = e.load(F32, at)
                if routing.normalize or not routing.is_sigmoid:
                    share = share / divisor
                e.store(share * scale, at)

    return emit


def _shares(e: Emitter, routing: Routing, logits: Value, shares: Value) -> Value:
    """Sigmoids, or exponentials whose sum is returned."""
    n = routing.n_experts
    top = e.var(e.load(F32, logits))
    if not routing.is_sigmoid:
        with e.loop(n) as i:
            top.set(e.maximum(top.get(), e.load(F32, logits + i * 4)))
    with e.loop(n, step=e.lanes) as i:  # rows are padded to whole vectors
        value = e.f32(logits + i * 4)
        if routing.is_sigmoid:
            e.store(1.0 / (e.exp(-value) + 1.0), shares + i * 4)
        else:
            e.store(e.exp(value - top.get()), shares + i * 4)
    total = e.var(e.const(0.0, F32))
    with e.loop(n) as i:
        total.set(total.get() + e.load(F32, shares + i * 4))
    return total.get()


def _take_best(e: Emitter, values: Value, n: int) -> tuple[Value, Value]:
    """The first of the largest of n values, and the value; it is taken out."""
    best, chosen = e.var(e.const(float("-inf"), F32)), e.var(0)
    with e.loop(n) as i:
        value = e.load(F32, values + i * 4)
        better = value > best.get()
        best.set(e.select(better, value, best.get()))
        chosen.set(e.select(better, i, chosen.get()))
    e.store(e.const(float("-inf"), F32), values + chosen.get() * 4)
    return chosen.get(), best.get()


def _limit_groups(e: Emitter, routing: Routing, left: Value) -> None:
    """Take out the experts of all but the best groups."""
    n_groups, size = routing.n_groups, routing.n_experts // routing.n_groups
    scores, spare = e.stack(4 * n_groups), e.stack(4 * size)
    nothing = e.const(float("-inf"), F32)
    with e.loop(n_groups) as group:
        with e.loop(size) as i:
            e.store(e.load(F32, left + (group * size + i) * 4), spare + i * 4)
        _, score = _take_best(e, spare, size)
        if routing.has_bias and size > 1:
            score = score + _take_best(e, spare, size)[1]
        e.store(score, scores + group * 4)
    for _ in range(routing.n_groups_used):
        _take_best(e, scores, n_groups)
    with e.loop(n_groups) as group:
        refused = e.load(F32, scores + group * 4) > nothing
        with e.when(refused), e.loop(size) as i:
            e.store(nothing, left + (group * size + i) * 4)


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


def make_head_groups(n_heads: int) -> EmitKernel:
    """The same for heads with a matrix each: all tokens of head 0, then of head 1 ... (one call).
    0 address of the number of tokens, 1 first places, 2 places."""

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        count, starts, places = e.arguments(args, 3)
        n_tokens = e.load(I64, count)
        with e.loop(n_heads + 1) as head:
            e.store(head * n_tokens, starts + head * 8)
        with e.loop(n_tokens) as token, e.loop(n_heads) as head:
            e.store(head * n_tokens + token, places + (token * n_heads + head) * 8)

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
    weights, 13 chunks of an expert, 14 bytes of an expert's bias."""

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        a = e.arguments(args, N_ARGUMENTS + 4)
        with e.loop(hi, lo) as chunk:
            expert, part = chunk // a[13], chunk % a[13]
            begin = e.load(I64, a[11] + expert * 8)
            n_pairs = e.load(I64, a[11] + expert * 8 + 8) - begin
            mine = [*a[:6], a[6] + expert * a[14], *a[7:]]
            with e.when(n_pairs > 0):
                emit_groups(
                    e, tile, mine, part * a[8], e.minimum((part + 1) * a[8], a[7]),
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
