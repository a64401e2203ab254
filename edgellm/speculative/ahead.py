"""Guesses of a draft model on cores of its own: it writes on while the target checks.

A thread keeps *lines* ahead of each sequence, as if all guesses were right; what turns out to be
wrong is thrown away. For the first guesses it also follows the second choice: a step of the draft
model takes no longer with a few rows more, and where the first choice was wrong the second is often
right, so that the target need not begin without a guess.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from edgellm.sequence import Sequence
from edgellm.speculative.acceptance import expected_tokens
from edgellm.speculative.drafter import Drafter, DraftProposer, Line
from edgellm.speculative.proposer import Proposal, Wanted

LINES = 6  # of a sequence at most
_SECONDS_UP_TO = 3  # guesses whose second choice is followed
_OTHERS_AHEAD = 3  # guesses of a line that follows a second choice
_MOST_WAITED_FOR = 3  # guesses that the target waits for
_NEWEST = 0.1  # weight of the newest speed
_PATIENCE = 3.0  # steps of the draft model in which a guess has to come


class Written(NamedTuple):
    """What a line has: guesses behind the first ``n_true`` tokens of a sequence."""

    n_true: int
    tokens: tuple[int, ...]
    signals: tuple[int, ...]


@dataclass
class _Tree:
    """A sequence's lines; the first is the main one. ``most``: guesses it can use at once."""

    most: int
    lines: list[Line] = field(default_factory=list)


@dataclass
class _Pace:
    """Tokens per second that a sequence has made of late."""

    n_tokens: int
    at: float
    speed: float


class DraftAhead(DraftProposer):
    """The proposer. It asks nothing of the engine's thread but a glance at what is written."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self._news = threading.Condition()
        self._most: dict[Sequence, int] = {}  # sequences to write for, and guesses they can use
        self._written: dict[Sequence, list[Written]] = {}
        self._pace: dict[Sequence, _Pace] = {}
        self._has_changed = self._is_closed = False
        self._error: BaseException | None = None
        self._step_began = 0.0
        self._thread = threading.Thread(target=self._run, name="edgellm-draft", daemon=True)
        self._thread.start()

    # ---- the engine's thread --------------------------------------------------------------------

    def propose(self, wanted: Mapping[Sequence, Wanted]) -> dict[Sequence, Proposal]:
        with self._news:
            if self._error is not None:
                raise self._error
            for sequence, use in wanted.items():
                self._most[sequence] = use.n
            self._has_changed = True
            self._news.notify_all()
            found = {}
            for sequence, use in wanted.items():
                ready = self._ready(sequence)
                speed = self._speed(sequence, use)
                if len(wanted) == 1:
                    ready = self._wait(sequence, use, ready, speed)
                if ready is not None and ready.tokens:
                    found[sequence] = Proposal(ready.tokens, ready.signals, self.name).cut(use.n)
        return found

    def outlook(self, sequence: Sequence, use: Wanted) -> float:
        with self._news:
            ready = self._ready(sequence)
        n = 0 if ready is None else min(len(ready.tokens), use.n)
        tokens = expected_tokens(use.rates.mean, n)
        return tokens * use.step_seconds / max(use.step_seconds + n * use.row_seconds, 1e-9)

    def _ready(self, sequence: Sequence) -> Written | None:
        """The most guesses behind the tokens that the sequence has now."""
        tokens, best = sequence.tokens, None
        for n_true, guesses, signals in self._written.get(sequence, ()):
            n_came = len(tokens) - n_true
            if 0 <= n_came <= len(guesses) and list(guesses[:n_came]) == tokens[n_true:]:
                here = Written(len(tokens), guesses[n_came:], signals[n_came:])
                if best is None or len(here.tokens) > len(best.tokens):
                    best = here
        return best

    def _speed(self, sequence: Sequence, use: Wanted) -> float:
        now, n = time.perf_counter(), len(sequence.tokens)
        pace = self._pace.get(sequence)
        if pace is None:
            pace = self._pace[sequence] = _Pace(n, now, 1 / max(use.step_seconds, 1e-6))
        elif now > pace.at:
            pace.speed += _NEWEST * ((n - pace.n_tokens) / (now - pace.at) - pace.speed)
            pace.n_tokens, pace.at = n, now
        return pace.speed

    def _wait(
        self, sequence: Sequence, use: Wanted, ready: Written | None, speed: float
    ) -> Written | None:
        """Wait for guesses as far as they are likely to bring more than the time is worth."""
        n_ready = 0 if ready is None else len(ready.tokens)
        draft = self.drafter.time.decode(LINES)
        # the step that is under way is soon over; where all lines were wrong, it is of no use
        first = max(0.0, draft - (time.perf_counter() - self._step_began))
        first += draft if ready is None else 0.0
        n_wanted = n_ready + worth_waiting_for(
            n_ready, use.rates.mean, use.step_seconds, first, draft, speed
        )
        end = time.perf_counter() + _PATIENCE * draft
        while n_ready < min(n_wanted, use.n):
            left = end - time.perf_counter()
            if left <= 0 or not self._news.wait(left) or self._error is not None:
                break
            if (ready := self._ready(sequence)) is not None:
                n_ready = len(ready.tokens)
        return ready

    @property
    def is_alive(self) -> bool:
        return self._error is None and super().is_alive

    def forget(self, sequence: Sequence) -> None:
        with self._news:
            self._pace.pop(sequence, None)
            if self._most.pop(sequence, None) is not None:
                self._has_changed = True
                self._news.notify_all()

    def close(self) -> None:
        with self._news:
            self._is_closed = True
            self._news.notify_all()
        self._thread.join()
        super().close()

    # ---- the thread that writes -----------------------------------------------------------------

    def _run(self) -> None:
        trees: dict[Sequence, _Tree] = {}
        try:
            while True:
                with self._news:
                    if self._is_closed:
                        return
                    most, self._has_changed = dict(self._most), False
                self._take_in(trees, most)
                if self._write(trees):
                    self._publish(trees)
                    continue
                with self._news:
                    while not (self._has_changed or self._is_closed):
                        self._news.wait()
        except BaseException as error:  # the engine's thread raises it
            with self._news:
                self._error = error
                self._news.notify_all()

    def _take_in(self, trees: dict[Sequence, _Tree], most: dict[Sequence, int]) -> None:
        """Requests that came and went, and tokens that the target has by now."""
        for sequence in [s for s in trees if s not in most]:
            for line in trees.pop(sequence).lines:
                self.drafter.close(line)
        for sequence, n in most.items():
            tree = trees.setdefault(sequence, _Tree(n))
            tree.most = n
            if not tree.lines:
                opened = self.drafter.open(sequence)
                tree.lines += [opened] if opened is not None else []
            if tree.lines:
                self._follow(tree, list(sequence.tokens))

    def _follow(self, tree: _Tree, tokens: list[int]) -> None:
        """Keep the lines that are true so far; if none is, the main one begins again."""
        true = [line for line in tree.lines if _agrees(line, tokens)]
        if true and true[0] is not tree.lines[0]:
            true.sort(key=lambda line: -len(line.own.tokens))
        kept = true or tree.lines[:1]
        for line in tree.lines:
            if line not in kept:
                self.drafter.close(line)
        for line in kept:
            self.drafter.follow(line, tokens)
        tree.lines = kept

    def _write(self, trees: dict[Sequence, _Tree]) -> bool:
        """A step of the draft model; False when there was nothing that it could write."""
        lines, forking = [], set()
        for tree in trees.values():
            n_free = LINES - len(tree.lines)
            for i, line in enumerate(tree.lines):
                if line.n_guesses < (_OTHERS_AHEAD if i else tree.most + 1):
                    lines.append(line)
                    if n_free > 0 and line.n_guesses < _SECONDS_UP_TO:
                        forking.add(line)
                        n_free -= 1
        n_behind = [line.n_behind for line in lines]
        self._step_began = time.perf_counter()
        done = set(self.drafter.step(lines, forking))
        for sequence, tree in trees.items():
            for line in list(tree.lines):
                if line in done and line in forking:
                    other = self.drafter.fork(sequence, line)
                    tree.lines += [other] if other is not None else []
        # a line that is as long as the context, or finds no room, has to wait for news
        return bool(done) or any(line.n_behind < n for line, n in zip(lines, n_behind, strict=True))

    def _publish(self, trees: dict[Sequence, _Tree]) -> None:
        written = {
            sequence: [
                Written(line.n_true, tuple(line.own.tokens[line.n_true :]), tuple(line.signals))
                for line in tree.lines
            ]
            for sequence, tree in trees.items()
        }
        with self._news:
            self._written = written
            self._news.notify_all()


def worth_waiting_for(
    n_ready: int, mean: float, step_seconds: float, first_seconds: float, draft_seconds: float,
    speed: float,
) -> int:  # fmt: skip
    """For how many guesses more the target had better wait, at ``speed`` tokens per second, when
    the first comes in ``first_seconds`` and others each ``draft_seconds`` later.

    Guesses that are right bring a token each, and where all are, and the next one, the step after
    begins with what was written meanwhile.
    """
    n_meanwhile = max(0, min(8, round(step_seconds / max(draft_seconds, 1e-6)) - 1))
    later = sum(mean**i for i in range(1, n_meanwhile + 1))

    def value(n: int) -> float:
        k = n_ready + n
        tokens = expected_tokens(mean, k)
        seconds = first_seconds + (n - 1) * draft_seconds if n else 0.0
        return tokens + later * mean ** (k + 1) - speed * seconds

    return max(range(_MOST_WAITED_FOR + 1), key=value)


def _agrees(line: Line, tokens: list[int]) -> bool:
    n = min(len(line.own.tokens), len(tokens))
    return line.own.tokens[line.n_true : n] == tokens[line.n_true : n]
