"""Statistics of measurements: what a few samples can say about a ratio."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 4000
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
