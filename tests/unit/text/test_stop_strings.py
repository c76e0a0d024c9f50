"""Stop strings are found across pieces, and nothing that may become one leaks out."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.errors import InvalidRequest
from baton.text import StopStrings

SMALL_TEXT = st.text("ab\n", max_size=20)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4)


def search(text, stops):
    """Where the winning match ends, and it: read the whole text one character at a time."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return end, stop
    return len(text), None


@given(pieces=st.lists(SMALL_TEXT, max_size=8), stops=STOPS, include_stop=st.booleans())
@example(pieces=["a", "b", "c"], stops=["abc", "b"], include_stop=False)
@example(pieces=["one EN", "D two", " three"], stops=["END"], include_stop=False)
@example(pieces=["x\n"], stops=["\n\n"], include_stop=False)
@example(pieces=["xaab"], stops=["aab", "ab", "b"], include_stop=True)
@settings(max_examples=400, deadline=None)
def test_equals_a_search_of_the_whole_text(pieces, stops, include_stop):
    text = "".join(pieces)
    end, expected = search(text, stops)
    filtered = StopStrings(stops, include_stop)
    emitted, matched = "", None
    for piece in pieces:
        new, matched = filtered.push(piece)
        emitted += new
    emitted += filtered.flush()
    assert matched == expected
    assert emitted == text[: end if include_stop or not expected else end - len(expected)]


@given(text=SMALL_TEXT, stops=STOPS)
@settings(max_examples=200, deadline=None)
def test_holds_back_exactly_what_may_become_a_stop(text, stops):
    emitted, matched = StopStrings(stops).push(text)
    if matched is None:
        beginnings = [
            text[i:] for i in range(len(text)) if any(s.startswith(text[i:]) for s in stops)
        ]
        assert text[len(emitted) :] == max(beginnings, key=len, default="")


@pytest.mark.parametrize("stops", [[""], ["x" * 257], ["x"] * 17])
def test_refuses_bad_stops(stops):
    with pytest.raises(InvalidRequest) as refused:
        StopStrings(stops)
    assert refused.value.field == "stop"
