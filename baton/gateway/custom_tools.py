"""Custom tools of the Responses API, whose input is a text: the model calls functions of one text.

The prompt describes a function with the argument `input`; the model writes calls in its own format.
"""

from __future__ import annotations

import json
import re

CUSTOM_INPUT = "input"
CUSTOM_SCHEMA = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}
_BEGIN = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
# Whole characters of a string; both halves of a pair of surrogates are one.
_CHARS = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4})*"
)


class CustomInput:
    """Takes the text of a call's input out of its arguments, which arrive in pieces of JSON."""

    def __init__(self) -> None:
        self._held = ""  # arguments that are not text yet
        self._begun = False

    def push(self, arguments: str) -> str:
        """Adds a piece of the arguments; returns the text that is certain."""
        self._held += arguments
        if not self._begun:
            if (match := _BEGIN.match(self._held)) is None:
                return ""
            self._begun, self._held = True, self._held[match.end() :]
        match = _CHARS.match(self._held)
        assert match is not None
        self._held = self._held[match.end() :]
        text: str = json.loads(f'"{match[0]}"', strict=False)
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def close(self) -> str:
        """The rest: arguments that are not of a custom tool are its input as they are."""
        return "" if self._begun or self._held.strip() == "{}" else self._held
