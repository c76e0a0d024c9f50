"""Rewrites or refuses the parts of JSON schemas that llguidance 1.9 would not enforce. Torch-free.

llguidance computes with float64 numbers, writes integers of 64 bits, and starts values that cannot
be completed: references without a finite instance, and properties when no name is left.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from fractions import Fraction
from itertools import chain
from typing import Any, TypeGuard
from urllib.parse import unquote

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from baton.errors import InvalidRequest, quoted

# They bound compilation to a third of a second and a mask to 10 ms (vocabulary of 128,000, EPYC),
# and allow a thousand properties or choices of five thousand texts.
LIMITS = LLParserLimits(
    max_items_in_row=1000,
    initial_lexer_fuel=50_000,
    step_lexer_fuel=100_000,
    step_max_items=5000,
    max_lexer_states=10_000,
    max_grammar_size=30_000,
    verbose_errors=False,
)
# White space between tokens, as in llama.cpp: a model that writes only spaces would never end.
# No \u: a property's name written with it would match as an additional property. So schemas that
# need control characters are refused.
JSON_OPTIONS: Any = {
    "whitespace_pattern": r" |\n[ \t]{0,20}",
    "json_allowed_escapes": 'nrbtf\\"',
}
_CONTROLS = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_CONTROLS_IN_PATTERN = re.compile(  # outside of a class with other characters
    r"\[(?:\^|[^]]*-)[^]]*\]|(\\(?:x[01{]|x7f|u\{|u00[01]|u007f|U|c|0)|[\x00-\x07\x0b\x0e-\x1f\x7f])",
    re.IGNORECASE,
)
_NO_CONTROLS = "there can be no control characters but \\b, \\f, \\n, \\r and \\t"
# Keywords with schemas by name, with a list of schemas, with one, and without schemas.
_NAMED = ("$defs", "definitions", "properties", "patternProperties")
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalItems", "additionalProperties", "not", "contains")
_VALUES = ("const", "enum")
_NO_SCHEMAS = ("default", "example", "examples", "required", "type")
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
# float64 has all integers up to the first; above the last, llguidance's arithmetic overflows.
_EXACT, _MAX_INT64, _LARGEST = 1 << 53, (1 << 63) - 1, (1 << 63) - 1024
_LONGEST = 10**18  # larger numbers need both bounds
_INEXACT = "as a float64 it is another number: give one with fewer digits"
_MAX_NAMES = 1024  # patterns times names of properties
_MAX_PATTERNS = 32  # of a schema; each, and all of an object in combination, are compiled


def prepare_schema(schema: dict[str, Any], name: str = "json_schema", field: str = "") -> None:
    """Rewrites a schema in place to one that llguidance enforces.

    Bounds beyond 64 bits are clamped; schemas without a finite instance become `false`. `name`: of
    the schema in messages. Raises InvalidRequest with the place.
    """
    if "x-guidance" in schema:
        raise InvalidRequest(f"{name} at /x-guidance: it is not taken here: leave it out", field)
    for place, part, _ in _walk(schema):
        if _CONTROLS.search(part if isinstance(part, str) else place):
            raise InvalidRequest(f"{name} at {quoted(place)}: {_NO_CONTROLS}", field)
    num_patterns = 0
    for place, part in _schemas(schema).items():
        if isinstance(part, dict):
            for keyword, why in _refused_keywords(part):
                raise InvalidRequest(f"{name} at {place}/{keyword}: {why}", field)
            num_patterns += len(_object(part, "patternProperties"))
            if num_patterns > _MAX_PATTERNS:
                why = f"a schema has {_MAX_PATTERNS} of these at most"
                raise InvalidRequest(f"{name} at {place}/patternProperties: {why}", field)
            _drop_unnamed(part)
    _drop_empty(schema, name, field)


def parts(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The direct subschemas of a schema, by their places."""
    for keyword in _NAMED:
        if isinstance(named := schema.get(keyword), dict):
            yield from ((f"{keyword}/{_escaped(name)}", one) for name, one in named.items())
    for keyword in _LISTED:
        if isinstance(listed := schema.get(keyword), list):
            yield from ((f"{keyword}/{at}", one) for at, one in enumerate(listed))
    yield from ((keyword, schema[keyword]) for keyword in _SINGLE if keyword in schema)


def _schemas(root: dict[str, Any]) -> dict[str, Any]:
    """The root and all possible subschemas, by their places.

    Values of unknown keywords are included, because references may point anywhere.
    """
    return {
        place: part
        for place, part, kind in _walk(root)
        if kind == "schema" and isinstance(part, (dict, bool))
    }


def _walk(root: Any) -> Iterator[tuple[str, Any, str]]:
    """All values in a schema, with place and kind: a schema, schemas by name, or neither."""
    left: list[tuple[str, Any, str]] = [("", root, "schema")]
    while left:
        place, part, kind = left.pop()
        yield place, part, kind
        if isinstance(part, list):
            left += ((f"{place}/{at}", one, kind) for at, one in enumerate(part))
        elif isinstance(part, dict):
            for key, one in part.items():
                inside = "schema" if kind == "names" else kind
                if kind == "schema" and key in (*_VALUES, *_NO_SCHEMAS):
                    inside = "value"
                elif kind == "schema" and key in _NAMED:
                    inside = "names"
                left.append((f"{place}/{_escaped(key)}", one, inside))


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _refused_keywords(schema: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Keywords that are refused, with reasons; also rewrites bounds."""
    # A name outside `properties` may be written twice but is one property, so only one
    # property that is not required is certain.
    least, most = schema.get("minProperties"), 1 + len(_required(schema))
    if isinstance(least, int) and least > most:
        yield "minProperties", f"{most} at most, one more than `required` has"
    yield from _bounds_refused_keywords(schema)
    for keyword in _VALUES:
        if not all(map(_is_exact, _numbers(schema.get(keyword)))):
            yield keyword, _INEXACT
    patterns = list(_object(schema, "patternProperties"))
    for pattern in (schema.get("pattern"), *patterns):
        found = _CONTROLS_IN_PATTERN.finditer(pattern) if isinstance(pattern, str) else ()
        if any(match[1] for match in found):
            yield "pattern" if pattern not in patterns else "patternProperties", _NO_CONTROLS
    if len(patterns) * (1 + len({*_object(schema, "properties"), *_required(schema)})) > _MAX_NAMES:
        yield "patternProperties", f"times the properties they are {_MAX_NAMES} at most"


def _bounds_refused_keywords(schema: dict[str, Any]) -> Iterator[tuple[str, str]]:
    lower, upper = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
    top = _MAX_INT64 if schema.get("type") == "integer" else _LARGEST
    for (inclusive, exclusive), sign in ((lower, 1), (upper, -1)):
        for keyword in (inclusive, exclusive):
            bound = _number(schema, keyword)
            if bound * sign > _LARGEST:
                yield keyword, "numbers have 64 bits at most: nothing matches it"
            elif bound * sign < -_LARGEST:
                del schema[keyword]
                limit = -_LARGEST if sign > 0 else top if bound >= top else _LARGEST
                schema.setdefault(inclusive, limit)
            elif not (math.isnan(bound) or _is_exact(bound)):
                yield keyword, _INEXACT
            elif abs(bound) >= _EXACT and keyword == exclusive:
                yield keyword, f"a bound that is excluded has to be below {_EXACT}"
    # Written without a fraction, the bound itself would be allowed.
    for keyword, others in ((lower[1], upper), (upper[1], lower)):
        bound = _number(schema, keyword)
        for other in (_number(schema, name) for name in others):
            near = abs(other - bound) < 1 and abs(other) > abs(bound)
            if near and bound % 1 == 0 and schema.get("type") != "integer":
                yield keyword, "a whole number needs the other bound to be 1 from it, or more"
    if _number(schema, "minimum") >= _LONGEST and not any(key in schema for key in upper):
        schema["maximum"] = top
    if _number(schema, "maximum") <= -_LONGEST and not any(key in schema for key in lower):
        schema["minimum"] = -_LARGEST


def _number(schema: dict[str, Any], keyword: str) -> float:
    value = schema.get(keyword)
    return value if _is_number(value) else math.nan


def _object(schema: dict[str, Any], keyword: str) -> dict[str, Any]:
    value = schema.get(keyword)
    return value if isinstance(value, dict) else {}


def _required(schema: dict[str, Any]) -> list[str]:
    value = schema.get("required")
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _numbers(value: Any) -> Iterator[float]:
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, (list, dict)):
            left += part if isinstance(part, list) else part.values()
        elif _is_number(part):
            yield part


def _is_exact(value: float) -> bool:
    """Whether llguidance represents this number exactly: it rounds digits and exponent separately,
    and writes integers of 64 bits."""
    if not abs(value) <= _LARGEST:
        return False
    if isinstance(value, int):
        return float(value) == value
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    assert isinstance(exponent, int)
    found = float(int("".join(map(str, digits))))
    while exponent < -308:
        found, exponent = found / 1e308, exponent + 308
    power = float(f"1e{abs(exponent)}")
    return (found * power if exponent > 0 else found / power) == abs(value)


class _Names:
    """Finds whether llguidance has names left for further properties."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>")
    special_token_ids = (256,)

    def __init__(self) -> None:
        self._bytes = LLTokenizer(TokenizerWrapper(self), slices=[])

    def __call__(self, text: bytes) -> list[int]:
        return list(text)

    def any_left(self, names: Iterable[str], patterns: Iterable[str], pattern: str | None) -> bool:
        """Whether there is another name: one that `pattern` matches, or without it, one that no
        pattern matches."""
        matcher = self._matcher(
            properties=dict.fromkeys(names, False),
            patternProperties={one: one == pattern for one in patterns},
            additionalProperties=pattern is None,
        )
        # Patterns that do not compile are refused later, with their place.
        return matcher.is_error() or matcher.try_consume_tokens(list(b'{"')) == 2

    def matching(self, names: Iterable[str], pattern: str) -> list[str]:
        matcher = self._matcher(patternProperties={pattern: True}, additionalProperties=False)
        starts = {name: f"{{{json.dumps(name, ensure_ascii=False)}:".encode() for name in names}
        return [
            name
            for name, start in starts.items()
            if matcher.deep_copy().try_consume_tokens(list(start)) == len(start)
        ]

    def _matcher(self, **schema: Any) -> LLMatcher:
        text = json.dumps({"type": "object", **schema})
        grammar = LLMatcher.grammar_from_json_schema(text, JSON_OPTIONS)
        return LLMatcher(self._bytes, grammar, limits=LIMITS, log_level=0)


_NAMES = _Names()


def _drop_unnamed(schema: dict[str, Any]) -> None:
    """Removes schemas of additional properties for which no name is left."""
    patterns = _object(schema, "patternProperties")
    names = {*_object(schema, "properties"), *_required(schema)}
    for pattern in list(patterns):
        if _NAMES.any_left(names, [pattern], pattern):
            continue
        for name in _NAMES.matching(names, pattern):
            properties = schema.setdefault("properties", {})
            known = properties.get(name, True)
            both = [one for one in (known, patterns[pattern]) if one is not True]
            properties[name] = {"allOf": both} if len(both) > 1 else both[0] if both else True
        del patterns[pattern]
    others = patterns and schema.get("additionalProperties") is not False
    if others and not _NAMES.any_left(names, patterns, None):
        schema["additionalProperties"] = False


class _Horn:
    """Solves Horn clauses, "if all of these, then that", in linear time."""

    def __init__(self) -> None:
        self._count = 0
        self.rules: list[tuple[int, list[int]]] = []

    def new(self) -> int:
        self._count += 1
        return self._count - 1

    def any_of(self, bodies: Iterable[list[int]]) -> int:
        """Adds a statement that holds if all of any one of these do."""
        head = self.new()
        self.rules += ((head, body) for body in bodies)
        return head

    def holds(self) -> list[bool]:
        held, missing = [False] * self._count, [len(set(body)) for _, body in self.rules]
        uses: list[list[int]] = [[] for _ in held]
        for at, (_, body) in enumerate(self.rules):
            for one in set(body):
                uses[one].append(at)
        found = [head for (head, _), count in zip(self.rules, missing, strict=True) if not count]
        while found:
            one = found.pop()
            if held[one]:
                continue
            held[one] = True
            for at in uses[one]:
                missing[at] -= 1
                if not missing[at]:
                    found.append(self.rules[at][0])
        return held


def _drop_empty(root: dict[str, Any], name: str, field: str) -> None:
    """Replaces subschemas without a finite instance by `false`."""
    horn, schemas = _Horn(), _schemas(root)
    at = {place: horn.new() for place in schemas}
    for place, part in schemas.items():
        if (needs := _needs(place, part, at, horn)) is not None:
            horn.rules.append((at[place], needs))
    held = horn.holds()
    if not held[at[""]]:
        place = _empty_place(horn, held, list(schemas))
        raise InvalidRequest(f"{name} at {place or 'its root'}: nothing matches it", field)
    for place, number in at.items():
        if not held[number] and place:
            _put_false(root, place)


def _empty_place(horn: _Horn, held: list[bool], places: list[str]) -> str:
    """The place of the innermost subschema that leaves the root without an instance."""
    bodies: dict[int, list[list[int]]] = {}
    for head, body in horn.rules:
        bodies.setdefault(head, []).append(body)
    number, place, seen = 0, "", set[int]()
    while number not in seen:
        seen.add(number)
        place = places[number] if number < len(places) else place
        rules = bodies.get(number, [])
        if len(rules) != 1:
            break
        number = next(one for one in rules[0] if not held[one])
    return place


def _put_false(root: Any, place: str) -> None:
    *path, last = (key.replace("~1", "/").replace("~0", "~") for key in place.split("/")[1:])
    for key in path:
        if root is False:  # it is inside another one
            return
        root = root[int(key)] if isinstance(root, list) else root[key]
    if isinstance(root, list):
        root[int(last)] = False
    elif root is not False:
        root[last] = False


def _needs(place: str, schema: Any, at: dict[str, int], horn: _Horn) -> list[int] | None:
    """The places that need an instance for this schema to have one; None: it has none.

    Schemas that are not decided by that are assumed to have an instance.
    """
    if not isinstance(schema, dict):
        return [] if schema else None

    def inside(*keys: str | int) -> list[int]:
        found = at.get("/".join((place, *(_escaped(str(key)) for key in keys))))
        return [] if found is None else [found]

    needs = list[int]()
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        target = at.get(unquote(reference[1:]))
        needs += [] if target is None else [target]
    for keyword in _LISTED[:3]:
        if isinstance(listed := schema.get(keyword), list) and listed:
            bodies = [inside(keyword, number) for number in range(len(listed))]
            needs += chain(*bodies) if keyword == "allOf" else [horn.any_of(bodies)]
    types = schema.get("type", _TYPES)
    types = [types] if isinstance(types, str) else types
    if not isinstance(types, (list, tuple)) or any(key in schema for key in _VALUES):
        return needs
    bodies = [body for kind in types if (body := _kind(schema, kind, inside, horn)) is not None]
    if [] not in bodies:
        needs.append(horn.any_of(bodies))
    return needs


def _kind(schema: dict[str, Any], kind: Any, inside: Any, horn: _Horn) -> list[int] | None:
    """`_needs` for instances of one type."""
    if kind in ("integer", "number"):
        return [] if _has_number(schema, whole=kind == "integer") else None
    if kind == "string":
        return None if _number(schema, "minLength") > _number(schema, "maxLength") else []
    if kind == "array":
        return _array_needs(schema, inside)
    return _object_needs(schema, inside, horn) if kind == "object" else []


def _array_needs(schema: dict[str, Any], inside: Any) -> list[int] | None:
    least = _number(schema, "minItems")
    if not least > 0:
        return []
    if least > _number(schema, "maxItems"):
        return None
    prefix = next((key for key in ("prefixItems", "items") if type(schema.get(key)) is list), "")
    others = "additionalItems" if prefix == "items" else "items"
    first = len(schema[prefix]) if prefix else 0
    needs = [one for i in range(min(first, int(least))) for one in inside(prefix, i)]
    return needs + (inside(others) if least > first else [])


def _object_needs(schema: dict[str, Any], inside: Any, horn: _Horn) -> list[int] | None:
    properties, patterns = (_object(schema, key) for key in ("properties", "patternProperties"))
    required = _required(schema)
    needs = list[int]()
    for name in required:
        if name in properties:
            needs += inside("properties", name)
        elif not patterns:
            needs += inside("additionalProperties")
    least, names = _number(schema, "minProperties"), len(set(required))
    if least > _number(schema, "maxProperties") or names > _number(schema, "maxProperties"):
        return None
    if least > names:
        further = [inside("properties", name) for name in properties if name not in required]
        further += [inside("patternProperties", pattern) for pattern in patterns]
        needs.append(horn.any_of([*further, inside("additionalProperties")]))
    return needs


def _has_number(schema: dict[str, Any], whole: bool) -> bool:
    """Whether a multiple of `multipleOf` lies within the bounds."""
    bounds = list[tuple[Fraction, bool] | None]()
    for name, sign in (("Minimum", 1), ("Maximum", -1)):
        keys = ((name.lower(), True), (f"exclusive{name}", False))
        found = [(Fraction(str(schema[key])) * sign, not inclusive) for key, inclusive in keys
                 if _is_number(schema.get(key)) and math.isfinite(schema[key])]  # fmt: skip
        bounds.append(max(found, default=None))
    low, high = bounds
    if low is None or high is None:
        return True
    least, most = low[0], -high[0]
    step = Fraction(str(schema["multipleOf"])) if _number(schema, "multipleOf") > 0 else None
    if whole:
        step = Fraction(step.numerator) if step else Fraction(1)
    if step is None:
        return least < most or (least == most and not (low[1] or high[1]))
    first = math.ceil(least / step) + (low[1] and (least / step).denominator == 1)
    last = math.floor(most / step) - (high[1] and (most / step).denominator == 1)
    return first <= last
