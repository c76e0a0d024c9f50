"""A configuration file's keys, read with checks: every error names file, key, value and remedy.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from baton.errors import CheckpointError, quoted

MAX_SIZE = 1 << 24  # of anything counted; the largest in use are contexts and vocabularies


class Check(NamedTuple):
    """What a value may be: in code, and in words."""

    holds: Callable[[Any], bool]
    supported: str


def whole(least: int, most: int) -> Check:
    """A whole number within."""
    return Check(
        lambda value: type(value) is int and least <= value <= most,
        f"a whole number from {least} to {most}",
    )


def one_of(*values: object) -> Check:
    """One of these."""
    return Check(lambda value: value in values, ", ".join(map(str, values)))


COUNT = whole(1, MAX_SIZE)
NUMBER = Check(
    lambda value: type(value) in (int, float) and 0 < value <= 1e30, "a number above 0, up to 1e30"
)
NOT_NEGATIVE = Check(
    lambda value: type(value) in (int, float) and 0 <= value <= 1e30, "a number from 0 to 1e30"
)
NUMBERS = Check(
    lambda value: isinstance(value, list) and all(type(item) is int for item in value),
    "a list of whole numbers",
)
BOOLEAN = Check(lambda value: isinstance(value, bool), "true or false")
OBJECT = Check(lambda value: isinstance(value, dict), "an object")


class Fields(NamedTuple):
    """A config file's keys, read with checks; every error names file, key and value."""

    file: Path
    values: dict[str, Any]
    prefix: str = ""  # of the keys of an object inside
    remedy: str = ""  # behind what is supported

    def error(self, key: str, value: object, supported: str) -> CheckpointError:
        """What is wrong with a key's value."""
        found = f"{self.prefix}{key} is {quoted(value)}"
        return CheckpointError(f"{self.file}: {found}; supported: {supported}{self.remedy}")

    def read(self, key: str, check: Check, default: object = None) -> Any:
        """The value; the default where the key is absent or null, which mean the same."""
        value = self.values.get(key)
        value = default if value is None else value
        if not check.holds(value):
            raise self.error(key, value, check.supported)
        return value

    def inside(self, key: str, remedy: str = "") -> Fields:
        """The object that a key has; an empty one where it is absent."""
        values = self.read(key, OBJECT, {})
        return Fields(self.file, values, f"{self.prefix}{key}.", remedy or self.remedy)
