"""A small model that writes ahead of a large one: its side of each sequence, and its steps.

A *line* is one continuation: the target's tokens, and guesses behind them. Guesses are drawn with
the target's parameters and noise, so that both models choose alike where they think alike.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Container, Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgellm.llm import LLM
from edgellm.memory import STEP_TOKENS
from edgellm.request_options import RequestOptions
from edgellm.runner import Run
from edgellm.sampling import ModelProducedNaN
from edgellm.sampling_params import SamplingParams
from edgellm.sequence import Sequence
from edgellm.speculative.options import MOST_GUESSES
from edgellm.step_time import StepTime

_MEASURED, _MEASURED_STEPS = 64, 4  # tokens of a prompt, and steps behind it
_BOUNDS = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)  # probabilities at which a guess becomes surer
_RATES = (0.2, 0.3, 0.45, 0.6, 0.7, 0.8, 0.9, 0.97)


@dataclass(eq=False)
class Line:
    """``own`` is the draft model's sequence: ``n_true`` tokens that the target has, then guesses.
    ``second``: what it would have guessed instead of the newest guess, where that was asked for."""

    own: Sequence
    n_true: int
    signals: list[int] = field(default_factory=list)  # of the guesses
    second: int | None = None

    @property
    def n_guesses(self) -> int:
        return len(self.own.tokens) - self.n_true

    @property
    def n_behind(self) -> int:
        """Tokens to compute before it can guess further."""
        return self.own.n_waiting


class Drafter:
    """Runs the draft model ``llm``, which serves nobody else. It stops a line where its guess has a
    probability below ``p_min``. ``n_vocab`` is the target's."""

    def __init__(self, llm: LLM, n_vocab: int, p_min: float = 0.0) -> None:
        self.llm, self._p_min = llm, p_min
        self._n_vocab, self._n_own = n_vocab, llm.n_vocab
        self._runner = llm.runner  # lines are closed also when the model is
        self._runner.cache.slack = MOST_GUESSES + 4  # it writes beyond what is checked
        self.time = StepTime(0.01)
        self.seconds = 0.0  # of all steps

    def measure(self) -> None:
        """Run some steps, so that how long they take is known before any guess is worth it."""
        n = min(_MEASURED, self.llm.max_positions - 1 - _MEASURED_STEPS)
        own = Sequence([1] * max(1, n), SamplingParams(), self.llm.tokenizer.stream())
        if not self._runner.cache.admit(own, reuse=False):
            return
        line = Line(own, len(own.tokens))
        for _ in range(1 + _MEASURED_STEPS):
            self.step([line])
        self.close(line)

    def open(self, target: Sequence) -> Line | None:
        """A line for a sequence; None where there is no room for one, or where it has tokens that
        the draft model does not know."""
        if len(target.tokens) >= self.llm.max_positions or not self._knows(target.tokens):
            return None
        own = self._sequence(target, list(target.tokens))
        if not self._runner.cache.admit(own):
            return None
        return Line(own, len(own.tokens))

    def fork(self, target: Sequence, line: Line) -> Line | None:
        """A line that has the second choice in place of the newest guess, if it has another."""
        second, line.second = line.second, None
        if second is None:
            return None
        own = self._sequence(target, [*line.own.tokens[:-1], second])
        if not self._runner.cache.fork(line.own, own):
            return None
        return Line(own, line.n_true, list(line.signals))

    def _sequence(self, target: Sequence, tokens: list[int]) -> Sequence:
        params, stream = target.sampler.params, self.llm.tokenizer.stream()
        options = RequestOptions(cache_salt=target.salt)  # users stay apart here too
        own = Sequence(tokens, params, stream, options, target.choice, target.seed)
        own.n_prompt = target.n_prompt
        own.sampler = target.sampler.for_drafts()
        return own

    def close(self, line: Line) -> None:
        self._runner.cache.release(line.own)

    def follow(self, line: Line, tokens: list[int]) -> bool:
        """The target has these tokens now: guesses that are among them are true, and those that are
        not are forgotten with all behind them. False when any was wrong."""
        own, n_true = line.own, line.n_true
        n_known = min(len(own.tokens), len(tokens))
        while n_true < n_known and own.tokens[n_true] == tokens[n_true]:
            n_true += 1
        is_right = n_true == n_known
        del line.signals[: n_true - line.n_true]
        if n_true < len(tokens):
            own.tokens[n_true:] = tokens[n_true:]
            line.signals, line.second = [], None
            n_kept = min(own.n_computed, n_true, len(tokens) - 1)
            self._runner.cache.rewind(own, n_kept)
        line.n_true = len(tokens)
        return is_right

    def step(self, lines: Iterable[Line], seconds_of: Container[Line] = ()) -> list[Line]:
        """One step of the draft model: a guess more for each line that it brings up to date;
        returns those that it has. Long ones take several steps. ``seconds_of``: lines whose second
        choice is wanted too."""
        budget, runs, by_run = STEP_TOKENS, [], {}
        for line in lines:
            own = line.own
            n = min(own.n_waiting, budget)
            if n < 1 or len(own.tokens) >= self.llm.max_positions:
                continue
            if not self._knows(own.tokens[own.n_computed : own.n_computed + n]):
                continue
            if not self._runner.cache.extend(own, n):
                continue
            budget -= n
            runs.append(Run(own, n, "last" if n == own.n_waiting else "none"))
            by_run[runs[-1]] = line
        if not runs:
            return []
        begun = time.perf_counter()
        rows = self._runner.forward(runs)
        n_rows = sum(run.n_rows for run in runs)
        done = []
        for run, row in zip((r for r in runs if r.n_wanted), rows, strict=True):
            line = by_run[run]
            if self._guess(line, row, line in seconds_of):
                done.append(line)
        seconds = time.perf_counter() - begun
        self.seconds += seconds
        if n_rows > 16:  # it is bound by arithmetic
            self.time.observe(0, n_rows, seconds)
        else:
            self.time.observe(n_rows, 0, seconds)
        return done

    def _guess(self, line: Line, logits: NDArray[np.float32], wants_second: bool) -> bool:
        own, logits = line.own, self._as_targets(logits)
        try:
            token = own.sampler.draw(logits, own.tokens)
            chance = 1.0 / float(np.exp(logits - logits[token]).sum(dtype=np.float64))
            if not self._knows([token]) or chance < self._p_min:
                return False
            line.second = None
            if wants_second:
                others = logits.copy()
                others[token] = -np.inf
                second = own.sampler.draw(others, own.tokens)
                line.second = second if self._knows([second]) else None
        except ModelProducedNaN:
            raise
        except Exception:  # of a user's function, of tokens that may never come
            return False
        own.tokens.append(token)
        line.signals.append(bisect_right(_BOUNDS, chance))
        return True

    def _knows(self, tokens: List[int]) -> bool:
        """A vocabulary may end with more unused tokens than the other."""
        return self._n_own >= self._n_vocab or max(tokens, default=0) < self._n_own

    def _as_targets(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """As many as the target has: biases and users' functions name tokens of its vocabulary."""
        if (n_missing := self._n_vocab - len(logits)) > 0:
            return np.pad(logits, (0, n_missing), constant_values=-np.inf)
        return logits[: self._n_vocab]


class DraftProposer:
    """What proposers with a draft model have in common. A signal is how likely the draft model
    thinks its guess, in classes."""

    name = "draft"
    first_rates: tuple[float, ...] = _RATES
    first_mean = 0.75

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter

    @property
    def is_alive(self) -> bool:
        return self.drafter.llm.is_alive

    @property
    def lost_device(self) -> str:
        return self.drafter.llm.lost_device

    def close(self) -> None:
        self.drafter.llm.close()
