"""The filters against slow obvious versions; the draw against its promises."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edgellm.errors import EdgeLLMError
from edgellm.sampling import (
    STEPS,
    Candidates,
    Context,
    ModelProducedNaN,
    Sampler,
    SamplingParams,
    keyed_gumbel,
    largest,
    log_softmax_top,
    sample,
)

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}

# Quarters give many equal values; the long sizes reach the block search of `largest`.
logits_of = hnp.arrays(
    np.float32,
    st.one_of(st.integers(1, 40), st.sampled_from([64, 1000, 8191])),
    elements=st.integers(-60, 60).map(lambda quarter: quarter / 4),
)


def kept(name: str, logits: np.ndarray, **values: float) -> list[int]:
    """The ids that one step keeps of a whole vocabulary, rising."""
    result = STEPS[name](Candidates(logits), SamplingParams(**{**OFF, **values}), Context(0, 0))
    ids = range(len(logits)) if result.ids is None else result.ids.tolist()
    assert np.array_equal(result.logits, logits[list(ids)])
    return sorted(ids)


def by_rank(logits: np.ndarray) -> list[int]:
    return sorted(range(len(logits)), key=lambda i: (-logits[i], i))


@given(logits_of, st.integers(1, 100))
def test_top_k_keeps_the_k_largest_lowest_ids_first(logits, k):
    assert kept("top_k", logits, top_k=k) == sorted(by_rank(logits)[:k])


@given(logits_of, st.floats(0, 1))
@settings(deadline=None)
def test_top_p_keeps_the_smallest_nucleus(logits, p):
    weights = [math.exp(float(logits[i] - logits.max())) for i in by_rank(logits)]
    nucleus = kept("top_p", logits, top_p=p)
    assert nucleus == sorted(by_rank(logits)[: len(nucleus)])
    if p == 1:
        assert len(nucleus) == len(logits)
        return
    # float32 exponentials: allow the sums a rounding error at the edge
    slack = 1e-6 * sum(weights)
    assert sum(weights[: len(nucleus)]) >= p * sum(weights) - slack
    assert len(nucleus) == 1 or sum(weights[: len(nucleus) - 1]) <= p * sum(weights) + slack


@given(logits_of, st.floats(1e-6, 1))
def test_min_p_keeps_those_likely_enough(logits, p):
    floor = logits.max() + np.float32(math.log(p))
    expected = [i for i, value in enumerate(logits) if value >= floor]
    assert kept("min_p", logits, min_p=p) == expected


@given(logits_of, st.integers(1, 300))
def test_largest_is_the_head_of_a_full_sort(logits, k):
    k = min(k, len(logits))
    assert largest(logits, k).tolist() == by_rank(logits)[:k]


@given(logits_of, st.integers(0, 2**32), st.integers(0, 10_000))
def test_temperature_0_and_top_k_1_are_greedy(logits, seed, position):
    best = by_rank(logits)[0]
    assert sample(logits, SamplingParams(temperature=0), seed, position) == best
    assert sample(logits, SamplingParams(top_k=1), seed, position) == best


@given(logits_of, st.integers(0, 2**32), st.integers(0, 10_000), st.integers(0, 3))
def test_filters_never_change_a_winner_they_keep(logits, seed, position, choice):
    free = sample(logits, SamplingParams(**OFF), seed, position, choice)
    assert free == sample(logits.copy(), SamplingParams(**OFF), seed, position, choice)
    for name, value in {"top_k": 20, "top_p": 0.9, "min_p": 0.05}.items():
        if free in kept(name, logits, **{name: value}):
            narrowed = SamplingParams(**{**OFF, name: value})
            assert sample(logits, narrowed, seed, position, choice) == free


def test_draws_follow_the_distribution():
    logits = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05], np.float32))
    params = SamplingParams(**OFF)
    for draw in (  # along positions, along seeds, along choices
        lambda i: sample(logits, params, 7, i),
        lambda i: sample(logits, params, i, 3),
        lambda i: sample(logits, params, 7, 3, i),
    ):
        n = 6000
        counts = np.bincount([draw(i) for i in range(n)], minlength=5)
        expected = n * np.exp(logits)
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        assert chi_square < 18.5  # 4 degrees of freedom: exceeded once in 1000 by a fair draw


def test_temperature_acts_on_the_draw():
    logits = np.array([0.0, 1.0], np.float32)
    for value in (0.5, 2.0):
        params = SamplingParams(**{**OFF, "temperature": value})
        share = np.mean([sample(logits, params, 1, i) for i in range(4000)])
        assert share == pytest.approx(1 / (1 + math.exp(-1 / value)), abs=0.03)


NOISE_42_0_7 = [0.49456530778675206, 3.1015516477996123, -0.7828822059047336]


def test_noise_is_fixed_for_ever():
    # Stored seeds must give the same text in every later version.
    noise = keyed_gumbel(42, 0, 7, np.array([0, 1, 151_935]))
    assert noise.tolist() == keyed_gumbel(42, 0, 7, np.arange(151_936))[[0, 1, -1]].tolist()
    assert noise == pytest.approx(NOISE_42_0_7, abs=1e-12)


def test_noise_is_standard_gumbel_and_keys_do_not_repeat():
    noise = keyed_gumbel(1, 0, 0, np.arange(200_000))
    assert np.isfinite(noise).all()
    assert noise.mean() == pytest.approx(0.57722, abs=0.01)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.03)
    keys = [(s, c, p) for s in range(6) for c in range(6) for p in range(6)]
    rows = {keyed_gumbel(*key, np.arange(3)).tobytes() for key in keys}
    assert len(rows) == len(keys)
    big = keyed_gumbel(2**64 - 1, 0, 0, np.arange(3))
    assert np.isfinite(big).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_logits_are_a_typed_error(bad):
    logits = np.zeros(200, np.float32)
    logits[77] = bad
    for params in (SamplingParams(), SamplingParams(temperature=0)):
        with pytest.raises(ModelProducedNaN, match="position 5"):
            sample(logits, params, 1, 5)
    with pytest.raises(ModelProducedNaN):
        log_softmax_top(logits, 0, 1)
    with pytest.raises(ModelProducedNaN):
        sample(np.full(10, -np.inf, np.float32), SamplingParams(), 1, 0)


NEEDED = [  # parameters, and how many of the largest logits they look at
    ({}, 40),
    ({"top_k": 64, "typical_p": 0.6, "xtc_probability": 0.9, "dynatemp_range": 0.5}, 64),
    ({"top_k": 5, "samplers": "top_k;min_p"}, 5),
    ({"temperature": 0}, 1),
    ({"temperature": 0, "top_k": 0}, 1),
    ({"top_k": 1}, 1),
    ({"top_k": 0}, 0),
    ({"samplers": "top_p;top_k"}, 0),
    ({"samplers": "temperature"}, 0),
    ({"mirostat": 2}, 0),
    ({"repeat_penalty": 1.1}, 0),
    ({"dry_multiplier": 0.8}, 0),
    ({"top_n_sigma": 1.0}, 0),
    ({"top_n_sigma": 1.0, "temperature": 0}, 1),
    ({"temperature": 0, "presence_penalty": 0.5}, 0),
]


@pytest.mark.parametrize(("values", "n"), NEEDED)
def test_how_many_logits_a_draw_depends_on(values, n):
    assert SamplingParams(**values).n_best == Sampler(SamplingParams(**values), 1).n_best == n


def test_biases_users_and_grammars_look_at_all_logits():
    bias = np.array([3]), np.array([1.0], np.float32)
    assert Sampler(SamplingParams(), 1, bias=bias).n_best == 0
    assert Sampler(SamplingParams(), 1, users=[lambda *given: None]).n_best == 0
    assert Sampler(SamplingParams(temperature=0), 1, matcher=object()).n_best == 0


@given(logits_of, st.integers(0, 2**32), st.integers(0, 100), st.integers(0, 40))
@settings(deadline=None)
def test_the_best_alone_give_the_same_token(logits, seed, more, position):
    # also some more than are needed, as a step of several requests brings them
    for values, n in NEEDED:
        if n < len(logits) and n:
            ids = np.array(by_rank(logits)[: n + more])
            best, params = Candidates(logits[ids], ids, ordered=True), SamplingParams(**values)
            wanted = sample(logits, params, seed, position)
            assert Sampler(params, seed).draw(best, [], position) == wanted


def test_masked_tokens_never_win():
    logits = np.full(500, -np.inf, np.float32)
    logits[[3, 400]] = 1.0
    drawn = {sample(logits, SamplingParams(**OFF), 0, i) for i in range(50)}
    assert drawn == {3, 400}


@given(logits_of, st.integers(0, 8))
def test_log_softmax_top(logits, n):
    exact = logits.astype(np.float64)
    exact = exact - exact.max()
    exact = exact - math.log(np.exp(exact).sum())
    token = len(logits) // 2
    logprob, top = log_softmax_top(logits, token, n)
    assert logprob == pytest.approx(exact[token], abs=1e-5)
    assert [i for i, _ in top] == by_rank(logits)[:n]
    assert [value for _, value in top] == pytest.approx([exact[i] for i, _ in top], abs=1e-5)


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("min_p", 2),
        ("max_tokens", 0),
        ("seed", -2),
        ("logprobs", -1),
        ("stop", ("",)),
    ],
)
def test_bad_values_name_their_field(field, value):
    with pytest.raises(EdgeLLMError, match=f"^{field} must "):
        SamplingParams(**{field: value})


def test_stop_becomes_a_tuple_and_seeds_resolve():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(seed=0).resolved_seed() == 0
    seeds = {SamplingParams(seed=seed).resolved_seed() for seed in (None, -1, None, -1)}
    assert len(seeds) == 4
