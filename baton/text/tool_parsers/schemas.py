"""What the JSON schemas of tools say about the types of arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STRING = frozenset({"string"})
_MAX_DEPTH = 16  # of references and combinations in a schema
_ANY = frozenset[str]()  # where a schema does not say


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The types that a schema names, also by references within `root`; empty if it names none."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return _ANY
    if types := schema.get("type"):
        return frozenset([types] if isinstance(types, str) else filter(_is_str, types))
    if isinstance(reference := schema.get("$ref"), str):
        return types_of(_resolved(reference, root), root, depth + 1)
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if isinstance(values, list) and values:
        return frozenset(type_of(value) for value in values)
    if "properties" in schema:
        return frozenset({"object"})
    found = [
        types_of(one, root, depth + 1)
        for keyword in ("anyOf", "oneOf", "allOf")
        for one in schema.get(keyword, ())
    ]
    return frozenset().union(*found) if all(found) else _ANY


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


def property_of(schema: Mapping[str, Any], key: str) -> Any:
    """The schema of a parameter; None if there is none."""
    properties = schema.get("properties")
    return properties.get(key) if isinstance(properties, Mapping) else None


def texts_of(schema: Any) -> list[str]:
    """The texts of an enumeration; none if there is none."""
    if not isinstance(schema, Mapping):
        return []
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return [value for value in values if isinstance(value, str)]


def with_definitions(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a schema with the definitions that it may refer to."""
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**shared, **(schema if isinstance(schema, Mapping) else {})}
