"""What guesses the next tokens of sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from edgellm.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow a sequence. ``signals`` are a proposer's own words for how sure it is
    of each, small whole numbers; what they are worth is learned (see acceptance)."""

    tokens: tuple[int, ...]
    signals: tuple[int, ...]
    source: str  # the proposer's name

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, n: int) -> Proposal:
        """The first n of it."""
        return Proposal(self.tokens[:n], self.signals[:n], self.source)


class Proposer(Protocol):
    """``first_rates``: for each signal, how often such guesses are right, to begin with."""

    name: str
    first_rates: tuple[float, ...]

    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, Proposal]:
        """Guesses for sequences that generate, of at most so many tokens each; those it has none
        for are left out."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over, or begins anew."""
        ...

    def close(self) -> None: ...
