"""Guesses of a draft model that takes turns with the target on the same cores.

Drafting then costs what it takes, so it is done only as far as it is likely to pay: by the time of
the draft model's steps, of the target's, and by how often guesses were right.
"""

from __future__ import annotations

from collections.abc import Mapping

from edgellm.sequence import Sequence
from edgellm.speculative.acceptance import expected_tokens
from edgellm.speculative.drafter import Drafter, DraftProposer, Line
from edgellm.speculative.proposer import Proposal, Wanted

_WORTH = 1.05  # times as fast as without, at least
_LEAST_LEFT = 64  # tokens that an answer without limit is taken to have left, at least
_MOST_IDLE = 8  # steps without guesses after which it falls too far behind to be of use


class DraftModel(DraftProposer):
    """The proposer."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self._lines: dict[Sequence, Line | None] = {}  # None: it is not worth one
        self._idle: dict[Sequence, int] = {}  # steps in which guessing did not pay

    def propose(self, wanted: Mapping[Sequence, Wanted]) -> dict[Sequence, Proposal]:
        lines: dict[Sequence, Line] = {}
        n = self._length(wanted)
        for sequence, use in wanted.items():
            line = self._line(sequence, use, n)
            if line is not None:
                self.drafter.follow(line, sequence.tokens)
                lines[sequence] = line
        going = dict(lines)
        chances = dict.fromkeys(lines, 1.0)
        for i in range(n):
            done = set(self.drafter.step(going.values()))
            for sequence, line in list(going.items()):
                use = wanted[sequence]
                if line in done:
                    chances[sequence] *= use.rates.rates[line.signals[-1]]
                is_enough = line.n_guesses >= use.n or chances[sequence] < self._least(use, n)
                if line not in done or is_enough:
                    del going[sequence]
            if not going or i + 1 == n:
                break
        return {
            s: Proposal(tuple(line.own.tokens[line.n_true :]), tuple(line.signals), self.name)
            for s, line in lines.items()
            if line.n_guesses
        }

    def outlook(self, sequence: Sequence, use: Wanted) -> float:
        if self._lines.get(sequence) is None:  # it would have to read all there is first
            return 0.0
        return self._best({sequence: use})[0]

    def _length(self, wanted: Mapping[Sequence, Wanted]) -> int:
        """Guesses of each sequence that are worth drafting and checking; 0: none is."""
        return self._best(wanted)[1] if wanted else 0

    def _best(self, wanted: Mapping[Sequence, Wanted]) -> tuple[float, int]:
        """(times as fast as without, guesses of each sequence) at the best; (…, 0): none pays."""
        best, n_best, n_seqs = _WORTH, 0, len(wanted)
        step = next(iter(wanted.values())).step_seconds
        draft = self.drafter.time.decode(n_seqs)
        mean = sum(use.rates.mean for use in wanted.values()) / n_seqs
        row = n_seqs * next(iter(wanted.values())).row_seconds
        tokens = 1.0
        for n in range(1, max(use.n for use in wanted.values()) + 1):
            tokens += mean**n
            if (ratio := tokens * step / (step + n * (row + draft))) > best:
                best, n_best = ratio, n
        return best, n_best

    def _least(self, use: Wanted, n: int) -> float:
        """The chance of a guess below which another step of the draft model does not pay."""
        mean = use.rates.mean
        tokens = expected_tokens(mean, n)
        draft = self.drafter.time.decode(1)
        speed = tokens / (use.step_seconds + n * (use.row_seconds + draft))
        return speed * (use.row_seconds + draft) / max(mean, 0.01)

    def _line(self, sequence: Sequence, use: Wanted, n: int) -> Line | None:
        """The sequence's line. The first time it is decided whether reading its prompt pays."""
        if sequence in self._lines:
            line = self._lines[sequence]
            self._idle[sequence] = 0 if n else self._idle.get(sequence, 0) + 1
            if line is not None and self._idle[sequence] > _MOST_IDLE:
                self.drafter.close(line)
                line = self._lines[sequence] = None
            return line
        pays = n > 0 and self._pays(sequence, use, n)
        line = self.drafter.open(sequence) if pays else None
        self._lines[sequence] = line
        return line

    def _pays(self, sequence: Sequence, use: Wanted, n: int) -> bool:
        """Whether the rest of the answer saves more than reading what there is of it costs."""
        params, n_output = sequence.params, len(sequence.output)
        left = max(_LEAST_LEFT, n_output)
        if params.max_tokens is not None:
            left = min(max(left, _LEAST_LEFT), params.max_tokens - n_output)
        tokens = expected_tokens(use.rates.mean, n)
        draft = self.drafter.time.decode(1)
        took = (use.step_seconds + n * (use.row_seconds + draft)) / tokens
        saved = left * (use.step_seconds - took)
        return saved > len(sequence.tokens) * self.drafter.time.token_seconds

    def forget(self, sequence: Sequence) -> None:
        self._idle.pop(sequence, None)
        line = self._lines.pop(sequence, None)
        if line is not None:
            self.drafter.close(line)
