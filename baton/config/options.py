"""Declares options: a dataclass field has its flag, help and allowed values.

    max_batch: int = option(64, "--max-batch SEQUENCES", "in one engine step", least=1)

declares the flag `--max-batch`, the environment variable `BATON_OPT_MAX_BATCH`, the key `max-batch`
of a configuration file, a check when the dataclass is constructed, and a line of
docs/reference/cli.md. Child processes get their settings as one JSON object with the same keys.

`baton.cli.options` adds options to argparse parsers.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from baton.errors import ConfigError

PREFIX = "BATON_OPT_"
MAX_PORT = 65535
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "MB": 10**6, "GB": 10**9}
_SWITCH = {"true": True, "yes": True, "on": True, "1": True}
_SWITCH |= {"false": False, "no": False, "off": False, "0": False}

C = TypeVar("C")
Values = dict[str, Any]


@dataclass(frozen=True)
class Option:
    """Declaration of a field of a settings dataclass."""

    flag: str  # --name
    metavar: str  # form of the value, in helps
    help: str
    parse: Callable[[str], Any]  # raises ConfigError or ValueError
    default: Any
    field: str = ""
    group: str = ""  # heading in the help; default: GROUP of the declaring class
    choices: tuple[str, ...] = ()
    least: float = 0  # a number's bounds
    most: float = math.inf
    hint: str = ""  # added to the error for a value out of bounds
    many: bool = False  # may be repeated: the field is a tuple
    sets: str = ""  # another field that gets the value; this one becomes True

    @property
    def key(self) -> str:
        return self.flag.removeprefix("--")

    @property
    def is_switch(self) -> bool:
        """Whether it has no value: --name or --no-name."""
        return self.parse is switch

    def read(self, text: str) -> Any:
        """Parses and checks a value; raises ConfigError."""
        try:
            value = self.parse(text)
        except ValueError:
            raise ConfigError(f"invalid {self.parse.__name__} value: {text!r}") from None
        self.check(value)
        return value

    def check(self, value: Any) -> None:
        """Raises ConfigError, with flag and field, for a value that is not allowed."""
        if isinstance(value, str):
            self.parse(value)
        if self.choices and value not in self.choices:
            must = f"one of {', '.join(self.choices)}"
        elif not isinstance(value, int | float) or (
            self.least <= value <= self.most and value != math.inf
        ):
            return
        elif self.most == math.inf:
            must = "finite" if value == math.inf else f"at least {self.least}"
        else:
            must = f"between {self.least} and {self.most}"
        renamed = self.key != self.field.replace("_", "-")
        field = f" (field {self.field})" if renamed else ""
        hint = f": {self.hint}" if self.hint else ""
        raise ConfigError(f"{self.flag} must be {must}, not {value!r}{field}{hint}")


def option(
    default: Any, usage: str, help: str, parse: Callable[[str], Any] | None = None, **more: Any
) -> Any:
    """Declares a field. `usage`: "--flag METAVAR", or "--flag" for a switch or choice.

    Without `parse`, the value's type follows from the metavar, else from the default.
    """
    flag, _, metavar = usage.partition(" ")
    parsers: dict[Any, Any] = {"FILE": Path, "SIZE": size, "PORT": int, bool: switch}
    by_type = type(default) if isinstance(default, int | float) else str
    parse = parse or parsers.get(metavar) or parsers.get(by_type, by_type)
    if metavar == "PORT":
        more["most"] = MAX_PORT
    declared = Option(flag, metavar, help, parse, default, **more)
    return dataclasses.field(default=default, metadata={"option": declared})


def part(cls: type[Any], without: Collection[str] = ()) -> Any:
    """Declares a nested settings dataclass; its fields in `without` have no options here."""
    metadata = {"part": cls, "without": frozenset(without)}
    return dataclasses.field(default_factory=cls, metadata=metadata)


def declared(cls: type[Any], without: Collection[str] = ()) -> dict[str, Option]:
    """The options of a settings dataclass and its parts, by key."""
    found: dict[str, Option] = {}
    for field in dataclasses.fields(cls):
        if "part" in field.metadata:
            found |= declared(field.metadata["part"], field.metadata["without"])
    return found | {one.key: one for one in _own(cls) if one.field not in without}


def check(settings: Any) -> None:
    """Raises ConfigError if a field is out of bounds; parts check themselves.

    Defaults may be out of bounds: 0 can mean "not given".
    """
    for one in _own(type(settings)):
        if (value := getattr(settings, one.field)) != one.default:
            one.check(value)


def build(cls: type[C], values: Mapping[str, Any], **given: Any) -> C:
    """Constructs the dataclass from values by key and `given` fields. Raises ConfigError."""
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if "part" in field.metadata:
            inner = declared(field.metadata["part"], field.metadata["without"])
            mine = {key: value for key, value in values.items() if key in inner}
            given.setdefault(field.name, build(field.metadata["part"], mine))
    own = {one.field: one for one in _own(cls)}
    for one in own.values():
        if one.key in values and one.sets:
            target, value = own[one.sets], values[one.key]
            if target.key in values:
                raise ConfigError(f"{target.flag} and {one.flag} do not go together")
            given |= {one.sets: (value,) if target.many else value, one.field: True}
        elif one.key in values:
            given[one.field] = values[one.key]
    return cls(**given)


def values(settings: Any) -> Values:
    """Values that differ from the defaults, by key."""
    found: Values = {}
    for field in dataclasses.fields(settings):
        if "part" in field.metadata:
            found |= values(getattr(settings, field.name))
    own = {one.field: one for one in _own(type(settings))}
    for one in own.values():
        value = getattr(settings, one.field)
        if value != one.default:
            found[one.key] = str(value) if isinstance(value, Path) else value
            if one.sets:
                target, value = own[one.sets], getattr(settings, one.sets)
                found.pop(target.key, None)
                found[one.key] = value[0] if target.many else value
    return found


def to_json(settings: Any) -> str:
    """Values that differ from the defaults, as JSON that `read` accepts."""
    return json.dumps(values(settings))


def read(
    options: Mapping[str, Option], known: Collection[str], environ: Mapping[str, str], config: str
) -> Values:
    """Values of `options` from the environment and, with lower precedence, from `--config`.

    `config` is a TOML file, or JSON of `to_json`, which replaces both. Other `known` options and
    empty variables are ignored. Raises ConfigError; for an unknown name with the nearest known one.
    """
    try:
        if config.startswith("{"):
            return _typed(options, json.loads(config), options, "--config: there is no option")
        content = tomllib.loads(Path(config).read_text()) if config else {}
    except json.JSONDecodeError as error:
        raise ConfigError(f"--config is no JSON object: {error}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {config} cannot be read: {error}") from error
    variables = {
        name.removeprefix(PREFIX).lower().replace("_", "-"): text
        for name, text in environ.items()
        if name.startswith(PREFIX) and text
    }
    found = _typed(options, content, known, f"{config}: there is no option")
    return found | _typed(options, variables, known, f"environment: {PREFIX}… names no option")


def _typed(
    options: Mapping[str, Option], raw: Mapping[str, Any], known: Collection[str], unknown: str
) -> Values:
    """Converts texts, numbers and lists to the fields' types."""
    found: Values = {}
    for key, value in raw.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"; do you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{unknown} {key!r}{hint}")
        if not (one := options.get(key)):
            continue
        try:
            if one.many:
                texts = value.split(";") if isinstance(value, str) else value
                found[key] = tuple(map(one.read, texts))
            else:
                text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
                found[key] = one.read(text)
        except (ConfigError, TypeError) as error:
            raise ConfigError(f"{unknown.partition(':')[0]}: {key}: {error}") from error
    return found


def switch(text: str) -> bool:
    """Parses "true" or "false" (yes, no, on, off, 1, 0)."""
    if (value := _SWITCH.get(text.lower())) is None:
        raise ConfigError(f"{text!r} is neither true nor false")
    return value


def size(text: str) -> int:
    """Parses a size in bytes: "512MiB", "2GB" (powers of 1,000) or "1048576"."""
    match = re.fullmatch(rf"(\d+)\s*({'|'.join(_UNITS)})", text)
    if not match:
        raise ConfigError(f"{text!r} is no size: write 512MiB, 2GB or bytes")
    return int(match[1]) * _UNITS[match[2]]


def split_address(address: str, flag: str = "address") -> tuple[str, int]:
    """(host, port) of "host:port"; raises ConfigError naming the flag."""
    host, _, port = address.rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > MAX_PORT:
        raise ConfigError(f"{flag} must be HOST:PORT, not {address!r}")
    if ":" in host and not re.fullmatch(r"\[[^][]+]", host):
        raise ConfigError(
            f"{flag} needs brackets around an IPv6 address: [::1]:80, not {address!r}"
        )
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """ "host:port"; an IPv6 address is put in brackets, if it has none."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def numbers(text: str) -> tuple[int, ...]:
    """Parses whole numbers: "1,2,3"."""
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        raise ConfigError(f"{text!r} is no list of numbers: write 1,2,3")
    return tuple(int(number) for number in text.split(","))


_OWN: dict[type[Any], tuple[Option, ...]] = {}  # collected once, for every command's parser


def _own(cls: type[Any]) -> tuple[Option, ...]:
    """The options that a settings class itself declares."""
    if cls not in _OWN:
        found = []
        for field in dataclasses.fields(cls):
            if one := field.metadata.get("option"):
                owner: Any = next(base for base in cls.__mro__ if field.name in vars(base))
                found.append(replace(one, field=field.name, group=one.group or owner.GROUP))
        _OWN[cls] = tuple(found)
    return _OWN[cls]
