"""Repairs the JSON of models in a stream; valid JSON passes unchanged.

Models leave line breaks and lone surrogates in strings, write Python's literals, and forget quotes,
commas and brackets, which clients cannot parse.
"""

from __future__ import annotations

import json
import re

_PLAIN = re.compile(r"[^\"'\\\x00-\x1f\ud800-\udfff]+")  # in a string
_WORD = re.compile(r"[^\s\"'{}\[\]:,]+")
_SPACE = re.compile(r"[ \t\r\n]+")
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")
_WORDS = {"True": "true", "False": "false"} | dict.fromkeys(
    ("None", "NaN", "Infinity", "-Infinity", "undefined"), "null"
)
_HEX = re.compile(r"[0-9a-fA-F]{0,4}")
_REPLACEMENT = "\\ufffd"


def repaired(text: str) -> str:
    """Repairs a whole text; empty if it has no value."""
    repair = JsonRepair()
    return repair.push(text) + repair.close()


class JsonRepair:
    """Repairs one value in pieces; text after the value is dropped."""

    def __init__(self) -> None:
        self._out = list[str]()
        self._closers = list[str]()  # of open strings, lists and objects, innermost last
        # What is expected next: a value, a key, a colon, a comma or end, or nothing.
        self._next = "value"
        self._comma = (
            ""  # a comma held back, with the white space after it, in case a bracket follows
        )
        self._quote = ""  # of the open string
        self._escape = ""  # an incomplete escape, from its backslash
        self._high = ""  # an escaped high surrogate
        self._word = ""  # an incomplete literal or number

    def push(self, text: str) -> str:
        """Adds text; returns the JSON that is certain."""
        at = 0
        while at < len(text):
            at = (self._in_string if self._quote else self._outside)(text, at)
        return self._taken()

    def close(self) -> str:
        """Returns the missing end."""
        if self._quote:
            self._escape = ""
            self._end_string()
        self._end_word()
        while self._closers:
            self._close()
        return self._taken()

    def _taken(self) -> str:
        out = "".join(self._out)
        self._out.clear()
        return out

    def _in_string(self, text: str, at: int) -> int:
        if self._escape:
            return self._in_escape(text, at)
        char = text[at]
        if char == "\\":
            self._escape = char
            return at + 1
        self._put_high()
        if char == self._quote:
            self._end_string()
        elif plain := _PLAIN.match(text, at):
            self._out.append(plain[0])
            return plain.end()
        elif char == "'":
            self._out.append(char)
        else:  # a quote in a single-quoted string, a control character, a surrogate
            self._out.append(_REPLACEMENT if char >= "\ud800" else json.dumps(char)[1:-1])
        return at + 1

    def _in_escape(self, text: str, at: int) -> int:
        escape, char = self._escape, text[at]
        if escape == "\\" and char != "u":
            self._put_high()
            self._escape = ""
            if char in '"\\/bfnrt':
                self._out.append(escape + char)
            elif char != "'":  # not an escape: the backslash is text
                self._out.append("\\\\")
                return at
            else:
                self._out.append(char)
            return at + 1
        if escape == "\\":
            self._escape = "\\u"
            return at + 1
        digits = _HEX.match(text, at, at + 6 - len(escape))
        assert digits is not None
        escape = self._escape = escape + digits[0]
        if len(escape) == 6:
            self._escape = ""
            self._put_escaped(escape)
        elif digits.end() < len(text):
            self._escape = ""
            self._put_high()
            self._out.append("\\" + escape)
        return digits.end()

    def _put_escaped(self, escape: str) -> None:
        """Writes a character as \\uXXXX; lone surrogates become U+FFFD."""
        code = int(escape[2:], 16)
        if 0xDC00 <= code < 0xE000:
            self._out.append(self._high + escape if self._high else _REPLACEMENT)
            self._high = ""
            return
        self._put_high()
        if 0xD800 <= code < 0xDC00:
            self._high = escape
        else:
            self._out.append(escape)

    def _put_high(self) -> None:
        if self._high:
            self._out.append(_REPLACEMENT)
            self._high = ""

    def _end_string(self) -> None:
        self._put_high()
        self._quote = ""
        self._out.append('"')
        self._end_scalar()

    def _outside(self, text: str, at: int) -> int:
        if word := _WORD.match(text, at):
            self._word += word[0]
            return word.end()
        self._end_word()
        if self._next == "nothing":
            return len(text)
        char = text[at]
        if space := _SPACE.match(text, at):
            if self._comma:
                self._comma += space[0]
            else:
                self._out.append(space[0])
            return space.end()
        if char in "\"'":
            self._begin()
            self._quote = char
            self._out.append('"')
        elif char in "{[":
            self._begin(container=True)
            self._closers.append("}" if char == "{" else "]")
            self._next = "key" if char == "{" else "value"
            self._out.append(char)
        elif char in "}]":
            if self._closers:
                self._close()
        elif char == ":" and self._next == "colon":
            self._out.append(char)
            self._next = "value"
        elif char == "," and self._closers:
            self._fill()
            if self._next == "comma":
                self._comma = self._comma or char
        return at + 1

    def _end_word(self) -> None:
        word, self._word = self._word, ""
        if not word or self._next == "nothing":
            return
        self._begin()
        word = _WORDS.get(word, word)
        is_key = self._next == "key"
        self._out.append(word if _SCALAR.fullmatch(word) and not is_key else json.dumps(word))
        self._end_scalar()

    def _begin(self, *, container: bool = False) -> None:
        """Writes what is missing before a value or key."""
        if self._next == "comma":
            self._out.append(self._comma or ",")
            self._comma = ""
            self._next = "key" if self._closers[-1] == "}" else "value"
        if self._next == "key" and container:
            self._out.append('"":')
            self._next = "value"
        if self._next == "colon":
            self._out.append(":")
            self._next = "value"

    def _end_scalar(self) -> None:
        self._next = "colon" if self._next == "key" else "comma" if self._closers else "nothing"

    def _fill(self) -> None:
        """Writes the value of a key without one."""
        if self._next == "colon" or (self._next == "value" and self._closers[-1] == "}"):
            self._out.append(":null" if self._next == "colon" else "null")
            self._next = "comma"

    def _close(self) -> None:
        self._fill()
        self._out.append(self._comma[1:])
        self._comma = ""
        self._out.append(self._closers.pop())
        self._next = "comma" if self._closers else "nothing"
