"""Who computes how many tokens in the next step.

Each step has a budget of tokens. Sequences that generate go first, with one token each; prompts
share the rest. Requests come and go at every step. A request is admitted when its prompt has room;
what it generates takes room as it comes, and when none is left the worst running request (by lane,
then by age) is *preempted*: it loses its place and goes to the front of the queue with the tokens
it has. What was computed of it stays in the cache for as long as nobody needs the room.

There are two lanes. Interactive requests go before batch requests and may take a seat from one. The
batch lane does not starve: it gets at least ``batch_share`` of the tokens, and a batch request that
has waited for ``max_wait`` takes every other seat that comes free. It can lose that seat again: if
age gave more, a flood of old batch requests would go before everybody who waits at a screen.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from edgellm.errors import EdgeLLMError
from edgellm.kv_cache import KVCache
from edgellm.metrics import Metrics
from edgellm.sequence import Sequence
from edgellm.step_time import StepTime

_TILE = 8  # rows of a matrix tile: other chunks waste some of it
_LOOK_SECONDS = 0.02  # between two looks at a queue that may be long
_RECENT = 0.98  # weight of the past in the lanes' shares, for each step


class RequestTimeout(EdgeLLMError):
    """A request took longer than it may."""


class Overloaded(EdgeLLMError):
    """A request lost its room too often to go on trying."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """``max_num_batched_tokens`` None: what takes ``step_seconds``, and beside interactive
    requests that generate as much as makes their step ``stretch`` times as long.
    ``prefill_share``: of a step's tokens, what prompts may take beside sequences that generate."""

    max_num_seqs: int
    step_tokens: int  # most that a step can compute
    score_tokens: int  # of these, most of prompts that are scored: their logits take room
    max_num_batched_tokens: int | None = None
    prefill_share: float = 1.0
    step_seconds: float = 0.15
    stretch: float = 1.9
    batch_share: float = 0.1
    max_wait: float = 10.0  # seconds
    max_preemptions: int = 16


class Scheduler:
    """``step_time`` learns how long steps take; ``clock`` tells seconds as ``Sequence.arrived``."""

    def __init__(
        self, cache: KVCache, config: SchedulerConfig, step_time: StepTime, metrics: Metrics,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self._cache, self.config, self._time = cache, config, step_time
        self._metrics, self._clock = metrics, clock
        self._lanes: tuple[deque[Sequence], ...] = (deque(), deque())
        self.running: list[Sequence] = []  # best first: by lane, then by arrival
        self._served = [0.0, 0.0]  # tokens by lane, of late
        self._has_preempted = False
        self._had_a_turn = False  # the batch lane, at the last admission
        self._failed: list[tuple[Sequence, EdgeLLMError]] = []
        self._begun: list[Sequence] = []
        self._next_look = 0.0  # at all that wait

    # ---- requests come and go -------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        self._lanes[sequence.lane].append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, whatever its state; its forks are on their own."""
        self._release_forks(sequence)
        for lane in self._lanes:
            if sequence in lane:
                lane.remove(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
            self._cache.release(sequence)

    @property
    def waiting(self) -> Iterator[Sequence]:
        for lane in self._lanes:
            yield from lane

    @property
    def is_idle(self) -> bool:
        return not (self.running or any(self._lanes))

    @property
    def is_resting(self) -> bool:
        """Whether whatever runs waits for its readers."""
        return bool(self.running) and all(s.is_resting for s in self.running)

    @property
    def n_waiting(self) -> int:
        return sum(map(len, self._lanes))

    @property
    def n_waiting_tokens(self) -> int:
        return sum(len(s.tokens) for lane in self._lanes for s in list(lane))

    def _release_forks(self, sequence: Sequence) -> None:
        for fork in reversed(sequence.forks):
            self._lanes[fork.lane].appendleft(fork)
        sequence.forks = []

    # ---- one step -------------------------------------------------------------------------------

    def ended(self) -> list[tuple[Sequence, EdgeLLMError | None]]:
        """Requests that are over before they are done, with what ends them (None: cancelled). They
        are still here."""
        now = self._clock()
        over: list[tuple[Sequence, EdgeLLMError | None]] = []
        looked_at: list[Sequence] = list(self.running)
        if now >= self._next_look:
            looked_at += self.waiting
            self._next_look = now + _LOOK_SECONDS
        for sequence in looked_at:
            if sequence.is_cancelled:
                over.append((sequence, None))
            elif (error := _expired(sequence, now)) is not None:
                over.append((sequence, error))
        return over

    def take_failed(self) -> list[tuple[Sequence, EdgeLLMError]]:
        """Requests that the last step gave up, with the reason."""
        failed, self._failed = self._failed, []
        return failed

    def take_begun(self) -> list[Sequence]:
        """Requests that were admitted for the first time since the last call."""
        begun, self._begun = self._begun, []
        return begun

    def schedule(self) -> dict[Sequence, int]:
        """Tokens to compute of each sequence in one step, room for them included; empty when there
        is nothing to do."""
        self._has_preempted = False
        batch: dict[Sequence, int] = {}
        for sequence in list(self.running):
            self._release_forks_of_computed(sequence)
            if sequence.is_generating and sequence.row >= 0 and not sequence.is_resting:
                self._grant(sequence, sequence.n_waiting, batch)
        budget = self._prefill_budget(list(batch))
        # an interactive request that waits goes before prompts of the batch lane that are under way
        first = [s for s in self.running if s.lane == 0 or not self._lanes[0]]
        budget = self._prefill(first, budget, batch)
        while budget > 0 and not self._has_preempted:
            admitted = self._admit(batch)
            if admitted is None:
                break
            budget -= self._grant(admitted, self._chunk(admitted, budget, batch), batch)
        self._prefill(list(self.running), budget, batch)
        self._account(batch)
        return batch

    def _prefill(self, prompts: list[Sequence], budget: int, batch: dict[Sequence, int]) -> int:
        """Let prompts that are under way take what they can; returns what is left."""
        for sequence in prompts:
            is_next = sequence.row >= 0 and sequence not in batch and not sequence.is_resting
            if is_next and sequence.n_waiting and budget > 0:
                budget -= self._grant(sequence, self._chunk(sequence, budget, batch), batch)
        return budget

    def _release_forks_of_computed(self, sequence: Sequence) -> None:
        if sequence.forks and sequence.n_computed >= sequence.n_prompt:
            self._cache.publish(sequence)
            self._release_forks(sequence)

    def _prefill_budget(self, decoding: list[Sequence]) -> int:
        """Tokens of prompts that the step has room for beside the sequences that generate."""
        config, n_decode = self.config, len(decoding)
        if config.max_num_batched_tokens is not None:
            total = min(config.max_num_batched_tokens, config.step_tokens)
        else:
            seconds = config.step_seconds
            if any(s.options.lane == 0 for s in decoding):
                # People read along: their step may become longer by a factor, which grows with
                # the prompts that others wait for.
                # (options.lane: nobody reads what a promoted batch request generates)
                gap = (config.stretch - 1) * self._time.decode(n_decode)
                under_way = sum(not s.is_generating for s in self.running if s.n_waiting)
                seconds = max(gap, min(seconds, gap * (under_way + self.n_waiting)))
            n = max(_TILE, self._time.n_prefill(seconds) // _TILE * _TILE)
            total = min(n_decode + n, config.step_tokens)
        share = int(total * config.prefill_share) if n_decode else total
        return max(0, min(total - n_decode, max(1, share)))

    def _chunk(self, sequence: Sequence, budget: int, batch: dict[Sequence, int]) -> int:
        """How much of a prompt to compute: up to the next place where its state is to be kept."""
        if sequence.wants_scores:
            n_scored = sum(n for other, n in batch.items() if other.wants_scores)
            budget = min(budget, self.config.score_tokens - n_scored)
        end = min(len(sequence.tokens), sequence.n_computed + budget)
        if self._cache.is_recurrent:
            end = min([end, *(m for m in sequence.marks if m > sequence.n_computed)])
        return end - sequence.n_computed

    def _grant(self, sequence: Sequence, n_tokens: int, batch: dict[Sequence, int]) -> int:
        """Find room for the tokens, if need be by preempting; returns how many it got."""
        if n_tokens <= 0:
            return 0
        while not self._cache.extend(sequence, n_tokens):
            victim = self._victim()
            self._preempt(victim, "memory", batch)
            if victim is sequence:
                return 0
        batch[sequence] = n_tokens
        return n_tokens

    def _victim(self) -> Sequence:
        """Who has to go: the worst that has not gone too often yet."""
        patient = [s for s in self.running if s.n_preempted < self.config.max_preemptions]
        return (patient or self.running)[-1]

    def _preempt(self, sequence: Sequence, cause: str, batch: dict[Sequence, int]) -> None:
        self._has_preempted = True
        batch.pop(sequence, None)
        self._metrics.preempted(cause)
        self.running.remove(sequence)
        self._cache.release(sequence)
        sequence.n_preempted += 1
        if sequence.n_preempted > self.config.max_preemptions:
            self._failed.append((sequence, Overloaded(
                f"The request lost its room {sequence.n_preempted} times to others; try again "
                "when less is going on, or ask for fewer at once."
            )))  # fmt: skip
        else:
            self._lanes[sequence.lane].appendleft(sequence)

    # ---- who is next ----------------------------------------------------------------------------

    def _admit(self, batch: dict[Sequence, int]) -> Sequence | None:
        """The next waiting request with a row and room for its prompt, if it can have them."""
        for sequence in self._next():
            if sequence.is_cancelled or _expired(sequence, self._clock()):
                self._next_look = 0.0  # it goes before the next step
                return None
            if self._seat(sequence):
                return self._begin(sequence)
            if self._make_way(sequence, batch):  # who had to go is the first of its lane now
                return self._begin(sequence) if self._seat(sequence) else None
        return None

    def _begin(self, sequence: Sequence) -> Sequence:
        """From its lane to those that run."""
        self._had_a_turn = sequence.options.lane > 0
        self._lanes[sequence.lane].popleft()
        if sequence.options.lane and not sequence.is_promoted:
            sequence.is_promoted = self._is_owed()
        if not sequence.started:
            sequence.started = self._clock()
            sequence.n_cached = sequence.n_computed
            self._metrics.began(sequence)
            self._begun.append(sequence)
        self._insert(sequence)
        return sequence

    def _seat(self, sequence: Sequence) -> bool:
        """A row and room, if there are any."""
        is_full = len(self.running) >= self.config.max_num_seqs
        if is_full:
            return False
        return self._cache.admit(sequence, self._reserve(), reuse=not sequence.is_scored)

    def _insert(self, sequence: Sequence) -> None:
        order = (sequence.lane, sequence.number)
        at = len(self.running)
        while at and (self.running[at - 1].lane, self.running[at - 1].number) > order:
            at -= 1
        self.running.insert(at, sequence)

    def _next(self) -> list[Sequence]:
        """The first of each lane, in the order in which they may have a seat."""
        heads = [lane[0] for lane in self._lanes if lane]
        if len(heads) == 2 and (self._is_owed() or self._has_aged(heads[1])):
            heads.reverse()
        return heads

    def _has_aged(self, sequence: Sequence) -> bool:
        """Whether a batch request has waited long enough for a seat that is free."""
        is_free = len(self.running) < self.config.max_num_seqs and not self._had_a_turn
        return is_free and self._clock() - sequence.arrived >= self.config.max_wait

    def _is_owed(self) -> bool:
        """Whether the batch lane has had less than its share of late."""
        return self._served[1] < self.config.batch_share * sum(self._served)

    def _make_way(self, sequence: Sequence, batch: dict[Sequence, int]) -> bool:
        """An interactive request takes the seat of a running batch request, if there is one."""
        worst = self.running[-1] if self.running else None
        if sequence.options.lane or worst is None or worst.lane == 0:
            return False
        if worst.n_preempted >= self.config.max_preemptions:
            return False
        self._preempt(worst, "priority", batch)
        return True

    def _reserve(self) -> list[int]:
        """Blocks of each group that running sequences will need for what they know, and one more
        for each of them, so that an admission does not lead to a preemption at once."""
        reserve = [0] * len(self._cache.groups)
        for sequence in self.running:
            for i, n in enumerate(self._cache.outstanding(sequence)):
                reserve[i] += n + 1
        return reserve

    def _account(self, batch: dict[Sequence, int]) -> None:
        self._served = [_RECENT * tokens for tokens in self._served]
        for sequence, n in batch.items():
            self._served[sequence.options.lane] += n


def _expired(sequence: Sequence, now: float) -> RequestTimeout | None:
    options, waited = sequence.options, now - sequence.arrived
    if options.timeout is not None and waited > options.timeout:
        return RequestTimeout(f"The request was not done within {options.timeout:g} s (timeout).")
    if (limit := options.first_token_timeout) is not None and waited > limit:
        if not sequence.first_token:
            return RequestTimeout(
                f"There was no first token within {limit:g} s (first_token_timeout)."
            )
    if (limit := options.queue_timeout) is not None and waited > limit and not sequence.started:
        return RequestTimeout(f"The request was not begun within {limit:g} s (queue_timeout).")
    return None
