"""Speculation changes when tokens come, never which."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import architectures
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariance import tokens_of

from edgellm import LLM, SamplingParams
from edgellm.errors import EdgeLLMError
from edgellm.kernels.cuda.emulated import EmulatedDevice
from edgellm.offload import ALL
from edgellm.request_options import RequestOptions
from edgellm.sequence import Sequence
from edgellm.speculative.acceptance import Acceptance
from edgellm.speculative.controller import allocate
from edgellm.speculative.lookup import _MOST_COMMON, _MOST_PLACES, Index
from edgellm.speculative.options import SpeculationOptions
from edgellm.step_time import StepTime

LOOKUP = SpeculationOptions("lookup")
GREEDY = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.8, seed=3)
KINDS = ("llama", "gemma3", "olmo2", "gpt-oss", "llama-moe", "deepseek2", "lfm2", "qwen35",
         "qwen35moe")  # fmt: skip
# a sequence that repeats itself, with slips
PATTERN = [5, 6, 7, 8, 9, 10, 11, 12]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("speculation")
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = architectures.write(folder / f"{name}.gguf", name)
        return made[name]

    return make


class Oracle:
    """Guesses that are right so often as ``pattern`` says, from what would come anyway."""

    name, first_rates, first_mean = "oracle", (0.5,), 0.5
    is_alive, lost_device = True, ""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], pattern: list[bool]) -> None:
        self._answers, self._pattern = answers, itertools.cycle(pattern)

    def propose(self, wanted: dict[Sequence, Any]) -> dict[Sequence, Any]:
        from edgellm.speculative.proposer import Proposal

        found = {}
        for sequence, use in wanted.items():
            answer = self._answers.get(tuple(sequence.tokens[: sequence.n_prompt]), [])
            n = len(sequence.output)
            right = answer[n : n + min(use.n, 6)]
            tokens = tuple(t if next(self._pattern) else (t + 1) % 90 for t in right)
            if tokens:
                found[sequence] = Proposal(tokens, (0,) * len(tokens), self.name)
        return found

    def outlook(self, sequence: Sequence, use: Any) -> float:
        return 0.0

    def forget(self, sequence: Sequence) -> None: ...
    def close(self) -> None: ...


def prompts() -> list[list[int]]:
    return [PATTERN * 4, tokens_of(1, 70, 90), [*PATTERN, 3, *PATTERN, 4, *PATTERN], [1]]


def guessing(llm: LLM, answers: dict[tuple[int, ...], list[int]], pattern: list[bool]) -> None:
    """Let an oracle guess."""
    found = llm.speculation
    assert found is not None
    found.proposers = [Oracle(answers, pattern)]
    found._all["oracle"] = Acceptance((0.5,), 0.5)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_are_the_same_on_every_kind_of_model(
    model: Callable[[str], Path], eager: None, name: str, params: SamplingParams
) -> None:
    path = model(name)
    with LLM(path, n_threads=1) as plain:
        expected = [plain.generate(p, params).tokens for p in prompts()]
    answers = {tuple(p): e for p, e in zip(prompts(), expected, strict=True)}
    with LLM(path, n_threads=2, max_num_seqs=4, speculation=LOOKUP) as llm:
        guessing(llm, answers, [True] * 5 + [False] + [True, False, False])
        alone = [llm.generate(p, params) for p in prompts()]
        assert [c.tokens for c in alone] == expected
        assert [c.tokens for c in llm.generate(prompts(), params)] == expected
        counts = llm.metrics.speculation
        assert counts.drafted_tokens > counts.accepted_tokens > 100
        assert alone[0].timings["draft_n"] > alone[0].timings["draft_n_accepted"] > 0
        # what others go on from is what was computed without guesses
        more = [*prompts()[1], *expected[1][:30], 7]
        with LLM(path, n_threads=1) as plain:
            assert llm.generate(more, params).tokens == plain.generate(more, params).tokens
        assert llm.is_idle and llm.runner.cache.faults() == []


@pytest.mark.parametrize("policy", ["ring", "error"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_window_keeps_what_a_wrong_guess_must_see(
    tiny_model: Callable[..., Path], eager: None, policy: str, params: SamplingParams
) -> None:
    options: dict[str, Any] = {"n_ctx": 100, "context_policy": policy, "block_size": 16}
    path, prompt = tiny_model("gemma3" if policy == "error" else "llama"), PATTERN * 3
    params = replace(params, max_tokens=150)
    with LLM(path, **options) as plain:
        expected = plain.generate(prompt, params)
    with LLM(path, **options, speculation=LOOKUP) as llm:
        guessing(llm, {tuple(prompt): expected.tokens}, [True, True, False])
        found = llm.generate(prompt, params)
        assert found.tokens == expected.tokens
        assert found.context_full == expected.context_full == (policy == "error")
        assert llm.metrics.speculation.accepted_tokens > 10


def test_a_gpu_checks_guesses_too(
    model: Callable[[str], Path], eager: None, emulator: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, prompt = replace(SAMPLED, max_tokens=24), PATTERN * 3
    answers: dict[tuple[int, ...], list[int]] = {}
    for options in (SpeculationOptions(), LOOKUP):
        device = EmulatedDevice(256 << 20, "lazy", seed=1)
        monkeypatch.setattr("edgellm.placement.open_gpus", lambda d=device: ({"cuda0": d}, ""))
        with LLM(model("gemma3"), n_ctx=256, n_gpu_layers=ALL, speculation=options) as llm:
            assert llm.placement.plan.uses_device
            if options.kind == "none":
                answers[tuple(prompt)] = llm.generate(prompt, params).tokens
                continue
            guessing(llm, answers, [True, True, True, False])
            assert llm.generate(prompt, params).tokens == answers[tuple(prompt)]
            assert llm.metrics.speculation.accepted_tokens > 5


@pytest.fixture
def pair(tiny_model: Callable[..., Path], eager: None) -> Iterator[tuple[LLM, LLM]]:
    """A model without and with lookup, which checks all it finds."""
    path = tiny_model("llama", n_ctx=1024)
    with LLM(path, n_ctx=600) as plain, LLM(path, n_ctx=600, speculation=LOOKUP) as llm:
        yield plain, llm


def test_stops_logprobs_and_limits_are_the_same(pair: tuple[LLM, LLM]) -> None:
    plain, llm = pair
    text = "abc abd abc abd abc"
    whole = plain.generate(text, replace(GREEDY, max_tokens=100))
    for change in (
        {"stop": [whole.text[20:23]]}, {"max_tokens": 1}, {"max_tokens": 2}, {"max_tokens": 33},
        {"logprobs": 3}, {"repeat_penalty": 1.2}, {"mirostat": 2, "temperature": 0.8, "seed": 4},
        {"ignore_eos": False, "temperature": 3.0, "top_k": 0, "min_p": 0, "seed": 9},
        {"reasoning_budget": 3}, {"max_tokens": None, "prompt_logprobs": 1},
    ):  # fmt: skip
        params = replace(GREEDY, **{"max_tokens": 100, **change})
        expected, found = plain.generate(text, params), llm.generate(text, params)
        assert found.tokens == expected.tokens and found.text == expected.text, change
        assert found.finish_reason == expected.finish_reason, change
        assert found.logprobs == expected.logprobs, change
        assert found.prompt_logprobs == expected.prompt_logprobs, change
        pieces = list(llm.stream(text, params))
        assert [p.token for p in pieces[:-1]] == expected.tokens
        assert "".join(p.text for p in pieces) == expected.text
    assert llm.metrics.speculation.accepted_tokens > 0
    assert llm.is_idle and llm.runner.cache.faults() == []


def test_a_grammar_filters_guesses(pair: tuple[LLM, LLM]) -> None:
    plain, llm = pair
    params = SamplingParams(max_tokens=200, temperature=1, seed=2, regex="(ab?c ){30}[a-z]{5}")
    expected, found = plain.generate("abc abc abc", params), llm.generate("abc abc abc", params)
    assert (found.text, found.finish_reason) == (expected.text, expected.finish_reason)
    counts = llm.metrics.speculation
    assert counts.accepted_tokens > 20
    sampler = llm.sequence("x", replace(params, regex="abc")).sampler
    assert sampler.n_allowed([97, 98, 120]) == 2 and sampler.n_allowed([98]) == 0


def test_several_choices_cancelled_and_preempted_requests(
    tiny_model: Callable[..., Path], eager: None
) -> None:
    path = tiny_model("llama", n_ctx=1024)
    texts = [PATTERN * n for n in (2, 3, 4, 5)]
    with LLM(path, n_ctx=300) as plain:
        expected = [plain.generate(t, SAMPLED, n=2) for t in texts]
    # room for about two of them
    with LLM(path, n_ctx=300, max_num_seqs=4, cache_tokens=256, speculation=LOOKUP) as llm:
        found = llm.generate(texts, SAMPLED, n=2)
        assert [[c.tokens for c in cs] for cs in found] == [
            [c.tokens for c in cs] for cs in expected
        ]
        assert llm.metrics.preemptions["memory"] > 0
        [sequence] = llm.submit(texts[0], GREEDY, RequestOptions())
        while len(sequence.output) < 5:
            llm.step()
        sequence.cancel()
        llm.step()
        assert sequence.finish_reason == "abort"
        assert llm.is_idle and llm.runner.cache.faults() == []


# ---- lookup -------------------------------------------------------------------------------------


def slow_match(tokens: list[int]) -> int:
    """Length of the longest end that was there before."""
    for n in range(min(_MOST_COMMON, len(tokens) - 1), 1, -1):
        if any(tokens[i - n : i] == tokens[-n:] for i in range(n, len(tokens))):
            return n
    return 0


@given(st.lists(st.integers(0, 3), max_size=80), st.lists(st.integers(1, 5), min_size=1))
def test_lookup_finds_a_longest_match_however_the_text_grew(
    tokens: list[int], cuts: list[int]
) -> None:
    index, n = Index(), 0
    for cut in cuts:
        n = min(len(tokens), n + cut)
        text = tokens[:n]
        index.add(text)
        place, common = index.find(text)
        assert (common >= 2) == (slow_match(text) >= 2)
        if common:
            assert place < n - 1 and text[place + 1 - common : place + 1] == text[-common:]
    fresh = Index()
    fresh.add(tokens)
    few = len(tokens) <= _MOST_PLACES  # then all places are compared
    if few:
        assert fresh.find(tokens)[1] == slow_match(tokens)


def test_lookup_goes_on_with_the_copy_it_is_in() -> None:
    """Not with one of the newer places where a few tokens are the same."""
    part = list(range(100, 140))
    tokens = part + [1, 102, 103, 104, 2, 102, 103, 104, 3] * 6 + part[:2]
    index = Index()
    for token in part[2:10]:
        index.add(tokens)
        index.find(tokens)
        tokens.append(token)
    index.add(tokens)
    place, n = index.find(tokens)
    assert tokens[place + 1] == part[10] and n >= 8


# ---- the controller -----------------------------------------------------------------------------

GAINS = st.lists(
    st.lists(st.floats(0.01, 1.0), max_size=4).map(
        lambda rates: list(itertools.accumulate(rates, lambda a, b: a * b))
    ),
    min_size=1, max_size=3,
)  # fmt: skip


@settings(max_examples=200)
@given(GAINS, st.lists(st.floats(0, 1), min_size=16, max_size=16), st.integers(0, 12))
def test_the_controller_takes_what_brings_the_most_tokens_per_second(
    gains: list[list[float]], more: list[float], room: int
) -> None:
    times = [1.0 + t for t in itertools.accumulate(more)]

    def speed(counts: tuple[int, ...]) -> float:
        tokens = len(gains) + sum(sum(g[:n]) for g, n in zip(gains, counts, strict=True))
        return tokens / times[sum(counts)]

    found = tuple(allocate(gains, times.__getitem__, room))
    every = itertools.product(*(range(len(g) + 1) for g in gains))
    best = max(speed(c) for c in every if sum(c) <= room)
    none = speed((0,) * len(gains))
    assert sum(found) <= room
    if best > 1.03 * none + 1e-9:
        assert speed(found) == pytest.approx(best)
    else:
        assert not any(found)


@given(st.floats(0.3, 0.99), st.floats(1.05, 1.6), st.integers(0, 200))
def test_guessing_ends_within_32_tokens_of_wrong_guesses(
    rate: float, cost: float, n_before: int
) -> None:
    """Even after a past of right ones, where a row makes a step at least 5 % longer."""
    own = Acceptance([rate], rate).of_sequence()
    for _ in range(n_before):
        own.observe(0, True)
    n_wrong = 0
    while n_wrong < 40:
        if allocate([own.gains([0] * 8)], lambda k: 1 + (cost - 1) * k, 8) == [0]:
            break
        own.observe(0, False)
        n_wrong += 1
    assert n_wrong < 32
    for _ in range(12):  # and begins again
        own.observe(0, True)
    assert allocate([own.gains([0] * 8)], lambda k: 1 + 0.1 * k, 8) != [0]


def test_a_step_that_arithmetic_fills_checks_nothing() -> None:
    gains = [[0.9, 0.8, 0.7]] * 8
    assert allocate(gains, lambda n: 8.0 + n, 50) == [0] * 8
    assert allocate(gains, lambda n: 8.0 + 0.1 * n, 50) == [3] * 8


def test_times_of_steps_are_learned_by_rows() -> None:
    time = StepTime(0.004)
    assert time.decode(1) == pytest.approx(0.008)
    time.observe(1, 0, 0.03)
    assert time.decode(5) == pytest.approx(0.03 + 4 * 0.004)
    time.observe(5, 0, 0.034)
    assert time.decode(3) == pytest.approx(0.032)
    time.observe(5, 0, 3.0)  # somebody took the core
    assert time.decode(5) < 0.045


def test_wrong_options_are_refused_in_a_sentence() -> None:
    for given_, words in (
        ({"kind": "fast"}, "--spec-type must be none, lookup, draft, auto, not 'fast'"),
        ({"kind": "draft"}, "needs a draft model"),
        ({"n_max": 0}, "--draft-max must be 1 to 60"),
        ({"n_min": 20}, r"--draft-min must be 0 to --draft-max \(15\)"),
        ({"p_min": 2.0}, "--draft-p-min must be a probability"),
    ):
        with pytest.raises(EdgeLLMError, match=words):
            SpeculationOptions(**given_)  # type: ignore[arg-type]
