"""What speculation came to: counted by the engine's one thread, read by anybody."""

from __future__ import annotations

from collections import Counter
from typing import Any


class SpeculationCounts:
    """``by_position``: of the tokens that were accepted, how many stood where in their draft (from
    0). Seconds are estimates: of steps that were not needed, less what checking and drafting took.
    """

    def __init__(self) -> None:
        self.drafts = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.drafted_at: Counter[int] = Counter()
        self.accepted_at: Counter[int] = Counter()
        self.accepted_from: Counter[str] = Counter()  # by proposer
        self.declined = 0  # times that there were guesses, and none was worth a row
        self.saved_seconds = 0.0

    def checked(self, source: str, n_drafted: int, n_accepted: int) -> None:
        self.drafts += 1
        self.drafted_tokens += n_drafted
        self.accepted_tokens += n_accepted
        self.drafted_at.update(range(n_drafted))
        self.accepted_at.update(range(n_accepted))
        self.accepted_from[source] += n_accepted

    def snapshot(self) -> dict[str, Any]:
        """Plain numbers."""
        return {k: dict(v) if isinstance(v, Counter) else v for k, v in vars(self).items()}

    def report(self) -> str:
        """In a sentence."""
        if not self.drafts:
            return f"Nothing was guessed that was worth checking ({self.declined} times declined)."
        share = 100 * self.accepted_tokens / self.drafted_tokens
        return (
            f"{self.accepted_tokens:,} of {self.drafted_tokens:,} drafted tokens were right "
            f"({share:.0f} %); about {self.saved_seconds:.1f} s were saved, and {self.declined:,} "
            "drafts were not worth checking."
        )
