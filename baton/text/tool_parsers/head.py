"""What precedes a call's arguments, as a pattern that says what may still become a match."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class Chars(NamedTuple):
    """From `least` to `most` characters of a class of regular expressions; a group if `named`."""

    pattern: str
    least: int
    most: int
    named: bool = True


SPACE = Chars(r"\s", 0, 64, named=False)
NAME = Chars(r"[\w.-]", 1, 128)


class Head:
    """What precedes arguments, matched at the beginning of text that arrives in pieces.

    `parts`: texts, characters, and optional sequences of both. One of the texts in `ahead` must
    follow, or one of such characters, and is not taken.
    """

    def __init__(self, *parts: HeadPart, ahead: Sequence[str] | Chars = ()) -> None:
        if isinstance(ahead, Chars):
            behind, rest = ahead.pattern, ""
        else:
            behind = "|".join(map(re.escape, ahead))
            rest = "|".join(_beginnings(text) for text in ahead)
        self._pattern = re.compile(_pattern(parts) + (f"(?={behind})" if ahead else ""))
        self._beginning = re.compile(_so_far(parts, f"(?:{rest})"))

    def match(self, text: str) -> re.Match[str] | None:
        """The match at the beginning of `text`."""
        return self._pattern.match(text)

    def may_match(self, text: str) -> bool:
        """Whether `text` is the beginning of a match, with more text to come."""
        return self._beginning.fullmatch(text) is not None


HeadPart = str | Chars | Sequence["str | Chars"]


def _pattern(parts: Sequence[HeadPart]) -> str:
    """The regular expression of a head."""
    patterns = []
    for part in parts:
        if isinstance(part, str):
            patterns.append(re.escape(part))
        elif isinstance(part, Chars):
            group = "(" if part.named else "(?:"
            patterns.append(f"{group}{part.pattern}{{{part.least},{part.most}}})")
        else:
            patterns.append(f"(?:{_pattern(part)})?")
    return "".join(patterns)


def _so_far(parts: Sequence[HeadPart], rest: str) -> str:
    """A regular expression of all beginnings of the parts, then of `rest`."""
    for part in reversed(parts):
        if isinstance(part, str):
            rest = _beginnings(part, rest)
        elif isinstance(part, Chars):
            rest = f"{part.pattern}{{0,{part.most}}}{rest}"
        else:
            rest = f"(?:{_so_far(part, rest)}|{rest})"
    return rest


def _beginnings(text: str, rest: str = "") -> str:
    for char in reversed(text):
        rest = f"(?:{re.escape(char)}{rest})?"
    return rest
