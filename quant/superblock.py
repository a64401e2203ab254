"""Blocks whose groups have integer scales, counted in a scale of the block that is a half.

Each group is searched by itself; the block's scale makes the largest of them the largest integer.
Integers next to the rounded ones are tried, then the block's scales are fitted to all codes. Codes
are chosen last, for the scales as they are stored.
"""

from dataclasses import dataclass

from edgellm.quant.lanes import Index, Lane, Lanes, Table
from edgellm.quant.search import (
    Grid,
    Group,
    Levels,
    Whole,
    affine_gain,
    affine_search,
    affine_sums,
    extreme,
    search,
    stored,
    stored_scale,
    sums,
    totals,
    weights,
)


@dataclass(frozen=True)
class Scaled:
    """A block whose element is d * scale[group] * level."""

    o: Lanes
    levels: Levels
    d_bits: Lane
    scales: Table  # of groups, integers
    factors: Table  # 1 / (d * scale)

    def code(self, group: Index, element: Index) -> Lane:
        return self.levels.code(self.o, self.o.x(element) * self.factors[group])

    def scale(self, group: int) -> Lane:
        return self.o.i32(self.scales[group])


def scaled(o: Lanes, n: int, n_groups: int, levels: Levels, grid: Grid, most: int) -> Scaled:
    """Groups of n elements; scales from -most to most - 1."""
    counts = weights(o, n * n_groups)
    scales, factors = o.table(n_groups), o.table(n_groups)
    whole = Whole(-most, most - 1)

    def group(g: Index) -> Group:
        return Group(o, counts, n * g, n)

    def searched(g: Index) -> None:
        scales[g] = search(group(g), levels, grid)

    o.loop(n_groups, searched)
    top = extreme(o, [scales[g] for g in range(n_groups)])
    d = stored_scale(o, top * (-1.0 / most))
    inverse = o.inverse(d)

    def gain(g: Index, d: Lane, scale: Lane) -> tuple[Lane, Lane, Lane]:
        """Of the group, and what the fit of d needs."""
        lx, ll = sums(group(g), levels, o.inverse(d * scale))
        lx, ll = scale * lx, scale * scale * ll
        return d * (2.0 * lx - d * ll), lx, ll

    def rounded(g: Index, total: Lane, lx: Lane, ll: Lane) -> list[Lane]:
        first = whole.level(o, scales[g] * inverse)

        def neighbour(i: Index, best: Lane, chosen: Lane, lx: Lane, ll: Lane) -> list[Lane]:
            scale = o.minimum(o.maximum(first + (o.number(i) * 2.0 - 1.0), -most), most - 1)
            new = gain(g, d, scale)
            is_better = new[0] > best
            pairs = ((new[0], best), (scale, chosen), (new[1], lx), (new[2], ll))
            return [o.select(is_better, a, b) for a, b in pairs]

        start = gain(g, d, first)
        best, scales[g], lx_here, ll_here = o.loop(2, neighbour, start[0], first, *start[1:])
        return [total + best, lx + lx_here, ll + ll_here]

    zero = o.number(0.0)
    before, lx, ll = o.loop(n_groups, rounded, zero, zero, zero)
    fitted = stored(o, lx * o.inverse(ll))
    (after,) = o.loop(n_groups, lambda g, total: [total + gain(g, fitted, scales[g])[0]], zero)
    is_better = after > before
    d = o.select(is_better, fitted, d)

    def finished(g: Index) -> None:
        factors[g] = o.inverse(d * scales[g])

    o.loop(n_groups, finished)
    return Scaled(o, levels, o.half(d), scales, factors)


@dataclass(frozen=True)
class Affine:
    """A block whose element is d * scale[group] * code - dmin * minimum[group]."""

    o: Lanes
    codes: Whole
    d_bits: Lane
    dmin_bits: Lane
    scales: Table  # of groups, integers
    minimums: Table
    factors: Table  # 1 / (d * scale)
    offsets: Table  # dmin * minimum

    def code(self, group: Index, element: Index) -> Lane:
        x = self.o.x(element) + self.offsets[group]
        return self.codes.code(self.o, x * self.factors[group])

    def scale(self, group: int) -> Lane:
        return self.o.i32(self.scales[group])

    def minimum(self, group: int) -> Lane:
        return self.o.i32(self.minimums[group])


def affine(o: Lanes, n: int, n_groups: int, top: int, grid: Grid, most: int) -> Affine:
    """Groups of n elements with codes up to ``top``; scales and minimums from 0 to ``most``."""
    codes, whole = Whole(0, top), Whole(0, most)
    counts = weights(o, n * n_groups)
    scales, minimums, factors, offsets = (o.table(n_groups) for _ in range(4))
    zero = o.number(0.0)

    def group(g: Index) -> Group:
        return Group(o, counts, n * g, n)

    def searched(g: Index, largest: Lane, lowest: Lane) -> list[Lane]:
        scales[g], offset = affine_search(group(g), codes, grid)
        minimums[g] = 0.0 - offset
        return [o.maximum(scales[g], largest), o.maximum(minimums[g], lowest)]

    largest, lowest = o.loop(n_groups, searched, zero, zero)
    d = stored_scale(o, largest * (1.0 / most))
    dmin = stored_scale(o, lowest * (1.0 / most))
    inverse, inverse_min = o.inverse(d), o.inverse(dmin)
    up, along = o.table(4), o.table(4)  # neighbours: scale -1 and +1, minimum -1 and +1
    for i, (a, b) in enumerate(((-1.0, 0.0), (1.0, 0.0), (0.0, -1.0), (0.0, 1.0))):
        up[i], along[i] = o.number(a), o.number(b)

    def rounded(g: Index, *block: Lane) -> list[Lane]:
        w, wx = totals(group(g))

        def tried(scale: Lane, minimum: Lane) -> list[Lane]:
            a, b = d * scale, 0.0 - dmin * minimum
            s = affine_sums(group(g), codes, o.inverse(a), b)
            return [affine_gain(w, wx, s, a, b), scale, minimum, *s]

        def neighbour(i: Index, *best: Lane) -> list[Lane]:
            scale = o.minimum(o.maximum(best[1] + up[i], 0.0), most)
            minimum = o.minimum(o.maximum(best[2] + along[i], 0.0), most)
            new = tried(scale, minimum)
            is_better = new[0] > best[0]
            return [o.select(is_better, a, b) for a, b in zip(new, best, strict=True)]

        start = tried(whole.level(o, scales[g] * inverse),
                      whole.level(o, minimums[g] * inverse_min))  # fmt: skip
        gain, scale, minimum, c, cc, cx = o.loop(4, neighbour, *start)
        scales[g], minimums[g] = scale, minimum
        terms = (gain, scale * scale * cc, scale * minimum * c, minimum * minimum * w,
                 scale * cx, minimum * wx)  # fmt: skip
        return [total + term for total, term in zip(block, terms, strict=True)]

    before, aa, ab, bb, xa, xb = o.loop(n_groups, rounded, *[zero] * 6)
    # least squares of d * (scale * code) - dmin * minimum over the block
    determinant = aa * bb - ab * ab
    share = o.inverse(determinant)
    new_d, new_dmin = (bb * xa - ab * xb) * share, (ab * xa - aa * xb) * share
    is_sound = (determinant > 0.0) & (new_d > 0.0) & (new_dmin > 0.0)
    new_d = stored(o, o.select(is_sound, new_d, d))
    new_dmin = stored(o, o.select(is_sound, new_dmin, dmin))

    def gain(g: Index, total: Lane) -> list[Lane]:
        a, b = new_d * scales[g], 0.0 - new_dmin * minimums[g]
        s = affine_sums(group(g), codes, o.inverse(a), b)
        return [total + affine_gain(*totals(group(g)), s, a, b)]

    (after,) = o.loop(n_groups, gain, zero)
    is_better = after > before
    d, dmin = o.select(is_better, new_d, d), o.select(is_better, new_dmin, dmin)

    def finished(g: Index) -> None:
        factors[g], offsets[g] = o.inverse(d * scales[g]), dmin * minimums[g]

    o.loop(n_groups, finished)
    return Affine(o, codes, o.half(d), o.half(dmin), scales, minimums, factors, offsets)
