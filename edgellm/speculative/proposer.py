"""What guesses the next tokens of sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from edgellm.sequence import Sequence
from edgellm.speculative.acceptance import Acceptance


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


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a sequence could use: at most ``n`` guesses. ``rates``: how often they were right;
    ``step_seconds`` of a step without, ``row_seconds`` more for each guess that is checked."""

    n: int
    rates: Acceptance
    step_seconds: float
    row_seconds: float


class Proposer(Protocol):
    """``first_rates``: for each signal, how often such guesses are right, to begin with;
    ``first_mean``: how often any is. ``is_alive``: it can go on guessing; ``lost_device`` is the
    name of a GPU that failed under it, or empty."""

    name: str
    first_rates: tuple[float, ...]
    first_mean: float

    @property
    def is_alive(self) -> bool: ...
    @property
    def lost_device(self) -> str: ...

    def propose(self, wanted: Mapping[Sequence, Wanted]) -> dict[Sequence, Proposal]:
        """Guesses for sequences that generate; those it has none for are left out. What takes
        time is done only as far as it is likely to be worth it."""
        ...

    def outlook(self, sequence: Sequence, use: Wanted) -> float:
        """How many times as fast its guesses are likely to make a sequence that has others."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over, or begins anew."""
        ...

    def close(self) -> None: ...
