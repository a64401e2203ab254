"""How long a step will take, learned from the steps before.

A step that only generates takes a time that depends on its rows: one for each sequence, and one for
each guess that is checked with it. Each token of a prompt beside them adds about the same again,
whatever the size of the chunk. All are followed as they are measured, so that longer contexts and a
busier machine are seen within a few steps.
"""

from __future__ import annotations

from bisect import bisect_left, insort

_NEWEST = 0.3  # weight of the newest measurement
_MOST = 2.0  # times what was known, as which a longer step counts: the host may have taken a core


class StepTime:
    """Seconds of steps. ``token_seconds`` is a first guess for a token of a prompt."""

    def __init__(self, token_seconds: float) -> None:
        self._token, self._is_guess = token_seconds, True
        self._decode: dict[int, float] = {}  # by number of rows
        self._rows: list[int] = []  # that have been measured, rising

    def observe(self, n_decode: int, n_prefill: int, seconds: float) -> None:
        """A step of so many generated rows and tokens of prompts took so long."""
        if not n_prefill:
            if n_decode in self._decode:
                known = self._decode[n_decode]
                self._decode[n_decode] += _NEWEST * (min(seconds, _MOST * known) - known)
            elif n_decode:
                self._decode[n_decode] = seconds
                insort(self._rows, n_decode)
            return
        token = max(0.0, seconds - self.decode(n_decode)) / n_prefill
        self._token += (1.0 if self._is_guess else _NEWEST) * (token - self._token)
        self._is_guess = False

    @property
    def token_seconds(self) -> float:
        """Of a token of a prompt."""
        return self._token

    def decode(self, n_decode: int) -> float:
        """Of a step that generates with so many rows: as measured, between two numbers that were
        measured on a line, beyond them by the time of a prompt's token for each row."""
        if not n_decode:
            return 0.0
        if not self._rows:
            return 2 * self._token  # reading all weights for one token
        at = bisect_left(self._rows, n_decode)
        if at == len(self._rows):
            last = self._rows[-1]
            return self._decode[last] + (n_decode - last) * self._token
        after = self._rows[at]
        if at == 0 or after == n_decode:
            return self._decode[after]
        before = self._rows[at - 1]
        share = (n_decode - before) / (after - before)
        return self._decode[before] + share * (self._decode[after] - self._decode[before])

    def n_prefill(self, seconds: float) -> int:
        """How many tokens of prompts take this long."""
        return int(seconds / max(self._token, 1e-9))
