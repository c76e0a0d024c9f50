"""One line of what `baton doctor` found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is; only FAIL makes the command's exit status 1."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """What was found, about what, and how to mend it (empty where nothing needs to be)."""

    level: Level
    subject: str
    text: str
    mend: str = ""


def ok(subject: str, text: str) -> Finding:
    """As it should be, or as it may be."""
    return Finding(Level.OK, subject, text)


def warn(subject: str, text: str, mend: str = "") -> Finding:
    """It works, but slower or not everywhere."""
    return Finding(Level.WARN, subject, text, mend)


def fail(subject: str, text: str, mend: str = "") -> Finding:
    """It does not work."""
    return Finding(Level.FAIL, subject, text, mend)
