"""Reads the tenants' file; every mistake in it is told with file, tenant and field."""

from __future__ import annotations

import hashlib
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.errors import ConfigError
from baton.v1 import common_pb2

PRIORITIES = {
    "low": common_pb2.PRIORITY_LOW,
    "normal": common_pb2.PRIORITY_NORMAL,
    "high": common_pb2.PRIORITY_HIGH,
}
DEFAULT = "default"  # the tenant of callers without a key
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")


@dataclass(frozen=True)
class Limits:
    """What a tenant may have; the defaults limit nothing."""

    weight: float = 1.0
    priority: common_pb2.Priority = common_pb2.PRIORITY_NORMAL
    requests_per_minute: float = math.inf
    tokens_per_minute: float = math.inf
    burst_s: float = 60.0
    max_prompt_tokens: int = 0  # 0: what the router takes
    max_running: float = math.inf


@dataclass(frozen=True)
class TenantEntry:
    """One tenant as the file has it."""

    name: str
    limits: Limits
    key_digests: tuple[bytes, ...] = field(default=(), repr=False)
    is_default: bool = False  # callers without a key


def read_tenants(path: Path) -> list[TenantEntry]:
    """All tenants of the file. Raises ConfigError."""
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"tenants file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"tenants file {path} is not TOML: {error}") from error
    top = _Table(path, "the file", content)
    tables = top.take("tenants", "tables of their own, as [tenants.NAME]", _table, {})
    default = top.take("default", "a table", _table, None)
    top.finish()
    entries = [_tenant(path, name, table) for name, table in tables.items()]
    if default is not None:
        entries.append(_default(path, default, tables))
    if not entries:
        raise ConfigError(f"tenants file {path} has no tenant: give [tenants.NAME] or [default]")
    _check_keys_differ(path, entries)
    return entries


def _tenant(path: Path, name: str, content: Any) -> TenantEntry:
    if not isinstance(content, dict):
        raise ConfigError(f"tenants file {path}: [tenants.{name}] must be a table")
    table = _Table(path, f"[tenants.{name}]", content)
    if not _NAME.fullmatch(name):
        raise table.error("NAME", "letters, digits and . _ - only, beginning with one of the first")
    digests = [
        *map(table.digest, table.take("keys", "a list of texts", _texts, [])),
        *map(table.file_digest, table.take("key_files", "a list of texts", _texts, [])),
    ]
    if not digests:
        raise table.error("keys", "given, or key_files")
    entry = TenantEntry(name, _limits(table), tuple(digests))
    table.finish()
    return entry


def _default(path: Path, content: Any, tenants: Mapping[str, Any]) -> TenantEntry:
    table = _Table(path, "[default]", content)
    if DEFAULT in tenants:
        raise table.error("NAME", "given once: there is a [tenants.default] too")
    entry = TenantEntry(DEFAULT, _limits(table), is_default=True)
    table.finish()
    return entry


def _limits(table: _Table) -> Limits:
    above, whole = "a number above 0", "a whole number above 0"
    limits = Limits(
        weight=table.take("weight", above, _positive, Limits.weight),
        priority=table.take(
            "priority", f"one of {', '.join(PRIORITIES)}", PRIORITIES.__getitem__, Limits.priority
        ),
        requests_per_minute=table.take(
            "requests_per_minute", above, _positive, Limits.requests_per_minute
        ),
        tokens_per_minute=table.take(
            "tokens_per_minute", above, _positive, Limits.tokens_per_minute
        ),
        burst_s=table.take("burst_seconds", above, _positive, Limits.burst_s),
        max_prompt_tokens=table.take("max_prompt_tokens", whole, _count, Limits.max_prompt_tokens),
        max_running=table.take("max_running", whole, _count, Limits.max_running),
    )
    for field_name in ("requests_per_minute", "tokens_per_minute"):
        if getattr(limits, field_name) * limits.burst_s < 60:  # not even one fits, ever
            raise table.error(field_name, "so much that burst_seconds bring at least one")
    return limits


class _Table:
    """A table of the file, read field by field; knows how to tell what is wrong with it."""

    def __init__(self, path: Path, name: str, content: Mapping[str, Any]) -> None:
        self._path = path
        self._name = name
        self._left = dict(content)

    def take(self, field: str, wanted: str, convert: Callable[[Any], Any], default: Any) -> Any:
        """A field's value; the default where it is missing."""
        if field not in self._left:
            return default
        try:
            return convert(self._left.pop(field))
        except (TypeError, ValueError, KeyError):
            raise self.error(field, wanted) from None  # the value might be a key: it is not told

    def digest(self, key: str) -> bytes:
        """SHA-256 of a key, as `keys` has it."""
        match = _DIGEST.fullmatch(key)
        if not match:
            raise self.error("keys", '"sha256:" and 64 hexadecimal digits each')
        return bytes.fromhex(match[1])

    def file_digest(self, name: str) -> bytes:
        """SHA-256 of the key that a file holds."""
        try:
            key = (self._path.parent / Path(name).expanduser()).read_bytes().strip()
        except OSError as error:
            raise self.error("key_files", f"readable: {name}: {error.strerror}") from error
        if not key or b"\n" in key:
            raise self.error("key_files", f"files with one key each; {name} has another content")
        return hashlib.sha256(key).digest()

    def finish(self) -> None:
        """Raises ConfigError for a field that nobody knows."""
        for field_name in self._left:
            raise ConfigError(
                f"tenants file {self._path}: {self._name} has an unknown field {field_name!r}"
            )

    def error(self, field: str, wanted: str) -> ConfigError:
        """What is wrong with a field."""
        return ConfigError(f"tenants file {self._path}: {field} of {self._name} must be {wanted}")


def _check_keys_differ(path: Path, entries: list[TenantEntry]) -> None:
    owners: dict[bytes, str] = {}
    for entry in entries:
        for digest in entry.key_digests:
            other = owners.setdefault(digest, entry.name)
            if other != entry.name:
                raise ConfigError(
                    f"tenants file {path}: keys of [tenants.{other}] and [tenants.{entry.name}] "
                    "must differ"
                )


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError
    return value


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TypeError
    return value


def _positive(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError
    if not 0 < value < math.inf:
        raise ValueError
    return value


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    return int(_positive(value))
