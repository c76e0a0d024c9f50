"""Checks JSON values against the part of JSON Schema that the API's description is written in.

The same dictionaries are published in /openapi.json, so what is checked is what is documented. An
error names the field: "messages[0].role must be a string". Token ids are checked by C loops: a body
may have a hundred thousand.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from baton.errors import InvalidRequest

Schema = Mapping[str, Any]

# Only the values in "enum", which mean "without it", are taken; a text says what is not supported.
UNSUPPORTED = "x-unsupported"

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_WORDS = {
    "array": "an array",
    "boolean": "true or false",
    "integer": "an integer",
    "null": "null",
    "object": "an object",
}

# Parsing holds the interpreter lock, so a body's parts are counted before: all that is accepted
# parses in less than 100 ms. A request of plain token ids needs a comma for each.
_MAX_COMMAS = 1 << 18
_MAX_MEMBERS = 1 << 15
_MAX_ESCAPES = 1 << 20


def check_size(text: bytes, max_context: int) -> None:
    """Raises InvalidRequest for JSON of more values than any request to the model needs."""
    if text.count(b"\\") > _MAX_ESCAPES:
        raise InvalidRequest(
            f"the body has more than {_MAX_ESCAPES} backslash escapes: send plain UTF-8"
        )
    max_commas = max(_MAX_COMMAS, max_context + _MAX_MEMBERS)
    if _counts_fit(text, max_commas):
        return
    # Only what is outside of strings counts; where there are too many strings, the rest counts too.
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    if not _counts_fit(b"".join(plain.split(b'"', 2 * max_commas)[::2]), max_commas):
        raise InvalidRequest(
            f"the body has more than {max_commas} values or {_MAX_MEMBERS} members, arrays and "
            "objects"
        )


def _counts_fit(text: bytes, max_commas: int) -> bool:
    return text.count(b",") <= max_commas and sum(map(text.count, (b":", b"[", b"{"))) <= (
        _MAX_MEMBERS
    )


def check(value: Any, schema: Schema, where: str) -> None:
    """Raises InvalidRequest naming the part of `value` that does not fit."""
    if "anyOf" in schema:
        schema = _alternative(value, schema, where)
    if "enum" in schema and not any(_same(value, allowed) for allowed in schema["enum"]):
        if why := schema.get(UNSUPPORTED):
            what = why if isinstance(why, str) else "is not supported here: leave it out"
            raise InvalidRequest(f"{where} {what}", where)
        raise _wrong(where, f"one of {', '.join(map(repr, schema['enum']))}")
    types = schema.get("type", ())
    types = (types,) if isinstance(types, str) else types
    if types and not any(_is(value, name) for name in types):
        raise _wrong(where, _expected(schema))
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        _check_number(value, schema, where)
    elif isinstance(value, str):
        _check_string(value, schema, where)
    elif isinstance(value, list):
        _check_array(value, schema, where)
    elif isinstance(value, dict):
        check_object(value, schema, where)


def check_object(value: Mapping[str, Any], schema: Schema, where: str = "") -> None:
    """As `check`, for an object; members it does not know are left alone."""
    inside = f"{where}." if where else ""
    properties = schema.get("properties", {})
    others = schema.get("additionalProperties")
    names = schema.get("propertyNames")
    if len(value) > schema.get("maxProperties", len(value)):
        raise _wrong(where, f"an object of at most {schema['maxProperties']} members")
    for name, member in value.items():
        if names is not None:
            _check_name(name, names, where)
        expected = properties.get(name, others)
        if expected is not None:
            check(member, expected, inside + name)
    for name in schema.get("required", ()):
        if name not in value:
            raise InvalidRequest(f"{inside}{name} is missing", inside + name)


def _alternative(value: Any, schema: Schema, where: str) -> Schema:
    """The one of "anyOf" that `value` is meant as, going by its type and its first item's."""
    for alternative in schema["anyOf"]:
        if not _is(value, alternative["type"]):
            continue
        items = alternative.get("items")
        if not (items and value) or _is(value[0], items["type"]):
            found: Schema = alternative
            return found
    raise _wrong(where, _expected(schema))


def _check_number(value: float, schema: Schema, where: str) -> None:
    if "minimum" in schema and value < schema["minimum"]:
        raise _wrong(where, f"at least {schema['minimum']}")
    if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
        raise _wrong(where, f"above {schema['exclusiveMinimum']}")
    if "maximum" in schema and value > schema["maximum"]:
        raise _wrong(where, f"at most {schema['maximum']}")


def _check_string(value: str, schema: Schema, where: str) -> None:
    if len(value) < schema.get("minLength", 0):
        raise _wrong(where, "a string that is not empty")
    if "maxLength" in schema and len(value) > schema["maxLength"]:
        raise _wrong(where, f"a string of at most {schema['maxLength']} characters")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"{where} is not Unicode text: {error.reason}", where) from error


def _check_array(value: list[Any], schema: Schema, where: str) -> None:
    if len(value) < schema.get("minItems", 0):
        raise _wrong(where, "an array that is not empty")
    if "maxItems" in schema and len(value) > schema["maxItems"]:
        raise _wrong(where, f"an array of at most {schema['maxItems']} items")
    items = schema.get("items")
    if items is None:
        return
    for number in _suspects(value, items):
        check(value[number], items, f"{where}[{number}]")


def _suspects(value: list[Any], items: Schema) -> Iterable[int]:
    """Items to check: all, but of token ids, of which there may be thousands, the first bad one."""
    if items.get("type") != "integer":
        return range(len(value))
    low, high = items["minimum"], items["maximum"]
    if set(map(type, value)) == {int} and low <= min(value) and max(value) <= high:
        return ()
    bad = (n for n, item in enumerate(value) if type(item) is not int or not low <= item <= high)
    return itertools.islice(bad, 1)


def _check_name(name: str, schema: Schema, where: str) -> None:
    most = schema.get("maxLength", len(name))
    if schema.get("pattern") == DIGITS and not (name.isascii() and name.isdigit()):
        raise InvalidRequest(f"{where} must have token ids as names, not {name[:20]!r}", where)
    if len(name) > most:
        raise InvalidRequest(f"{where} has a name that is too long", where)


DIGITS = "^[0-9]+$"


def _is(value: Any, name: str | list[str]) -> bool:
    if not isinstance(name, str):
        return any(_is(value, one) for one in name)
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _TYPES.get(name, ()))


def _same(value: Any, allowed: Any) -> bool:
    """Equal as JSON has it: true is not 1."""
    return isinstance(value, bool) is isinstance(allowed, bool) and bool(value == allowed)


def _wrong(where: str, expected: str) -> InvalidRequest:
    return InvalidRequest(f"{where} must be {expected}", where)


def _expected(schema: Schema) -> str:
    """What a value may be, in words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_expected(one) for one in schema["anyOf"]))
    types = schema.get("type", "something else")
    types = [types] if isinstance(types, str) else [name for name in types if name != "null"]
    if types == ["array"] and "items" in schema:
        return f"an array of {_items(schema['items'])}"
    return " or ".join(_WORDS.get(name, f"a {name}") for name in types)


def _items(schema: Schema) -> str:
    kind = schema.get("type", "other")
    return f"{kind}s" if isinstance(kind, str) else "values"
