"""Scales with the least squared error, each element's weighted by its importance.

For given codes the best scale is a least-squares fit, and for given scales the best codes are the
nearest. Neither finds the other's best, so a grid of scales is tried, wide enough for the outermost
elements to be clipped, each with the fit to its codes; rounds of both from the best end the search.
What is compared is how much a choice takes from the sum of squares, its gain: that follows from the
same three sums as the fit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from edgellm.quant.lanes import Index, Lane, Lanes, Table

MOST = 65504.0  # the largest finite half
LEAST = 2.0**-24  # the smallest above zero
ROUNDS = 2


@dataclass(frozen=True)
class Grid:
    """Scales to try: those that bring the extreme element to the level ``first``, to ``first`` +
    ``distance`` and so on, ``n`` in all; ``both_ways`` also to these levels with the other sign."""

    first: float
    distance: float
    n: int
    both_ways: bool = False


class Levels(Protocol):
    """What codes stand for, in units of the scale."""

    def level(self, o: Lanes, x: Lane) -> Lane:
        """The level nearest to x, float32."""

    def code(self, o: Lanes, x: Lane) -> Lane:
        """Its code, int32."""


@dataclass(frozen=True)
class Whole:
    """The integers from low to high; codes are from 0."""

    low: int
    high: int

    def level(self, o: Lanes, x: Lane) -> Lane:
        return o.round(o.minimum(o.maximum(x, self.low), self.high))

    def code(self, o: Lanes, x: Lane) -> Lane:
        return o.i32(self.level(o, x) - float(self.low))


@dataclass(frozen=True)
class Listed:
    """Rising levels; the lower one of two that are equally near."""

    levels: tuple[int, ...]

    def _stepped(self, o: Lanes, x: Lane, values: Sequence[int]) -> Lane:
        low, high = float(self.levels[0]), float(self.levels[-1])
        return o.stepped(o.minimum(o.maximum(x, low), high), middles(self.levels), values)

    def level(self, o: Lanes, x: Lane) -> Lane:
        return self._stepped(o, x, self.levels)

    def code(self, o: Lanes, x: Lane) -> Lane:
        return o.i32(self._stepped(o, x, range(len(self.levels))))


def middles(levels: Sequence[int]) -> list[float]:
    """What lies halfway between neighbours."""
    return [(a + b) / 2 for a, b in pairwise(levels)]


def weights(o: Lanes, n: int) -> Table:
    """What the squared error of each of a block's n elements counts: its importance times
    sqrt(mean square + x ** 2). Models stay closer to themselves than with importance alone: the
    divergence of Qwen2.5-1.5B's predictions with all matrices in Q4_K falls by 8 %."""
    found = o.table(n)
    (total,) = o.loop(n, lambda i, total: [total + o.x(i) * o.x(i)], o.number(0.0))
    mean = total * (1.0 / n)

    def put(i: Index) -> None:
        found[i] = o.w(i) * o.sqrt(mean + o.x(i) * o.x(i))

    o.loop(n, put)
    return found


def extreme(o: Lanes, elements: Sequence[Lane]) -> Lane:
    """The first of the elements with the largest magnitude; NaN where one is NaN."""
    found = size = o.largest(elements)
    for x in reversed(elements):
        found = o.select(o.abs(x) >= size, x, found)
    return found


@dataclass(frozen=True)
class Group:
    """The n elements of a block from ``at`` on; ``weights`` are the block's."""

    o: Lanes
    weights: Table
    at: Index
    n: int

    def __iter__(self) -> Iterator[tuple[Lane, Lane]]:
        """Elements with their weights."""
        for k in range(self.n):
            yield self.o.x(self.at + k), self.weights[self.at + k]


# ---- element = scale * level --------------------------------------------------------------------


def sums(group: Group, levels: Levels, factor: Lane) -> tuple[Lane, Lane]:
    """The weighted sums of level * x and of level ** 2, levels those nearest to x * factor."""
    o = group.o
    lx, ll = o.number(0.0), o.number(0.0)
    for x, w in group:
        level = levels.level(o, x * factor)
        weighted = w * level
        lx = lx + weighted * x
        ll = ll + weighted * level
    return lx, ll


def search(group: Group, levels: Levels, grid: Grid) -> Lane:
    """The scale of a group."""
    o = group.o
    top = extreme(o, [x for x, _ in group])
    inverse = o.inverse(top)

    def fit(factor: Lane, best: Lane, scale: Lane) -> tuple[Lane, Lane]:
        lx, ll = sums(group, levels, factor)
        fitted = lx * o.inverse(ll)
        gain = fitted * lx
        is_better = gain > best
        return o.select(is_better, gain, best), o.select(is_better, fitted, scale)

    def directed(turned: Index, *state: Lane) -> list[Lane]:
        towards = inverse * (1.0 - 2.0 * o.number(turned))

        def tried(i: Index, best: Lane, scale: Lane) -> tuple[Lane, Lane]:
            return fit((o.number(i) * grid.distance + grid.first) * towards, best, scale)

        return o.loop(grid.n, tried, *state)

    def refined(_: Index, best: Lane, scale: Lane) -> tuple[Lane, Lane]:
        return fit(o.inverse(scale), best, scale)

    start = top * (1.0 / (grid.first + grid.n // 2 * grid.distance))
    state = o.loop(2 if grid.both_ways else 1, directed, o.number(0.0), start)
    return o.loop(ROUNDS, refined, *state)[1]


# ---- element = scale * code + offset, offset <= 0 -----------------------------------------------


def affine_sums(group: Group, codes: Whole, factor: Lane, offset: Lane) -> list[Lane]:
    """The weighted sums of code, of code ** 2 and of code * x, codes those nearest to
    (x - offset) * factor."""
    o = group.o
    c, cc, cx = o.number(0.0), o.number(0.0), o.number(0.0)
    for x, w in group:
        code = codes.level(o, (x - offset) * factor)
        weighted = w * code
        c = c + weighted
        cc = cc + weighted * code
        cx = cx + weighted * x
    return [c, cc, cx]


def totals(group: Group) -> tuple[Lane, Lane]:
    """The sum of weights, and of weight * x."""
    total, wx = group.o.number(0.0), group.o.number(0.0)
    for x, w in group:
        total = total + w
        wx = wx + w * x
    return total, wx


def affine_gain(w: Lane, wx: Lane, s: Sequence[Lane], scale: Lane, offset: Lane) -> Lane:
    """What scale and offset take from the sum of squares, of ``totals`` and ``affine_sums``."""
    c, cc, cx = s
    return scale * (2.0 * cx - scale * cc) + offset * (2.0 * (wx - scale * c) - offset * w)


def affine_search(group: Group, codes: Whole, grid: Grid) -> tuple[Lane, Lane]:
    """The scale, >= 0, and the offset of a group."""
    o = group.o
    low, high = o.number(0.0), o.x(group.at)
    for x, _ in group:
        low, high = o.minimum(x, low), o.maximum(x, high)
    w, wx = totals(group)
    inverse = o.inverse(high - low)

    def fit(factor: Lane, start: Lane, best: Lane, scale: Lane, offset: Lane) -> list[Lane]:
        c, cc, cx = s = affine_sums(group, codes, factor, start)
        determinant = w * cc - c * c
        share = o.inverse(determinant)
        b = (cc * wx - c * cx) * share
        is_free = (determinant > 0.0) & (b < 0.0)
        a = o.select(is_free, (w * cx - wx * c) * share, cx * o.inverse(cc))
        b = o.select(is_free, b, 0.0)
        gain = affine_gain(w, wx, s, a, b)
        is_better = (gain > best) & (a > 0.0)
        pairs = ((gain, best), (a, scale), (b, offset))
        return [o.select(is_better, new, old) for new, old in pairs]

    def tried(i: Index, *state: Lane) -> list[Lane]:
        return fit((o.number(i) * grid.distance + grid.first) * inverse, low, *state)

    def refined(_: Index, best: Lane, scale: Lane, offset: Lane) -> list[Lane]:
        return fit(o.inverse(scale), offset, best, scale, offset)

    start = (high - low) * (1.0 / codes.high)
    state = o.loop(grid.n, tried, o.number(-3e38), start, low)
    _, scale, offset = o.loop(ROUNDS, refined, *state)
    return scale, offset


# ---- scales as they are stored ------------------------------------------------------------------


def stored(o: Lanes, x: Lane) -> Lane:
    """The nearest finite half."""
    return o.from_half(o.half(o.minimum(o.maximum(x, -MOST), MOST)))


def stored_scale(o: Lanes, x: Lane) -> Lane:
    """As ``stored``, but the least half where a number would become zero: scales counted in it are
    small integers then, not zero."""
    lost = (o.abs(x) > 0.0) & (o.abs(x) < LEAST)
    return stored(o, o.select(lost, o.select(x < 0.0, -LEAST, LEAST), x))
