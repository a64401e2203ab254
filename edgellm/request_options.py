"""What a request asks of the scheduler."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgellm.errors import EdgeLLMError

LANES = ("interactive", "batch")


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """``priority``: "interactive" goes before "batch". The timeouts are seconds since the request
    arrived: until it is begun, until its first token, until its end; a request that exceeds one
    ends with RequestTimeout. Only requests with the same ``cache_salt`` share what was computed.
    With ``most_pieces`` a request rests while its reader has left so many pieces untaken; it is for
    streams, and who waits for the end before taking any would wait for ever.
    ``report_progress``: pieces that tell how far the prompt is read come before the first token.
    With ``speculate`` False nothing is guessed for it, where a model speculates.
    """

    priority: str = "interactive"
    queue_timeout: float | None = None
    first_token_timeout: float | None = None
    timeout: float | None = None
    cache_salt: str = ""
    report_progress: bool = False
    most_pieces: int | None = None
    speculate: bool = True

    def __post_init__(self) -> None:
        if self.priority not in LANES:
            raise EdgeLLMError(f"priority must be {' or '.join(LANES)}, not {self.priority!r}.")
        if not isinstance(self.cache_salt, str):
            raise EdgeLLMError(f"cache_salt must be text, not {self.cache_salt!r}.")
        most = self.most_pieces
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise EdgeLLMError(f"most_pieces must be a whole number of at least 1, not {most!r}.")
        for name in ("queue_timeout", "first_token_timeout", "timeout"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise EdgeLLMError(f"{name} must be seconds, not {value!r}.")
            if not (math.isfinite(value) and value > 0):
                raise EdgeLLMError(f"{name} must be more than 0 seconds, not {value!r}.")

    @property
    def lane(self) -> int:
        """0 goes first."""
        return LANES.index(self.priority)
