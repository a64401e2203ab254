"""How often guesses are right, by what their proposer says of them; learned while they are checked.

Each sequence follows its own rates, which begin as those of all sequences before it: an answer that
quotes and one that does not are unlike in everything but the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List

_OWN, _ALL = 1 / 6, 1 / 48  # weight of the newest guess: 14 wrong ones turn 0.95 into 0.07
_MEAN = 1 / 16
_RELAX = 1 / 32  # with each sequence: what is believed to be no use is tried again some day


def expected_tokens(chance: float, n: int) -> float:
    """Of a step with n guesses, each right with this chance if those before it were: theirs, and
    the one that comes anyway."""
    return sum(chance**i for i in range(n + 1))


class Acceptance:
    """Rates of one proposer's signals; ``of`` is where its sequences' own rates begin."""

    def __init__(self, first_rates: List[float], first_mean: float, weight: float = _ALL) -> None:
        self._first, self.rates, self._weight = first_rates, list(first_rates), weight
        self._first_mean = self.mean = first_mean  # whatever the signal

    def of_sequence(self) -> Acceptance:
        self.mean += _RELAX * (self._first_mean - self.mean)
        self.rates = [r + _RELAX * (f - r) for r, f in zip(self.rates, self._first, strict=True)]
        return Acceptance(self.rates, self.mean, _OWN)

    def observe(self, signal: int, is_right: bool) -> None:
        self.rates[signal] += self._weight * (is_right - self.rates[signal])
        self.mean += min(self._weight, _MEAN) * (is_right - self.mean)

    def gains(self, signals: Iterable[int]) -> list[float]:
        """Of each guess, the chance that it and all before it are right: tokens that it brings."""
        found, chance = [], 1.0
        for signal in signals:
            chance *= self.rates[signal]
            found.append(chance)
        return found
