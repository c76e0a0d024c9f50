"""What the JSON schemas of tools say about the types of arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STRING = frozenset({"string"})
_MAX_DEPTH = 16  # of references and combinations in a schema
_MAX_VISITS = 1024  # of parts of a schema; a few values of an enumeration count as one
_VALUES_A_VISIT = 4
_ANY = frozenset[str]()  # where a schema does not say


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The types that a schema names, also by references within `root`; empty if it names none.

    Also empty where a keyword is not of its own type, or the schema has very many parts.
    """
    return _Walk(root).types_of(schema, 0)


class _Walk:
    """A walk through a schema; a reference may be met any number of times, so visits count."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._left = _MAX_VISITS

    def types_of(self, schema: Any, depth: int) -> frozenset[str]:
        self._left -= 1
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or self._left < 0:
            return _ANY
        if types := schema.get("type"):
            return frozenset([types] if isinstance(types, str) else filter(_is_str, _list(types)))
        if isinstance(reference := schema.get("$ref"), str):
            return self.types_of(_resolved(reference, self._root), depth + 1)
        if values := _values(schema):
            self._left -= len(values) // _VALUES_A_VISIT
            return frozenset(map(type_of, values)) if self._left >= 0 else _ANY
        if "properties" in schema:
            return frozenset({"object"})
        return self._combined(schema, depth)

    def _combined(self, schema: Mapping[str, Any], depth: int) -> frozenset[str]:
        found = set[str]()
        for keyword in ("anyOf", "oneOf", "allOf"):
            for one in _list(schema.get(keyword)):
                if not (types := self.types_of(one, depth + 1)):
                    return _ANY
                found |= types
        return frozenset(found)


def is_text(schema: Any, root: Mapping[str, Any]) -> bool:
    """Whether values of a schema are texts alone."""
    return types_of(schema, root) == STRING


def _is_str(value: object) -> bool:
    return isinstance(value, str)


def type_of(value: object) -> str:
    """The JSON type of a value."""
    names = ((bool, "boolean"), (str, "string"), (int, "integer"), (float, "number"),
             (list, "array"), (dict, "object"))  # fmt: skip
    return next((name for kind, name in names if isinstance(value, kind)), "null")


def _resolved(reference: str, root: Mapping[str, Any]) -> Any:
    value: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schemas of the parameters; none if `properties` is not an object."""
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def required_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """The names of required parameters; none if `required` is not a list."""
    return frozenset(filter(_is_str, _list(schema.get("required"))))


def texts_of(schema: Any) -> list[str]:
    """The texts of an enumeration; none if there is none."""
    return [one for one in _values(schema) if _is_str(one)] if isinstance(schema, Mapping) else []


def _values(schema: Mapping[str, Any]) -> list[Any]:
    """The values of an enumeration or a constant; none if there is neither."""
    return _list(schema.get("enum", [schema["const"]] if "const" in schema else []))


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def with_definitions(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a schema with the definitions that it may refer to."""
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**shared, **(schema if isinstance(schema, Mapping) else {})}
