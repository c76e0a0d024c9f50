"""Errors of bodies and their fields, as clients see them."""

from __future__ import annotations

import re

import msgspec

from baton.errors import InvalidRequest

_ERROR = re.compile(r"(?P<reason>.*?)(?: - at (`key` in )?`\$\.?(?P<field>.*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_QUOTED = re.compile(r"'.{1,40}'")
_TYPE = re.compile(r"(\w+)\[\d+\]\.type$")
# Text up to the first escaped half of a UTF-16 surrogate pair, and that half. Possessive, so that
# a long body costs one pass.
_HALF_PAIR = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?!d[89a-f])|\\ud[89ab]..\\ud[c-f]..)*+(\\ud[89a-f][0-9a-f]{2})",
    re.DOTALL | re.IGNORECASE,
)
_SUPPORTED = {
    "content": "must be text: images, audio, video and files are not supported",
    "tools": "must be 'function' or 'custom': tools that run on the server are not supported",
    "tool_calls": "must be 'function' or 'custom': tools that run on the server are not supported",
}


def invalid(
    error: msgspec.ValidationError, within: str = "", whole: str = "the body"
) -> InvalidRequest:
    """Translates msgspec's error, as "Expected `int`, got `str` - at `$.prompt[0]`".

    `within`: the field that was decoded, if it was not `whole`.
    """
    found = _ERROR.fullmatch(str(error))
    assert found is not None
    reason, field = found["reason"], within + (found["field"] or "").removesuffix("[...]")
    if missing := _MISSING.fullmatch(reason):
        field = f"{field}.{missing[1]}".removeprefix(".")
        return InvalidRequest(f"{field} is missing", field)
    if not field:
        return InvalidRequest(f"{whole} must be a JSON object")
    if of := _TYPE.search(field):
        named = f" is {value[0]}:" if (value := _QUOTED.search(reason)) else ""
        supported = _SUPPORTED.get(of[1], _SUPPORTED["content"])
        return InvalidRequest(f"{field}{named} {supported}", field)
    if reason.startswith(("Expected `null`", "Expected `array` of length <= 0")):
        return InvalidRequest(f"{field} is not supported: leave it out", field)
    return InvalidRequest(f"{field}: {reason[:1].lower()}{reason[1:]}", field)


def why_not_json(error: Exception, text: bytes) -> str:
    """What is wrong with a text for which msgspec has this error, which may mislead."""
    if half := _HALF_PAIR.match(text):
        return f"{half[1].decode()} is half of a surrogate pair: cut text between characters"
    return str(error)
