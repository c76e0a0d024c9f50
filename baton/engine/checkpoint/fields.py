"""Reads the keys of a configuration file with checks. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from baton.errors import CheckpointError, quoted

MAX_SIZE = 1 << 24  # of any count; contexts and vocabularies are the largest


class Check(NamedTuple):
    """A condition on a value, and its description for errors."""

    holds: Callable[[Any], bool]
    supported: str


def whole(least: int, most: int) -> Check:
    """An integer from `least` to `most`."""
    return Check(
        lambda value: type(value) is int and least <= value <= most,
        f"a whole number from {least} to {most}",
    )


def one_of(*values: object) -> Check:
    """Any of these values."""
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
    """The keys of a configuration file, or of an object in it.

    prefix: of keys in errors · remedy: what to do, appended to errors.
    """

    file: Path
    values: dict[str, Any]
    prefix: str = ""
    remedy: str = ""

    def error(self, key: str, value: object, supported: str, why: str = "") -> CheckpointError:
        """The error of an unsupported value; names file, key, value, reason and remedy."""
        found = f"{self.prefix}{key} is {quoted(value)}{why}"
        return CheckpointError(f"{self.file}: {found}; supported: {supported}{self.remedy}")

    def read(self, key: str, check: Check, default: object = None) -> Any:
        """The value of a key, or the default where it is absent or null. Raises CheckpointError."""
        value = self.values.get(key)
        value = default if value is None else value
        if not check.holds(value):
            raise self.error(key, value, check.supported)
        return value

    def inside(self, key: str, remedy: str = "") -> Fields:
        """The object of a key; an empty one where it is absent."""
        values = self.read(key, OBJECT, {})
        return Fields(self.file, values, f"{self.prefix}{key}.", remedy or self.remedy)
