"""Prompt lookup: what followed these tokens the last time they came, in prompt or output.

Code that is edited, answers that quote, and lists repeat what is there already. The index of a
sequence has the last place of every pair and triple of tokens, and the places before it as a
chain; it grows with the sequence and is never made anew.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from collections.abc import Sequence as List

from edgellm.sequence import Sequence
from edgellm.speculative.proposer import Proposal, Wanted

_BOUNDS = (3, 4, 5, 7, 10, 16, 32)  # tokens in common at which a guess becomes surer
_RATES = (0.25, 0.35, 0.45, 0.55, 0.7, 0.8, 0.9, 0.95)
_MOST_COMMON = 40  # tokens that are compared: the rest of a longer match changes nothing
_MOST_PLACES = 8  # of the chain that are compared


class Index:
    """Where the end of a sequence has been seen before."""

    def __init__(self) -> None:
        self._n = 0  # tokens that are indexed
        self._last: dict[tuple[int, ...], int] = {}  # n-gram -> where its last token stands
        self._before: list[int] = []  # by place: the place of the same triple before it, or -1
        self._shift = 0  # how far back the last match was: it may go on

    def add(self, tokens: List[int]) -> None:
        """Take the tokens that have come. The newest are indexed only when others follow: they
        would be found as their own past."""
        for i in range(self._n, len(tokens) - 1):
            self._before.append(-1)
            if i >= 2:
                triple = (tokens[i - 2], tokens[i - 1], tokens[i])
                self._before[i] = self._last.get(triple, -1)
                self._last[triple] = i
            if i >= 1:
                self._last[tokens[i - 1], tokens[i]] = i
        self._n = max(self._n, len(tokens) - 1)

    def find(self, tokens: List[int]) -> tuple[int, int]:
        """(place, n): where the last n tokens were before, and their last of all; (-1, 0) if fewer
        than two were. Of equally long matches the newest."""
        if len(tokens) < 3:
            return -1, 0
        end = len(tokens) - 1
        place, most = -1, 0
        if self._shift:
            place, most = end - self._shift, _common(tokens, end - self._shift)
        triple, pair = (tokens[end - 2], tokens[end - 1], tokens[end]), tuple(tokens[end - 1 :])
        other, n_seen = self._last.get(triple, -1), 0
        while other >= 0 and n_seen < _MOST_PLACES and most < _MOST_COMMON:
            n = _common(tokens, other)
            if n > most:
                place, most = other, n
            other, n_seen = self._before[other], n_seen + 1
        if most < 2 and (other := self._last.get(pair, -1)) >= 0:
            place, most = other, _common(tokens, other)
        if most < 2:
            return -1, 0
        self._shift = end - place
        return place, most


def _common(tokens: List[int], place: int) -> int:
    """How many tokens up to ``place`` are those at the end."""
    end, n = len(tokens) - 1, 0
    while n < _MOST_COMMON and n <= place and tokens[place - n] == tokens[end - n]:
        n += 1
    return n


class Lookup:
    """The proposer. A signal is how many tokens agree before the guess, in classes."""

    name = "lookup"
    first_rates: tuple[float, ...] = _RATES
    first_mean = 0.6
    is_alive, lost_device = True, ""

    def __init__(self) -> None:
        self._indices: dict[Sequence, Index] = {}

    def propose(self, wanted: Mapping[Sequence, Wanted]) -> dict[Sequence, Proposal]:
        found = {}
        for sequence, use in wanted.items():
            index = self._indices.get(sequence)
            if index is None:
                index = self._indices[sequence] = Index()
            index.add(sequence.tokens)
            place, n_common = index.find(sequence.tokens)
            if place < 0:
                continue
            tokens = self._copied(sequence.tokens, place, use.n)
            signals = tuple(bisect_right(_BOUNDS, n_common + i) for i in range(len(tokens)))
            found[sequence] = Proposal(tokens, signals, self.name)
        return found

    def outlook(self, sequence: Sequence, use: Wanted) -> float:
        return 0.0  # it is asked first

    def _copied(self, tokens: List[int], place: int, most: int) -> tuple[int, ...]:
        """What follows a place; a copy that reaches the end goes on with itself."""
        copied = list(tokens[place + 1 : place + 1 + most])
        period = len(tokens) - 1 - place
        while len(copied) < most:
            copied.append(copied[len(copied) - period])
        return tuple(copied)

    def forget(self, sequence: Sequence) -> None:
        self._indices.pop(sequence, None)

    def close(self) -> None:
        self._indices.clear()
