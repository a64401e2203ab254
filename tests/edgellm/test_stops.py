"""Stop strings against a naive search, whatever the cuts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.stops import StopMatcher

letters = st.text("ab<|", max_size=30)
stop_lists = st.lists(st.text("ab<|", min_size=1, max_size=5), max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(st.lists(letters, max_size=8), stop_lists)
def test_any_cut_gives_what_a_search_of_the_whole_gives(pieces, stops):
    matcher, shown, hit = StopMatcher(stops), "", None
    whole, expected_hit = naive("".join(pieces), stops)
    for piece in pieces:
        text, hit = matcher.push(piece)
        shown += text
        assert whole.startswith(shown)  # nothing leaked that a later piece would take back
    shown += matcher.flush()
    assert (shown, hit) == (whole, expected_hit)


@given(letters, stop_lists)
def test_only_a_possible_beginning_is_held_back(text, stops):
    shown, hit = StopMatcher(stops).push(text)
    if hit is None:
        held = text[len(shown) :]
        assert held == "" or any(s.startswith(held) and s != held for s in stops)


def test_no_stops_hold_nothing():
    assert StopMatcher([]).push("anything") == ("anything", None)


def test_after_a_hit_all_is_swallowed():
    matcher = StopMatcher(["END"])
    assert matcher.push("oneEN") == ("one", None)
    assert matcher.push("Dtwo") == ("", "END")
    assert matcher.push("three") == ("", "END")
    assert matcher.flush() == ""


def test_empty_stop_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopMatcher([""])
