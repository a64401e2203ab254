"""Number formats for many tensors from what each costs and loses: the least loss for a size, or the
least size for a loss.

Losses of tensors are taken to add up. Each tensor's sensible choices are the lower convex hull of
(bytes, loss); taking the steps of all hulls in the order of loss saved for a byte is optimal but
for the last step (the relaxed knapsack; Everett, Operations Research 11, 1963).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Option(NamedTuple):
    """One way to keep a tensor."""

    type: str
    n_bytes: int
    loss: float


@dataclass(frozen=True)
class Step:
    """A tensor from one choice to the next better one."""

    tensor: str
    to: Option
    n_bytes: int
    saved: float  # of its loss


def hull(options: Sequence[Option]) -> list[Option]:
    """The options that pay for some price of a byte, smallest first."""
    found: list[Option] = []
    for option in sorted(options, key=lambda o: (o.n_bytes, o.loss)):
        if found and option.loss >= found[-1].loss:
            continue
        while len(found) > 1 and _rate(found[-2], option) >= _rate(found[-2], found[-1]):
            found.pop()
        found.append(option)
    return found


def _rate(a: Option, b: Option) -> float:
    """Loss saved for a byte."""
    return (a.loss - b.loss) / max(b.n_bytes - a.n_bytes, 1)


def steps(options: Mapping[str, Sequence[Option]]) -> tuple[dict[str, Option], list[Step]]:
    """The smallest choice of each tensor, and the steps from there, best first."""
    hulls = {tensor: hull(some) for tensor, some in options.items()}
    rated = [
        (_rate(a, b), Step(tensor, b, b.n_bytes - a.n_bytes, a.loss - b.loss))
        for tensor, some in hulls.items()
        for a, b in zip(some, some[1:], strict=False)
    ]
    # A hull's rates fall, so a stable sort keeps the steps of one tensor in their order.
    rated.sort(key=lambda pair: -pair[0])
    return {tensor: some[0] for tensor, some in hulls.items()}, [step for _, step in rated]


def for_size(options: Mapping[str, Sequence[Option]], n_bytes: int) -> dict[str, Option] | None:
    """The least loss within n_bytes in all; None if the smallest choices take more."""
    chosen, todo = steps(options)
    left = n_bytes - sum(option.n_bytes for option in chosen.values())
    if left < 0:
        return None
    full: set[str] = set()  # what has no room for its next step has none for those behind it
    for step in todo:
        if step.tensor in full or step.n_bytes > left:
            full.add(step.tensor)
            continue
        chosen[step.tensor] = step.to
        left -= step.n_bytes
    return chosen


def for_loss(options: Mapping[str, Sequence[Option]], loss: float) -> dict[str, Option]:
    """The least size whose losses add up to no more than `loss`; the best there is if none does."""
    chosen, todo = steps(options)
    now = sum(option.loss for option in chosen.values())
    for step in todo:
        if now <= loss:
            break
        chosen[step.tensor] = step.to
        now -= step.saved
    return chosen
