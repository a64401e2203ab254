"""DRY ("don't repeat yourself"): a token that would go on with a repetition pays, the more the
longer the repetition is. Sequence breakers, as line ends and quotes, end what counts as one."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgellm.samplers.chain import Candidates, Context, step

if TYPE_CHECKING:
    from edgellm.sampling_params import SamplingParams

_LOG_OF_MOST = 88.7228391  # of the largest float32: what a penalty may reach, as in llama.cpp


@step("dry")
def dry(candidates: Candidates, params: "SamplingParams", context: Context) -> Candidates:
    """Take ``multiplier * base ** (length - allowed_length)`` off the logit of each token that
    followed an earlier occurrence of the text's last ``length`` tokens."""
    if not params.dries:
        return candidates
    window = context.last(params.dry_penalty_last_n)
    breakers = [text.encode() for text in params.dry_sequence_breakers]
    allowed = params.dry_allowed_length
    longest = min(len(window), _since_breaker(window, breakers, context))
    if params.dry_base > 1.000001:  # beyond this the penalty does not grow
        longest = min(longest, allowed + int(_LOG_OF_MOST / math.log(params.dry_base)))
    elif params.dry_base == 1:
        longest = min(longest, allowed)
    ids, lengths = repetitions(window, allowed, longest)
    if breakers:
        free = [not any(b in context.piece(token) for b in breakers) for token in ids.tolist()]
        ids, lengths = ids[free], lengths[free]
    where, which = candidates.places(ids)
    penalty = params.dry_multiplier * np.power(params.dry_base, lengths[which] - float(allowed))
    return candidates.changed(where, candidates.logits[where].astype(np.float64) - penalty)


def repetitions(
    window: npt.NDArray[np.int64], shortest: int, longest: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(ids, lengths): the tokens that followed an earlier occurrence of the last ``length`` tokens,
    with the greatest such length from shortest to longest. Ids rise."""
    n = len(window)
    lengths = np.zeros(n, np.int64)  # of the common end of window and window[: i + 1]
    ends = np.arange(max(0, n - 1))  # of occurrences that go on
    for length in range(1, min(longest, n - 1) + 1):
        ends = ends[ends >= length - 1]
        ends = ends[window[ends - (length - 1)] == window[n - length]]
        if len(ends) == 0:
            break
        lengths[ends] = length
    ends = np.flatnonzero(lengths[: n - 1] >= shortest) if n else ends
    ids, groups = np.unique(window[ends + 1], return_inverse=True)
    best = np.zeros(len(ids), np.int64)
    np.maximum.at(best, groups, lengths[ends])
    return ids, best


def _since_breaker(
    window: npt.NDArray[np.int64], breakers: Iterable[bytes], context: Context
) -> int:
    """How many tokens come after the one in which the last breaker ends.

    Breakers are texts, so the bytes of the tokens are searched: whatever tokens a breaker is cut
    into, it is found. Usually one is near, so the end is looked at first.
    """
    breakers = list(breakers)
    if not breakers:
        return len(window)
    reach = max(map(len, breakers))
    size = 64
    while True:
        start = max(0, len(window) - size - reach)  # a breaker may begin before the part
        pieces = [context.piece(token) for token in window[start:].tolist()]
        text = b"".join(pieces)
        end = max(text.rfind(b) + len(b) if b in text else 0 for b in breakers)
        if end:
            after, at = 0, len(text)
            for piece in reversed(pieces):
                at -= len(piece)
                if at < end:
                    break
                after += 1
            if after < size or start == 0:
                return after
        if start == 0:
            return len(window)
        size *= 8
