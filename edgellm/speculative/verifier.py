"""Which guesses were right: the model's own token is sampled behind each, while they agree."""

from __future__ import annotations

from collections.abc import Callable

from edgellm.sampling import Candidates
from edgellm.sequence import Sequence

Take = Callable[[Sequence, Candidates], str | None]


def verify(
    sequence: Sequence, draft: tuple[int, ...], rows: list[Candidates], take: Take
) -> tuple[int, str | None]:
    """(guesses that were right, how the sequence ended or None).

    ``rows`` [1 + n] are the logits behind the sequence and behind each guess; ``take`` samples the
    next token from a row, puts it on the sequence and says whether that ended it. A token is the
    one that would have come without guesses, since its row and its noise are.
    """
    for i, row in enumerate(rows):
        n_before = len(sequence.tokens)
        reason = take(sequence, row)
        n_right = i
        if i < len(draft) and len(sequence.tokens) > n_before and sequence.tokens[-1] == draft[i]:
            n_right += 1
        if reason is not None or n_right == i:
            return n_right, reason
    raise AssertionError("behind the last guess comes a token that was none")
