"""How long a step will take, learned from the steps before.

A step that only generates takes the time of its batch size; each token of a prompt beside it adds
about the same again, whatever the size of the chunk. Both are followed as they are measured, so
that longer contexts and a busier machine are seen within a few steps.
"""

from __future__ import annotations

_NEWEST = 0.3  # weight of the newest measurement


class StepTime:
    """Seconds of steps. ``token_seconds`` is a first guess for a token of a prompt."""

    def __init__(self, token_seconds: float) -> None:
        self._token, self._is_guess = token_seconds, True
        self._decode: dict[int, float] = {}  # by number of sequences

    def observe(self, n_decode: int, n_prefill: int, seconds: float) -> None:
        """A step of so many sequences that generate and tokens of prompts took so long."""
        if not n_prefill:
            if n_decode:
                known = self._decode.get(n_decode, seconds)
                self._decode[n_decode] = known + _NEWEST * (seconds - known)
            return
        token = max(0.0, seconds - self.decode(n_decode)) / n_prefill
        self._token += (1.0 if self._is_guess else _NEWEST) * (token - self._token)
        self._is_guess = False

    @property
    def token_seconds(self) -> float:
        """Of a token of a prompt."""
        return self._token

    def decode(self, n_decode: int) -> float:
        """Of a step in which so many sequences generate: as measured with the nearest number."""
        if not n_decode:
            return 0.0
        if not self._decode:
            return 2 * self._token  # reading all weights for one token
        return self._decode[min(self._decode, key=lambda n: abs(n - n_decode))]

    def n_prefill(self, seconds: float) -> int:
        """How many tokens of prompts take this long."""
        return int(seconds / max(self._token, 1e-9))
