"""Why a prompt had to be computed again: how much of it was known, and where it parts from the
nearest earlier one. A date in a system prompt, or a tool list in another order, is seen at once.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.sequence import Sequence

Tokens = NDArray[np.int32]
_REMEMBERED = 64  # requests
_SHOWN = 12  # tokens on each side of where prompts part


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Of ``n_prompt`` tokens ``n_hit`` were not computed again. The nearest earlier request had
    the first ``n_common`` of them; behind these the prompt has ``here``, it had ``there``, in the
    message with number ``message`` (0: the first)."""

    n_prompt: int
    n_hit: int
    n_common: int
    before: tuple[int, ...]
    here: tuple[int, ...]
    there: tuple[int, ...]
    message: int

    def text(self, decode: Callable[[list[int]], str]) -> str:
        """In words."""
        known = f"{self.n_hit} of {self.n_prompt} prompt tokens were known"
        if not self.n_common:
            return f"{known}: no earlier request begins like this one."
        lost = ""
        if self.n_hit < min(self.n_common, self.n_prompt - 1):
            lost = f" Of {self.n_common} common tokens the rest was no longer kept."
        if self.n_common >= self.n_prompt:
            return f"{known}: an earlier request has them all.{lost}"
        before, here = decode(list(self.before)), decode(list(self.here))
        at = f"token {self.n_common}, in message {self.message + 1}, behind {before!r}"
        if not self.there:
            return f"{known}: an earlier request ends at {at}; here follows {here!r}.{lost}"
        there = decode(list(self.there))
        return (
            f"{known}: the prompt departs from an earlier one at {at}: {here!r}, not {there!r}."
            f"{lost}"
        )


class Known:
    """The earlier requests that there were when one was begun: what its report is made from, when
    somebody asks for it."""

    def __init__(self, sequence: Sequence, earlier: list[Tokens]) -> None:
        self._tokens, self._n_cached = sequence.tokens[: sequence.n_prompt], sequence.n_cached
        self._earlier = earlier

    def report(self, message_ends: Set[int]) -> CacheReport:
        """``message_ends``: tokens that stand behind a message."""
        prompt, best, nearest = np.array(self._tokens, np.int32), 0, None
        for tokens in self._earlier:
            n = min(len(tokens), len(prompt))
            different = np.flatnonzero(tokens[:n] != prompt[:n])
            common = int(different[0]) if len(different) else n
            if common >= best and common:
                best, nearest = common, tokens
        there = () if nearest is None else tuple(nearest[best : best + _SHOWN].tolist())
        return CacheReport(
            n_prompt=len(prompt),
            n_hit=self._n_cached,
            n_common=best,
            before=tuple(prompt[max(0, best - _SHOWN) : best].tolist()),
            here=tuple(prompt[best : best + _SHOWN].tolist()),
            there=there,
            message=sum(token in message_ends for token in self._tokens[:best]),
        )


class PromptHistory:
    """Tokens of the newest requests, for reports."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, Tokens]] = {}  # by number, oldest first

    def add(self, sequence: Sequence) -> None:
        """Remember a request that begins, or what it has come to."""
        self._known.pop(sequence.number, None)
        self._known[sequence.number] = sequence.salt, np.array(sequence.tokens, np.int32)
        if len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]

    def known(self, sequence: Sequence) -> Known:
        """What may be compared with a request that begins."""
        salt, number = sequence.salt, sequence.number
        return Known(
            sequence, [t for n, (s, t) in self._known.items() if s == salt and n != number]
        )
