"""How many guesses are worth their rows: of each sequence, in each step, down to none.

A guess brings as many tokens as it is likely to be right, and costs what its row makes the step
longer. Those with the largest gains are taken until the tokens per second of the whole step are at
their best. In a step that is bound by memory rows cost little; where a batch or a prompt keeps the
multipliers busy they cost as much as they bring, and none is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as List

_WORTH = 1.03  # times as fast as without, at least: estimates are not exact


def allocate(gains: List[List[float]], seconds: Callable[[int], float], room: int) -> list[int]:
    """How many guesses of each sequence to check: those that bring the most tokens per second.

    ``gains``: of each sequence, the tokens that each further guess brings, falling. ``seconds``: of
    a step with so many guesses in all; ``room``: the most that fit.
    """
    counts = [0] * len(gains)
    order = sorted(
        ((gain, -i, -k) for i, mine in enumerate(gains) for k, gain in enumerate(mine)),
        reverse=True,
    )[:room]
    n_tokens = float(len(gains))
    best, n_best = _WORTH * n_tokens / seconds(0), 0
    for n, (gain, _, _) in enumerate(order, 1):
        n_tokens += gain
        if (speed := n_tokens / seconds(n)) > best:
            best, n_best = speed, n
    for _, i, _ in order[:n_best]:
        counts[-i] += 1
    return counts
