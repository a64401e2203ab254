"""What a few samples can say about a ratio."""

import numpy as np
import pytest

from edgellm.bootstrap import (
    QUANTILE_RESAMPLES,
    Ratio,
    _Grouped,
    mean_deviation,
    median_of_ratios,
    ratio_of_means,
    ratio_of_quantiles,
)


def test_mean_and_deviation():
    assert mean_deviation([1.0, 2.0, 3.0]) == (2.0, 1.0)
    assert mean_deviation([4.0]) == (4.0, 0.0)


def test_verdicts_need_the_whole_interval():
    assert Ratio(1.2, 1.1, 1.3).verdict == "faster"
    assert Ratio(0.8, 0.7, 0.9).verdict == "slower"
    assert Ratio(1.2, 0.9, 1.5).verdict == "same"
    assert Ratio(0.99, 0.985, 0.995).verdict == "same"  # certain, but nobody's loss
    assert str(Ratio(1.234, 1.1, 1.3)) == "1.23 (1.10-1.30)"


def test_clear_changes_are_seen_and_noise_is_not():
    rng = np.random.default_rng(1)
    old = list(100 + rng.standard_normal(7))
    assert ratio_of_means([x * 1.2 for x in old], old).verdict == "faster"
    assert ratio_of_means([x * 0.8 for x in old], old).verdict == "slower"
    assert ratio_of_means(list(100 + rng.standard_normal(7)), old).verdict == "same"


def test_the_interval_is_the_same_at_every_call():
    new, old = [10.0, 11.0, 9.0, 10.5], [10.0, 10.1, 9.9, 10.2]
    assert ratio_of_means(new, old) == ratio_of_means(new, old)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng, hits = np.random.default_rng(2), 0
    for _ in range(100):
        new, old = rng.normal(120, 10, 20), rng.normal(100, 10, 20)
        interval = ratio_of_means(list(new), list(old))
        hits += interval.low <= 1.2 <= interval.high
    assert hits >= 85


def test_pairs_share_what_the_machine_was_doing():
    machine = [1.0, 0.4, 0.9, 0.5, 1.0]  # both engines suffered alike
    ratio = median_of_ratios([240 * m for m in machine], [120 * m for m in machine])
    assert ratio.value == pytest.approx(2) and ratio.low == pytest.approx(2)


def test_a_median_ignores_one_bad_round():
    ratio = median_of_ratios([2.0, 2.0, 2.0, 0.1, 2.0, 2.0, 2.0], [1.0] * 7)
    assert ratio.value == 2 and ratio.verdict == "faster"


def test_a_quantile_is_that_of_all_values_and_groups_stay_together() -> None:
    rng = np.random.default_rng(0)
    old = [rng.lognormal(0, 0.3, rng.integers(1, 9)) for _ in range(80)]
    new = [1.5 * group for group in old]
    found = ratio_of_quantiles(new, old, 99)
    assert found.value == pytest.approx(1.5) and found.low < 1.5 < found.high
    # by hand: draw groups, put their values together, take the percentile
    draw, ends = np.random.default_rng(5), []
    for _ in range(QUANTILE_RESAMPLES):
        chosen = draw.integers(0, len(old), len(old))
        ends.append(np.percentile(np.concatenate([old[k] for k in chosen]), 90))
    assert _Grouped(old, 90).resampled(5) == pytest.approx(ends)


def test_p99_comparisons_find_what_is_there_and_little_else() -> None:
    """A/A: false alarms in at most 5 of 100; P99 20 % higher: found in at least 80 of 100."""
    alarms, found = 0, 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        one, other = (rng.lognormal(0, 0.2, (500, 1)) for _ in range(2))
        alarms += ratio_of_quantiles(other, one, 99).verdict != "same"
        found += ratio_of_quantiles(1.2 * other, one, 99).verdict != "same"
    assert alarms <= 5 and found >= 80
