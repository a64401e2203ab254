"""The engine's loop: ``schedule -> forward -> sample -> update``, for prompts and generation alike.

Only the scheduler and ``update`` change what a request is; a step's batch are flat arrays. Nothing
that goes wrong with a request, or with a step, ends the loop: the requests concerned fail with the
error, the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from edgellm.cache_report import PromptHistory
from edgellm.errors import EdgeLLMError
from edgellm.kernels.cpu.team import TeamError
from edgellm.metrics import Metrics
from edgellm.runner import Run, Runner
from edgellm.sampling import Candidates, log_softmax_top
from edgellm.scheduler import Scheduler
from edgellm.sequence import Piece, Sequence
from edgellm.speculative.speculation import Speculation
from edgellm.speculative.verifier import verify
from edgellm.step_time import StepTime

if TYPE_CHECKING:
    from edgellm.tokenizer import Tokenizer

_MOST_EMPTY_STEPS = 100  # without anything to compute while requests wait


class EngineError(EdgeLLMError):
    """The engine cannot be used: closed, forked, or in a state no call can repair."""


class Seat(NamedTuple):
    """The tokens of the last request that ended in a seat, and the salt of its cache."""

    tokens: list[int]
    salt: str


class Loop:
    """Runs the requests of one model. ``tokenizer`` may still be loading: it is asked for at the
    first token. Sequences end at ``max_positions``. ``speculation`` None: nothing is guessed."""

    def __init__(
        self, runner: Runner, scheduler: Scheduler, step_time: StepTime, metrics: Metrics,
        tokenizer: Callable[[], Tokenizer], max_positions: int,
        speculation: Speculation | None = None,
    ) -> None:  # fmt: skip
        self._runner, self.scheduler, self._step_time = runner, scheduler, step_time
        self.metrics, self._tokenizer, self._max_positions = metrics, tokenizer, max_positions
        self._speculation = speculation
        self.last: Sequence | None = None  # the request that finished last
        self.seats: dict[int, Seat] = {}
        self._n_empty, self._history = 0, PromptHistory()

    def step(self) -> bool:
        """Compute one step for whoever is waiting; what came out is put on the sequences. False
        when there was nothing to compute."""
        begun = time.perf_counter()
        for sequence, error in self.scheduler.ended():
            self._end_early(sequence, error)
        batch = self.scheduler.schedule()
        for sequence, error in self.scheduler.take_failed():
            self._end_early(sequence, error)
        for sequence in self.scheduler.take_begun():
            sequence.known = self._history.known(sequence)
            self._history.add(sequence)
            _report_progress(sequence)
        if not batch:
            self._watch()
            return False
        self._n_empty = 0
        runs = self._runs(batch)
        generating = [run for run in runs if run.sequence.is_generating]
        n_decode = sum(run.n_rows for run in generating)
        n_prefill = sum(run.n_rows for run in runs) - n_decode
        n_before = sum(len(run.sequence.tokens) for run in generating)
        scheduled = time.perf_counter()
        try:
            rows = self._runner.best(runs, _n_best(runs))
        except Exception as error:
            self.fail(batch, EngineError(f"{error}.") if isinstance(error, TeamError) else error)
            return True
        computed = time.perf_counter()
        self._step_time.observe(n_decode, n_prefill, computed - scheduled)
        i = 0
        for run in runs:
            _report_progress(run.sequence)
            mine = rows[i : i + run.n_wanted]
            i += run.n_wanted
            if run.draft:
                self._verify(run, mine)
            elif self._score(run.sequence, mine) and len(mine) and not run.sequence.n_waiting:
                self._update(run.sequence, mine[-1])
        if self._speculation is not None and not n_prefill:
            n_new = sum(len(run.sequence.tokens) for run in generating) - n_before
            self._speculation.account(n_decode, n_new, len(generating), computed - begun)
        updated = time.perf_counter()
        self.metrics.step(
            n_decode, n_prefill, scheduled - begun, computed - scheduled, updated - computed
        )
        return True

    @cached_property
    def _eog(self) -> frozenset[int]:
        """Tokens that end a text; the tokenizer may still be loading when the loop is made."""
        return frozenset(self._tokenizer().eog)

    def _score(self, sequence: Sequence, rows: list[Candidates]) -> bool:
        """Score the prompt's tokens behind the last ones that were computed, as far as they have no
        scores yet: a sequence that lost its room is computed again. False when that failed."""
        if not sequence.wants_scores:
            return True
        first = sequence.n_computed - len(rows) + 1
        for position in range(max(first, len(sequence.scores)), sequence.n_computed + 1):
            if position == sequence.n_prompt:
                break
            token, n_top = sequence.tokens[position], sequence.params.prompt_logprobs or 0
            try:
                logprob, best = log_softmax_top(rows[position - first].logits, token, n_top)
            except Exception as error:
                sequence.error = error
                self.finish(sequence, "error")
                return False
            sequence.scores.append((token, logprob, best))
        return True

    def _runs(self, batch: dict[Sequence, int]) -> list[Run]:
        """With the guesses that are worth checking, as far as there is room that nobody needs."""
        drafts: dict[Sequence, tuple[int, ...]] = {}
        if self._speculation is not None:
            self._speculation.ends = self._eog
            n_rows = sum(n for s, n in batch.items() if s.is_generating)
            n_prefill = sum(batch.values()) - n_rows
            n_out = sum(n if s.wants_scores else 1 for s, n in batch.items())
            room = self._runner.room(n_rows + n_prefill, n_out)
            writing = [s for s in batch if s.is_generating and s.n_computed >= s.n_prompt]
            found = self._speculation.plan(writing, n_rows, n_prefill, room)
            drafts = {s: proposal.tokens for s, proposal in found.items()}
        runs = []
        for sequence, n in batch.items():
            draft = drafts.get(sequence, ())
            if draft and not self._runner.cache.extend(sequence, n + len(draft)):
                draft = ()
            runs.append(Run(sequence, n, _wanted(sequence, n), draft))
        return runs

    def _verify(self, run: Run, rows: list[Candidates]) -> None:
        """Sample the tokens behind a draft, as far as it was right."""
        n_right, reason = verify(run.sequence, run.draft, rows, self._take)
        self._runner.settle(run, n_right)
        self._end(run.sequence, reason)

    def _update(self, sequence: Sequence, candidates: Candidates) -> None:
        """Sample the sequence's next token."""
        self._end(sequence, self._take(sequence, candidates))

    def _end(self, sequence: Sequence, reason: str | None) -> None:
        """Its new tokens are there; ``reason`` says how they ended it, if they did."""
        if reason is not None:
            self.finish(sequence, reason)
        elif self._speculation is not None:
            self._speculation.learn(sequence)

    def _take(self, sequence: Sequence, candidates: Candidates) -> str | None:
        """Sample the sequence's next token; how that ended it, or None."""
        params = sequence.params
        if params.max_tokens == 0:
            sequence.first_token = time.perf_counter()  # the prompt is computed
            return "length"
        try:
            token = sequence.sampler.draw(candidates, sequence.tokens)
            is_complete = sequence.sampler.accept(token)
        except Exception as error:  # also of a user's function; the others' step goes on
            sequence.error = error
            return "error"
        now = time.perf_counter()
        sequence.first_token = sequence.first_token or now
        self.metrics.token(sequence, now)
        if token in self._eog and (params.structured or not params.ignore_eos):
            if params.logprobs:
                sequence.end = token, *log_softmax_top(candidates.logits, token, params.logprobs)
            return "stop"
        sequence.tokens.append(token)
        text, hit = sequence.stops.push(sequence.decoder.push(token))
        logprob, top = None, ()
        if params.logprobs:
            logprob, best = log_softmax_top(candidates.logits, token, params.logprobs)
            top = tuple(best)  # type: ignore[assignment]
        sequence.pieces.append(Piece(text, token, None, logprob, top, sequence.choice))
        n_output = len(sequence.tokens) - sequence.n_prompt
        if hit is not None or is_complete:
            return "stop"
        if params.max_tokens is not None and n_output >= params.max_tokens:
            return "length"
        if len(sequence.tokens) >= self._max_positions:
            sequence.context_full = True
            return "length"
        return None

    def finish(self, sequence: Sequence, reason: str) -> None:
        """The sequence is over; it gets the rest of its text and gives back what it holds."""
        sequence.finished = time.perf_counter()
        sequence.finish_reason = reason
        text, _ = sequence.stops.push(sequence.decoder.flush())
        text += sequence.stops.flush()
        sequence.pieces.append(Piece(text, None, reason, choice=sequence.choice))
        self.last = sequence
        if self._speculation is not None:
            self._speculation.forget(sequence)
        if sequence.started:
            self._history.add(sequence)
        if sequence.row >= 0:
            self.seats[sequence.row] = Seat(sequence.tokens, sequence.salt)
        self.scheduler.remove(sequence)
        self.metrics.ended(sequence)
        if self.scheduler.is_idle:
            self._check_accounts()

    def _end_early(self, sequence: Sequence, error: EdgeLLMError | None) -> None:
        sequence.error = error
        self.finish(sequence, "abort" if error is None else "error")

    def fail(self, sequences: Iterable[Sequence], error: Exception) -> None:
        """End requests with an error, as those of a step that was lost."""
        for sequence in sequences:
            sequence.error = error
            self.finish(sequence, "error")

    def _watch(self) -> None:
        """Requests that wait for ever would be worse than one that fails."""
        waiting = next(iter(self.scheduler.waiting), None)
        if waiting is None or self.scheduler.running:
            self._n_empty = 0
            return
        self._n_empty += 1
        if self._n_empty > _MOST_EMPTY_STEPS:
            self._n_empty = 0
            self.metrics.stalls += 1
            self._end_early(waiting, EngineError("The request could not be begun: no room for it."))

    def _check_accounts(self) -> None:
        """Nothing runs: then every block is free or kept. A fault is counted, not fatal."""
        if not self._runner.cache.is_idle:
            self.metrics.faults += 1


def _report_progress(sequence: Sequence) -> None:
    """Of a prompt that is being read, to a reader who wants to know; its other choices are read
    with the first."""
    if sequence.options.report_progress and not sequence.first_token and not sequence.choice:
        sequence.pieces.append(Piece("", None, progress=sequence.progress))


def _wanted(sequence: Sequence, n_tokens: int) -> str:
    """Whose logits of a run are needed (see Run)."""
    if sequence.wants_scores:
        return "all"
    return "last" if n_tokens == sequence.n_waiting else "none"


def _n_best(runs: list[Run]) -> int:
    """How many of the largest logits of each row a step has to bring; 0: all of them."""
    needed = [run.sequence.n_best for run in runs if run.n_wanted]
    return max(needed, default=0) if all(needed) else 0
