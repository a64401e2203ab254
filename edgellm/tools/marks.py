"""Fixed texts found in a text that grows."""

import re
from collections.abc import Sequence


class Marks:
    """Finds the first of some marks."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._longest = max(map(len, marks), default=0)
        self._marks = marks
        # of two that begin alike the longer is meant
        ordered = sorted(marks, key=len, reverse=True)
        self._search = re.compile("|".join(map(re.escape, ordered))) if marks else None

    def first(self, text: str) -> tuple[int, str | None]:
        """(place, mark), or (place from where on the text may become one, None)."""
        if self._search is None:
            return len(text), None
        found = self._search.search(text)
        for place in range(max(0, len(text) - self._longest + 1), len(text)):
            if found is not None and place >= found.start():
                break
            if any(mark.startswith(text[place:]) for mark in self._marks):
                return place, None
        return (found.start(), found[0]) if found is not None else (len(text), None)
