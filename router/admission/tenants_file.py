"""The tenants file: fields, checks and keys. Errors never show a value, as it may be a key."""

from __future__ import annotations

import hashlib
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.config.watched_files import WatchedFiles
from baton.errors import ConfigError
from baton.generation.enum_names import PRIORITIES

DEFAULT_TENANT = "default"  # of callers without a key


@dataclass(frozen=True)
class TenantConfig:
    """A tenant's entry; the defaults set no limits."""

    name: str
    weight: float = 1.0
    priority: str = "normal"
    requests_per_minute: float = math.inf
    tokens_per_minute: float = math.inf
    burst_seconds: float = 60.0
    max_prompt_tokens: int = 0  # 0: the router's limit
    max_running: float = math.inf
    key_digests: tuple[bytes, ...] = field(default=(), repr=False)  # SHA-256
    keyless: bool = False  # serves callers without a key


_Rule = tuple[str, Callable[[Any], bool]]  # what a field must be, and the check
_ABOVE_0: _Rule = (
    "a number above 0",
    lambda value: type(value) in (int, float) and 0 < value < math.inf,
)
_COUNT: _Rule = ("a whole number above 0", lambda value: type(value) is int and value > 0)
_TEXTS: _Rule = (
    "a list of texts",
    lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
)
_PRIORITY: _Rule = (
    f"one of {', '.join(PRIORITIES)}",
    lambda value: isinstance(value, str) and value in PRIORITIES,
)
_TABLE: _Rule = ("a table", lambda value: isinstance(value, dict))
_FILE = {"tenants": _TABLE, "default": _TABLE, "admin": _TABLE}
_KEYS = {"keys": _TEXTS, "key_files": _TEXTS}
_LIMITS = {
    "weight": _ABOVE_0, "priority": _PRIORITY, "requests_per_minute": _ABOVE_0,
    "tokens_per_minute": _ABOVE_0, "burst_seconds": _ABOVE_0, "max_prompt_tokens": _COUNT,
    "max_running": _COUNT,
}  # fmt: skip
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")


@dataclass(frozen=True)
class TenantsContent:
    """The tenants of a file, and the SHA-256 digests of its operators' keys."""

    tenants: Sequence[TenantConfig]
    admin_digests: Sequence[bytes] = ()


class TenantsFile:
    """The file, and the key files that it names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._watched = WatchedFiles()

    def read_changed(self) -> TenantsContent | None:
        """Returns the content if a file has changed. Raises ConfigError, once for each change."""
        return self.read() if self._watched.changed else None

    def read(self) -> TenantsContent:
        """Raises ConfigError naming file, tenant and field."""
        self._watched, path = WatchedFiles(), self.path
        try:
            content = tomllib.loads(self._watched.read(path).decode())
        except OSError as error:
            raise ConfigError(f"tenants file {path} cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"tenants file {path} is not TOML: {error}") from error
        try:
            return self._parsed(content)
        except ConfigError as error:
            raise ConfigError(f"tenants file {path}: {error}") from None

    def _parsed(self, content: dict[str, Any]) -> TenantsContent:
        _check(content, "the file", _FILE)
        tables = content.get("tenants", {})
        _check(tables, "tenants", dict.fromkeys(tables, _TABLE))
        configs = [self._tenant(name, table) for name, table in tables.items()]
        if "default" in content:
            if DEFAULT_TENANT in tables:
                raise ConfigError("give [default] or [tenants.default], not both")
            configs.append(_limited("[default]", content["default"], DEFAULT_TENANT, keyless=True))
        if not configs:
            raise ConfigError("there is no tenant: give [tenants.NAME] or [default]")
        owners: dict[bytes, str] = {}
        for config in configs:
            for digest in config.key_digests:
                if (other := owners.setdefault(digest, config.name)) != config.name:
                    raise ConfigError(
                        f"keys of [tenants.{other}] and [tenants.{config.name}] must differ"
                    )
        admins: tuple[bytes, ...] = ()
        if "admin" in content:
            _check(content["admin"], "[admin]", _KEYS)
            admins = self._keys(content["admin"], "[admin]")
        return TenantsContent(configs, admins)

    def _tenant(self, name: str, table: dict[str, Any]) -> TenantConfig:
        where = f"[tenants.{name}]"
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"the name of {where} must be letters, digits and . _ -, no sign first"
            )
        _check(table, where, {**_KEYS, **_LIMITS})
        return _limited(where, table, name, key_digests=self._keys(table, where))

    def _keys(self, table: dict[str, Any], where: str) -> tuple[bytes, ...]:
        """Removes the keys from a table and returns their digests."""
        digests = list(key_digests(table.pop("keys", ()), f"keys of {where}"))
        for file in table.pop("key_files", ()):
            try:
                key = self._watched.read(self.path.parent / Path(file).expanduser()).strip()
            except (OSError, ValueError, RuntimeError) as error:
                why = getattr(error, "strerror", error)
                raise ConfigError(
                    f"key_files of {where} must be readable: {file}: {why}"
                ) from error
            if not key or b"\n" in key:
                raise ConfigError(
                    f"key_files of {where} must have one key each; {file} has none or several"
                )
            digests.append(hashlib.sha256(key).digest())
        if not digests:
            raise ConfigError(f"keys of {where} must be given, or key_files")
        return tuple(digests)


def key_digests(keys: Iterable[str], where: str) -> tuple[bytes, ...]:
    """The digests in "sha256:DIGEST" texts. Raises ConfigError naming `where`."""
    matches = [_DIGEST.fullmatch(key) for key in keys]
    if not all(matches):
        raise ConfigError(f'{where} must be "sha256:" and 64 hexadecimal digits each')
    return tuple(bytes.fromhex(match[1]) for match in matches if match)


def _check(table: Mapping[str, Any], where: str, rules: Mapping[str, _Rule]) -> None:
    for name, value in table.items():
        if name not in rules:
            raise ConfigError(f"{where} has an unknown field {name!r}")
        wanted, is_valid = rules[name]
        if not is_valid(value):
            raise ConfigError(f"{name} of {where} must be {wanted}")


def _limited(where: str, table: Mapping[str, Any], name: str, **more: Any) -> TenantConfig:
    _check(table, where, _LIMITS)
    config = TenantConfig(name, **table, **more)
    for rate in ("requests_per_minute", "tokens_per_minute"):
        if getattr(config, rate) * config.burst_seconds < 60:  # not one would ever fit
            raise ConfigError(f"{rate} of {where} must let burst_seconds bring at least one")
    return config
