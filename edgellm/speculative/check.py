"""Does this draft model suit this target, on these prompts? Rates, expected and measured gain."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from edgellm.errors import EdgeLLMError
from edgellm.llm import LLM
from edgellm.request_options import RequestOptions
from edgellm.runner import Run
from edgellm.sampling_params import SamplingParams
from edgellm.speculative.ahead import DraftAhead
from edgellm.speculative.drafter import Drafter, DraftProposer

_LENGTH = 8  # guesses whose rates are measured
_REPEATS = 5  # of each time
_WORTH = 1.03


@dataclass(frozen=True)
class DraftCheck:
    """``rates``: of guesses whose predecessors were right, the share that was, by position.
    ``second_rate``: where a first guess was wrong, how often the draft's second choice was right.
    ``expected_gain`` with ``n_guesses`` of fixed number; ``measured_gain`` with the controller.
    Speeds are tokens per second, times seconds; ``is_apart``: the draft model has its own cores."""

    n_prompts: int
    n_tokens: int
    rates: list[float]
    second_rate: float
    step_seconds: float
    check_seconds: list[float]  # of a step with 1, 2, … guesses
    draft_seconds: float
    n_guesses: int
    expected_gain: float
    measured_gain: float
    speed: float
    is_apart: bool

    @property
    def advice(self) -> str:
        if self.rates and self.rates[0] < 0.5 and self.expected_gain < _WORTH:
            return "Do not use it: it is too often wrong; take a model of the target's family."
        if self.measured_gain >= _WORTH:
            return f"Use it (-md): answers come {self.measured_gain:.2f} times as fast."
        if self.expected_gain >= _WORTH:
            return (
                "It may pay on long answers: with guesses in any number it would be "
                f"{self.expected_gain:.2f} times as fast, on these {self.measured_gain:.2f}."
            )
        return (
            "Do not use it: its steps take too long for what its guesses bring; take a smaller "
            "one, or lookup alone (--spec-type lookup)."
        )

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "advice": self.advice}


def draft_check(
    llm: LLM, prompts: list[list[int]], params: SamplingParams, say: Callable[[str], None]
) -> DraftCheck:
    """``llm`` speculates with a draft model alone."""
    proposer = None if llm.speculation is None else llm.speculation.proposers[0]
    if not isinstance(proposer, DraftProposer):
        raise EdgeLLMError("The model was loaded without a draft model (-md).")
    drafter, plain = proposer.drafter, RequestOptions(speculate=False)
    tally = _Tally()
    slow = fast = 0.0
    n_tokens = 0
    for i, prompt in enumerate(prompts, 1):
        say(f"prompt {i} of {len(prompts)}")
        done = llm.generate(prompt, params, plain)
        guessed = llm.generate(prompt, params)
        slow += done.timings["predicted_ms"]
        fast += guessed.timings["predicted_ms"]
        n_tokens += len(done.tokens)
        _follow(llm, drafter, prompt, done.tokens, params, tally)
    if not tally.asked[0]:
        raise EdgeLLMError("The answers are too short to say anything: ask for more tokens (-n).")
    say("times of steps")
    checks = _check_seconds(llm, prompts[0])
    rates = [right / asked for right, asked in zip(tally.right, tally.asked, strict=True) if asked]
    draft = drafter.time.decode(1)
    n_best, gain = 0, 1.0
    chance = tokens = 1.0
    for n, rate in enumerate(rates, 1):
        chance *= rate
        tokens += chance
        drafting = 0.0 if isinstance(proposer, DraftAhead) else n * draft
        if (ratio := tokens * checks[0] / (checks[n] + drafting)) > gain:
            n_best, gain = n, ratio
    return DraftCheck(
        len(prompts), n_tokens, rates, tally.second / max(1, tally.asked_second), checks[0],
        checks[1:], draft, n_best, gain, slow / fast if fast else 1.0, 1e3 * n_tokens / slow,
        isinstance(proposer, DraftAhead),
    )  # fmt: skip


class _Tally:
    def __init__(self) -> None:
        self.asked, self.right = [0] * _LENGTH, [0] * _LENGTH
        self.asked_second = self.second = 0


def _follow(
    llm: LLM, drafter: Drafter, prompt: list[int], answer: list[int], params: SamplingParams,
    tally: _Tally,
) -> None:  # fmt: skip
    """Let the draft model guess along an answer, as it would with the target beside it."""
    sequence = llm.sequence(prompt, params)
    if not answer:
        return
    sequence.tokens.append(answer[0])
    line = drafter.open(sequence)
    if line is None:
        raise EdgeLLMError("The prompt does not fit into the draft model's context.")
    try:
        at = 1
        while at < len(answer):
            drafter.follow(line, [*prompt, *answer[:at]])
            second = None
            while line.n_guesses < min(_LENGTH, len(answer) - at):
                is_first = line.n_guesses == 0
                if not drafter.step([line], [line] if is_first else ()) and line.n_behind < 2:
                    break
                second = line.second if line.n_guesses == 1 else second
            guesses = line.own.tokens[line.n_true :]
            n_right = 0
            for i, (guess, token) in enumerate(zip(guesses, answer[at:], strict=False)):
                tally.asked[i] += 1
                if guess != token:
                    if i == 0:
                        tally.asked_second += 1
                        tally.second += second == token
                    break
                tally.right[i] += 1
                n_right += 1
            at += n_right + 1
    finally:
        drafter.close(line)


def _check_seconds(llm: LLM, prompt: list[int]) -> list[float]:
    """Of a step of the target with 0, 1, … guesses."""
    params = SamplingParams(max_tokens=1, temperature=0)
    sequence, runner = llm.sequence(prompt, params), llm.runner
    if not runner.cache.admit(sequence, reuse=False):
        raise EdgeLLMError("There is no room in the cache for a measurement.")
    try:
        while sequence.n_waiting > 1:
            runner.forward([Run(sequence, min(128, sequence.n_waiting - 1), "none")])
        sequence.n_prompt = sequence.n_computed  # what comes is generated
        token, found = sequence.tokens[-1], []
        for n in range(_LENGTH + 1):
            seconds = []
            for _ in range(_REPEATS):
                run = Run(sequence, 1, "last", (token,) * n)
                begun = time.perf_counter()
                runner.forward([run])
                seconds.append(time.perf_counter() - begun)
                if n:
                    runner.settle(run, 0)
                else:
                    runner.cache.rewind(sequence, sequence.n_computed - 1)
            found.append(statistics.median(seconds))
        return found
    finally:
        runner.cache.release(sequence)
