"""Finds stop strings in text that arrives in pieces, and holds back possible beginnings of them.

The match that ends first wins, and of those that end there the longest, so the result does not
depend on how the text is cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.errors import InvalidRequest

MAX_STOPS = 16
MAX_STOP_CHARS = 256


def check_stop_strings(stops: Sequence[str]) -> None:
    """Raises InvalidRequest (field "stop") for too many, empty or too long stop strings."""
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"at most {MAX_STOPS} stop strings, not {len(stops)}", "stop")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise InvalidRequest(
                f"a stop string must have 1 to {MAX_STOP_CHARS} characters, not {len(stop)}", "stop"
            )


class StopStrings:
    """Filters the text of one output."""

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        """Raises InvalidRequest (field "stop") as `check_stop_strings` does."""
        check_stop_strings(stops)
        self._stops = tuple(stops)
        self._include_stop = include_stop
        # All proper beginnings of stop strings.
        self._beginnings = frozenset(s[:length] for s in stops for length in range(1, len(s)))
        self._most_held = max(map(len, self._beginnings), default=0)
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Adds text; returns the text that is certain, and the stop string that was found.

        After a match, there is no more text, and the match is returned again.
        """
        if self._matched is not None or not self._stops:
            return ("" if self._matched is not None else text), self._matched
        held = self._held + text
        end, stop = self._first_match(held)
        if stop:
            self._matched, self._held = stop, ""
            return held[: end if self._include_stop else end - len(stop)], stop
        certain = self._certain(held)
        self._held = held[certain:]
        return held[:certain], None

    def flush(self) -> str:
        """The text held back, at the end of the output."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str]:
        """The end and stop string of the first match; an empty string without one."""
        matches = [(at + len(s), s) for s in self._stops if (at := text.find(s)) >= 0]
        return min(matches, key=lambda match: (match[0], -len(match[1])), default=(0, ""))

    def _certain(self, text: str) -> int:
        """Number of characters before the longest beginning of a stop string at the end."""
        for start in range(max(0, len(text) - self._most_held), len(text)):
            if text[start:] in self._beginnings:
                return start
        return len(text)
