"""Stop strings in a stream of text pieces.

A stop string may be spread over many pieces, and neither it nor its beginning may reach the user.
So the matcher holds back the longest end of the text that could still become a stop string.
"""

from collections.abc import Iterable


class StopMatcher:
    """Feed it the text as it comes; it returns what may be shown.

    The result does not depend on how the text is cut into pieces: the earliest complete match ends
    the text. "Earliest" is the match that is complete first; of those complete at the same
    character, the longest.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        if "" in self._stops:
            raise ValueError("a stop string must not be empty")
        self._held = ""
        self._hit: str | None = None

    @property
    def hit(self) -> str | None:
        """The stop string that ended the text."""
        return self._hit

    def push(self, text: str) -> tuple[str, str | None]:
        """Take the next piece; return (text to show, the stop string that ended it or None).

        After a hit everything further is swallowed.
        """
        if self._hit is not None:
            return "", self._hit
        text = self._held + text
        found = self._first_match(text)
        if found is not None:
            start, self._hit = found
            self._held = ""
            return text[:start], self._hit
        keep = len(text) - self._open_suffix(text)
        self._held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        """The text held back, once no more will come."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """(start, stop) of the match with the smallest end; of those, the longest."""
        best: tuple[int, str] | None = None
        for stop in self._stops:  # longest first, so an equal end keeps the longer one
            start = text.find(stop)
            if start >= 0 and (best is None or start + len(stop) < best[0] + len(best[1])):
                best = start, stop
        return best

    def _open_suffix(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
