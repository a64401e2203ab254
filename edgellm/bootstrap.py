"""Statistics of measurements: what a few samples can say about a ratio."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 4000
QUANTILE_RESAMPLES = 1000  # each takes a pass over all values
INDIFFERENT = 0.02  # a change of a ratio below this is nobody's loss


@dataclass(frozen=True)
class Ratio:
    """An estimate and its 95 % confidence interval."""

    value: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Of new speed / old speed: slower or faster only when the whole interval says so."""
        if self.high < 1 - INDIFFERENT:
            return "slower"
        return "faster" if self.low > 1 + INDIFFERENT else "same"

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}-{self.high:.2f})"


def mean_deviation(samples: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (0 for a single sample)."""
    deviation = statistics.stdev(samples) if len(samples) > 1 else 0.0
    return statistics.fmean(samples), deviation


def ratio_of_means(new: Sequence[float], old: Sequence[float]) -> Ratio:
    """mean(new) / mean(old) of two independent sets of samples; both are resampled."""
    a, b = (np.asarray(x, np.float64) for x in (new, old))
    means = [_resampled(x, seed).mean(1) for seed, x in enumerate((a, b))]
    return _interval(float(a.mean() / b.mean()), means[0] / means[1])


def ratio_of_quantiles(
    new: Sequence[Sequence[float]], old: Sequence[Sequence[float]], percentile: float
) -> Ratio:
    """The percentile of all new values / that of all old ones. Values come in groups (those of a
    request); whole groups are resampled, because what is in one belongs together."""
    a, b = (_Grouped(groups, percentile) for groups in (new, old))
    return _interval(a.value / b.value, a.resampled(0) / b.resampled(1))


class _Grouped:
    """Groups of values whose percentile is asked for."""

    def __init__(self, groups: Sequence[Sequence[float]], percentile: float) -> None:
        sizes = [len(group) for group in groups]
        values = np.concatenate([np.asarray(group, np.float64) for group in groups])
        order = np.argsort(values)
        self._sorted, self._groups = values[order], np.repeat(np.arange(len(groups)), sizes)[order]
        self._n_groups, self._percentile = len(groups), percentile
        self.value = float(np.percentile(values, percentile))

    def resampled(self, seed: int) -> NDArray[np.float64]:
        """[QUANTILE_RESAMPLES]"""
        rng, found = np.random.default_rng(seed), np.empty(QUANTILE_RESAMPLES)
        for i in range(QUANTILE_RESAMPLES):
            drawn = rng.integers(0, self._n_groups, self._n_groups)
            weights = np.bincount(drawn, minlength=self._n_groups)[self._groups]
            found[i] = _weighted(self._sorted, weights, self._percentile)
        return found


def _weighted(ordered: NDArray[np.float64], weights: NDArray[np.int64], percentile: float) -> float:
    """np.percentile of every value as often as its weight says."""
    ends = np.cumsum(weights)
    at = percentile / 100 * (ends[-1] - 1)
    low, high = np.searchsorted(ends, [int(at), min(int(at) + 1, ends[-1] - 1)], side="right")
    share = at - int(at)
    return float(ordered[low] * (1 - share) + ordered[high] * share)


def median_of_ratios(new: Sequence[float], old: Sequence[float]) -> Ratio:
    """The median of new[i] / old[i]: for pairs measured right after each other, which share what
    the machine was doing meanwhile."""
    ratios = np.asarray(new, np.float64) / np.asarray(old, np.float64)
    return _interval(float(np.median(ratios)), np.median(_resampled(ratios, 0), axis=1))


def _resampled(samples: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """[RESAMPLES, n] draws with replacement, the same at every call."""
    chosen = np.random.default_rng(seed).integers(0, len(samples), (RESAMPLES, len(samples)))
    return samples[chosen]


def _interval(value: float, estimates: NDArray[np.float64]) -> Ratio:
    low, high = np.percentile(estimates, [2.5, 97.5])
    return Ratio(value, float(low), float(high))
