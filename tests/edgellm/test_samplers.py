"""The steps beyond top-k, top-p, min-p and temperature against slow obvious versions."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edgellm.errors import EdgeLLMError
from edgellm.samplers.dry import repetitions
from edgellm.samplers.names import LETTERS, ORDER, parse_letters, parse_order
from edgellm.samplers.noise import XTC, keyed_gumbel, keyed_uniform
from edgellm.samplers.temperature import dynamic
from edgellm.sampling import (
    STEPS,
    Candidates,
    Context,
    NothingLeft,
    Sampler,
    SamplingParams,
    resolve_bias,
    sample,
)

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
logits_of = hnp.arrays(
    np.float32,
    st.integers(1, 40),
    elements=st.integers(-60, 60).map(lambda quarter: quarter / 4),
)
tokens_of = st.lists(st.integers(0, 9), max_size=60)


def apply(name, logits, tokens=(), piece=None, position=0, **values) -> dict[int, float]:
    """id -> logit after one step on the whole vocabulary; the same from ordered candidates."""
    params = SamplingParams(**{**OFF, **values})
    history = np.array(tokens, np.int64)
    context = Context(7, position, 0, history, piece or (lambda token: b"x"))
    results = []
    for start in (
        Candidates(logits),
        Candidates(logits).head(len(logits)),
        Candidates(logits, np.arange(len(logits))),
    ):
        found = STEPS[name](start, params, context)
        ids = np.arange(len(found.logits)) if found.ids is None else found.ids
        order = np.lexsort((ids, -found.logits)) if found.ordered else np.argsort(ids)
        assert order.tolist() == list(range(len(ids)))  # the promise of `Candidates`
        results.append(dict(zip(ids.tolist(), found.logits.tolist(), strict=True)))
    for other in results[1:]:  # sums in another order may round differently
        # and a temperature near 0 magnifies it
        assert other == pytest.approx(results[0], rel=1e-9)
    return results[0]


def softmax(logits) -> np.ndarray:
    weights = np.exp(np.asarray(logits, np.float64) - np.max(logits))
    return weights / weights.sum()


# ---- penalties ------------------------------------------------------------------------------


@given(
    logits_of,
    tokens_of,
    st.integers(-1, 20),
    st.sampled_from([1.0, 1.3, 0.8]),
    st.sampled_from([0.0, 0.5, -0.25]),
    st.sampled_from([0.0, 0.25]),
)
def test_penalties(logits, tokens, last_n, repeat, presence, frequency):
    found = apply(
        "penalties", logits, tokens, repeat_last_n=last_n, repeat_penalty=repeat,
        presence_penalty=presence, frequency_penalty=frequency,
    )  # fmt: skip
    window = tokens if last_n == -1 else tokens[len(tokens) - last_n :] if last_n else []
    window = tokens if last_n > len(tokens) else window
    for i, logit in enumerate(logits.tolist()):
        count = window.count(i)
        if count:
            logit = logit * repeat if logit <= 0 else logit / repeat
            logit -= count * frequency + presence
        assert found[i] == pytest.approx(logit, abs=1e-5)


# ---- DRY ------------------------------------------------------------------------------------


def slow_dry(tokens, pieces, breakers, params) -> dict[int, float]:
    """token -> penalty, by comparing ends of lists."""
    n = params.dry_penalty_last_n
    window = list(tokens) if n == -1 else list(tokens)[max(0, len(tokens) - n) :]
    limit = len(window)
    for after in range(len(window)):  # how many tokens come after the one where a breaker ends
        last = len(window) - after
        text = b"".join(pieces[t] for t in window[:last])
        if any(
            text.endswith(b + tail)
            for b in breakers
            for cut in range(len(pieces[window[last - 1]]))
            for tail in [text[len(text) - cut :] if cut else b""]
        ):
            limit = after
            break
    most: dict[int, int] = {}
    for end in range(1, len(window)):  # window[:end] ends like the whole window
        length = 0
        while length < min(end, limit) and window[end - 1 - length] == window[-1 - length]:
            length += 1
        if length >= params.dry_allowed_length:
            most[window[end]] = max(most.get(window[end], 0), length)
    return {
        token: params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
        for token, length in most.items()
        if not any(b in pieces[token] for b in breakers)
    }


PIECES = [b"a", b"b", b"ab", b"c", b"\n", b":\n", b"x:", b"bc", b"a\nb", b"*"]


@given(
    st.lists(st.integers(0, 9), max_size=40),
    st.integers(-1, 30),
    st.integers(0, 4),
    st.sampled_from([(), ("\n",), ("\n", ":"), ("ab",), ("bc", "c:", "abc")]),
)
@settings(max_examples=300)
def test_dry(tokens, last_n, allowed, breakers):
    values = {
        "dry_multiplier": 0.8, "dry_penalty_last_n": last_n, "dry_allowed_length": allowed,
        "dry_sequence_breakers": breakers,
    }  # fmt: skip
    logits = np.arange(10, dtype=np.float32)
    found = apply("dry", logits, tokens, lambda token: PIECES[token], **values)
    params = SamplingParams(**values)
    encoded = [text.encode() for text in breakers]
    expected = slow_dry(tokens, PIECES, encoded, params) if params.dries else {}
    for i in range(10):
        assert found[i] == pytest.approx(i - expected.get(i, 0.0), abs=1e-4)


def test_dry_finds_a_far_breaker_and_bounds_the_penalty():
    tokens = np.array([1, 0] + [2] * 3000, np.int64)
    params = SamplingParams(dry_multiplier=1.0, dry_penalty_last_n=-1, dry_sequence_breakers=["!"])
    context = Context(0, 0, 0, tokens, lambda token: b"!" if token == 0 else b"x")
    found = STEPS["dry"](Candidates(np.zeros(5, np.float32)), params, context)
    penalty = -float(found.logits[2])
    assert math.isfinite(penalty) and 1.75**150 < penalty < 3.5e38
    assert found.logits[[0, 1, 3, 4]].tolist() == [0, 0, 0, 0]


def test_repetitions_of_a_repeated_text():
    ids, lengths = repetitions(np.array([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3]), 2, 10)
    assert (ids.tolist(), lengths.tolist()) == ([8, 9], [3, 3])


# ---- filters --------------------------------------------------------------------------------


@given(logits_of, st.sampled_from([0.25, 0.5, 1.0, 2.0]))
def test_top_n_sigma(logits, n):
    found = apply("top_n_sigma", logits, top_n_sigma=n)
    exact = logits.astype(np.float64)
    floor = exact.max() - n * exact.std()
    for i, value in enumerate(exact):
        if abs(value - floor) > 1e-4:  # a rounding error at the edge is allowed
            assert (i in found) == (value >= floor)


@given(logits_of, st.floats(0.01, 0.99))
def test_typical_keeps_those_near_the_expected_surprise(logits, p):
    found = set(apply("typ_p", logits, typical_p=p))
    probs = softmax(logits)
    entropy = -sum(q * math.log(q) for q in probs if q > 0)
    far = [abs(-math.log(q) - entropy) for q in probs]
    inside, outside = [far[i] for i in found], [far[i] for i in range(len(far)) if i not in found]
    assert not outside or max(inside) <= min(outside) + 1e-9
    assert sum(probs[list(found)]) > p - 1e-9
    worst = max(found, key=lambda i: far[i])
    assert len(found) == 1 or sum(probs[list(found)]) - probs[worst] <= p + 1e-9


@given(logits_of, st.floats(0.01, 0.5), st.integers(0, 500))
def test_xtc_removes_the_top_but_for_the_least_of_it(logits, threshold, position):
    chance = 0.5
    found = set(
        apply("xtc", logits, position=position, xtc_probability=chance, xtc_threshold=threshold)
    )
    probs = softmax(logits)
    ranked = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    top = [i for i in ranked if probs[i] >= threshold]
    if keyed_uniform(7, 0, position, XTC) > chance or len(top) < 2:
        assert found == set(ranked)
    else:
        assert found == set(ranked) - set(top[:-1])


def test_xtc_strikes_as_often_as_asked_and_at_the_same_positions():
    logits = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    struck = [len(apply("xtc", logits, position=i, xtc_probability=0.3)) == 1 for i in range(2000)]
    assert np.mean(struck) == pytest.approx(0.3, abs=0.04)
    again = [len(apply("xtc", logits, position=i, xtc_probability=0.3)) == 1 for i in range(50)]
    assert again == struck[:50]


def test_uniform_noise_is_uniform_and_other_purposes_are_other_streams():
    values = np.array([keyed_uniform(3, 0, i, XTC) for i in range(20_000)])
    assert ((values > 0) & (values < 1)).all()
    assert np.histogram(values, 10, (0, 1))[0].min() > 1800
    assert keyed_uniform(3, 0, 5, 1) != keyed_uniform(3, 0, 5, 2)
    assert keyed_uniform(3, 0, 5, XTC) == pytest.approx(UNIFORM_3_0_5)
    gumbel = keyed_gumbel(3, 0, 5, np.arange(1000))
    assert not np.isclose(np.exp(-np.exp(-gumbel)), keyed_uniform(3, 0, 5, XTC), atol=1e-12).any()


UNIFORM_3_0_5 = 0.559878511661941  # stored seeds must give the same text in every later version


# ---- temperature and mirostat ---------------------------------------------------------------


@given(logits_of, st.floats(0.1, 2), st.floats(0.05, 2), st.floats(0.2, 3))
def test_dynamic_temperature(logits, base, spread, exponent):
    params = SamplingParams(temperature=base, dynatemp_range=spread, dynatemp_exponent=exponent)
    value = dynamic(Candidates(logits), params)
    if len(logits) == 1:
        return
    probs = softmax(logits)
    entropy = -sum(q * math.log(q) for q in probs if q > 0) / math.log(len(logits))
    low, high = max(0, base - spread), base + spread
    assert value == pytest.approx(
        low + (high - low) * max(0, min(1, entropy)) ** exponent, abs=1e-6
    )
    if value > 0:
        found = apply(
            "temperature", logits, temperature=base, dynatemp_range=spread,
            dynatemp_exponent=exponent,
        )  # fmt: skip
        expected = logits / value
        assert [found[i] for i in range(len(logits))] == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_mirostat_follows_the_slow_version():
    rng = np.random.default_rng(0)
    params = SamplingParams(mirostat=2, mirostat_tau=3.0, mirostat_eta=0.2, temperature=0.9)
    sampler, tokens, mu = Sampler(params, 5), [1], 2 * 3.0
    for _ in range(60):
        logits = (rng.standard_normal(300) * 3).astype(np.float32)
        token = sampler.draw(logits, tokens)
        scaled = logits.astype(np.float64) / 0.9
        probs = softmax(scaled)
        kept = [i for i in range(300) if -math.log2(probs[i]) <= mu] or [int(probs.argmax())]
        noise = keyed_gumbel(5, 0, len(tokens), np.arange(300))
        assert token == max(kept, key=lambda i: scaled[i] + noise[i])
        share = probs[token] / sum(probs[kept])
        mu -= 0.2 * (-math.log2(share) - 3.0)
        tokens.append(token)


def test_mirostat_brings_the_surprise_to_its_target():
    rng = np.random.default_rng(1)
    params = SamplingParams(mirostat=2, mirostat_tau=3.0, temperature=1)
    sampler, tokens, surprises = Sampler(params, 1), [0], []
    for _ in range(600):
        logits = (rng.standard_normal(2000) * 2).astype(np.float32)
        before = sampler._mu
        tokens.append(sampler.draw(logits, tokens))
        surprises.append((before - sampler._mu) / params.mirostat_eta + params.mirostat_tau)
    assert np.mean(surprises[300:]) == pytest.approx(3.0, abs=0.2)


# ---- the chain ------------------------------------------------------------------------------


def test_every_step_has_a_name_in_the_order():
    assert set(STEPS) == set(ORDER) == set(LETTERS.values())
    assert parse_letters("edskypmxt") == ORDER == SamplingParams().samplers


@pytest.mark.parametrize(
    "text, steps",
    [
        ("top_k;temperature", ("top_k", "temperature")),
        ("top-k; Typical-P ;nucleus;temp", ("top_k", "typ_p", "top_p", "temperature")),
        (["min-p", "top_k"], ("min_p", "top_k")),
        (";".join(ORDER), ORDER),
    ],
)
def test_orders_as_llama_cpp_spells_them(text, steps):
    assert parse_order(text) == steps
    assert SamplingParams(samplers=text).samplers == steps


def test_the_order_is_obeyed():
    # top_k before temperature or after it: the same; top_p looks at what temperature left
    logits = np.log(np.array([0.6, 0.2, 0.1, 0.1], np.float32))
    hot = SamplingParams(**{**OFF, "top_p": 0.65, "temperature": 4.0})
    usual = {sample(logits, hot, 1, i) for i in range(300)}
    other = replace(hot, samplers="temperature;top_p")
    assert usual == {0, 1} and len({sample(logits, other, 1, i) for i in range(300)}) >= 3
    none = replace(hot, samplers=())
    assert {sample(logits, none, 1, i) for i in range(300)} == {0, 1, 2, 3}


def test_steps_that_are_not_named_do_not_run():
    logits = np.array([0.0, 0.5], np.float32)
    params = SamplingParams(temperature=0, samplers="top_k")
    assert {sample(logits, params, 1, i) for i in range(100)} == {0, 1}


@given(logits_of, tokens_of, st.integers(0, 1000))
def test_greedy_with_penalties_takes_the_best_of_what_is_left(logits, tokens, seed):
    params = SamplingParams(temperature=0, repeat_penalty=1.5, presence_penalty=0.25)
    changed = apply("penalties", logits, tokens, repeat_penalty=1.5, presence_penalty=0.25)
    best = max(changed, key=lambda i: (changed[i], -i))
    assert sample(logits, params, seed, len(tokens), tokens=tokens) == best


@given(logits_of, tokens_of, st.integers(0, 2**32))
def test_a_draw_is_a_function_of_tokens_and_position(logits, tokens, seed):
    params = SamplingParams(
        dry_multiplier=0.8, repeat_penalty=1.1, xtc_probability=0.5, typical_p=0.95,
        top_n_sigma=3, dynatemp_range=0.3,
    )  # fmt: skip
    grown = Sampler(params, seed)
    for n in range(max(0, len(tokens) - 5), len(tokens) + 1):
        before = logits.copy()
        token = grown.draw(logits, tokens[:n])
        assert token == sample(logits, params, seed, n, tokens=tokens[:n])
        assert np.array_equal(before, logits)


def test_a_history_that_shrinks_or_changes_is_read_again():
    params = SamplingParams(temperature=0, presence_penalty=10)
    sampler, logits = Sampler(params, 0), np.array([3.0, 2.0, 1.0], np.float32)
    assert sampler.draw(logits, [0]) == 1
    assert sampler.draw(logits, [0, 1]) == 2
    assert sampler.draw(logits, [1]) == 0
    assert sampler.draw(logits, [0]) == 1


class Letters:
    def encode(self, text):
        return [ord(letter) - ord("a") for letter in text]


def test_logit_bias_of_ids_and_texts():
    params = SamplingParams(logit_bias={"1": 5, "ac": 2.0, 3: False}, temperature=0)
    ids, values = resolve_bias(params, Letters(), 5)
    assert dict(zip(ids.tolist(), values.tolist(), strict=True)) == {
        1: 5, 0: 2, 2: 2, 3: -math.inf,
    }  # fmt: skip
    logits = np.array([0, 0, 0, 9, 0], np.float32)
    assert Sampler(params, 0, bias=(ids, values)).draw(logits, []) == 1
    assert logits[3] == 9
    everything = SamplingParams(logit_bias={i: -math.inf for i in range(5)})
    with pytest.raises(NothingLeft, match="ban every token"):
        Sampler(everything, 0, bias=resolve_bias(everything, Letters(), 5)).draw(logits, [])
    with pytest.raises(EdgeLLMError, match="token 5, which is not"):
        resolve_bias(SamplingParams(logit_bias=[(5, 1.0)]), Letters(), 5)


@pytest.mark.parametrize(
    "field, value",
    [
        ("typical_p", 1.5),
        ("repeat_last_n", -2),
        ("repeat_penalty", 0),
        ("presence_penalty", math.inf),
        ("dry_base", 0.5),
        ("dry_multiplier", -1),
        ("dry_sequence_breakers", ("",)),
        ("xtc_probability", 2),
        ("mirostat", 1),
        ("mirostat", True),
        ("logit_bias", {"a": math.nan}),
        ("logit_bias", {"a": math.inf}),
        ("logit_bias", [(1,)]),
        ("logit_bias", 3),
        ("logit_bias", {"": 1}),
        ("grammar", 3),
        ("json_schema", [1]),
    ],
)
def test_bad_values_name_their_field(field, value):
    with pytest.raises(EdgeLLMError, match=f"^{field} must "):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("value", ["topk", ["top_k", 3], "infill"])
def test_unknown_samplers_are_named(value):
    with pytest.raises(EdgeLLMError, match="samplers"):
        SamplingParams(samplers=value)
    with pytest.raises(EdgeLLMError, match="letter 'z'"):
        parse_letters("kz")
