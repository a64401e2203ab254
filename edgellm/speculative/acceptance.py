"""How often guesses are right, by what their proposer says of them; learned while they are checked.

Each sequence follows its own rates, which begin as those of all sequences before it: an answer that
quotes and one that does not are unlike in everything but the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List

_OWN, _ALL = 1 / 6, 1 / 48  # weight of the newest guess: 14 wrong ones turn 0.95 into 0.07


class Acceptance:
    """Rates of one proposer's signals; ``of`` is where its sequences' own rates begin."""

    def __init__(self, first_rates: List[float], weight: float = _ALL) -> None:
        self.rates, self._weight = list(first_rates), weight

    def of_sequence(self) -> Acceptance:
        return Acceptance(self.rates, _OWN)

    def observe(self, signal: int, is_right: bool) -> None:
        self.rates[signal] += self._weight * (is_right - self.rates[signal])

    def gains(self, signals: Iterable[int]) -> list[float]:
        """Of each guess, the chance that it and all before it are right: tokens that it brings."""
        found, chance = [], 1.0
        for signal in signals:
            chance *= self.rates[signal]
            found.append(chance)
        return found
