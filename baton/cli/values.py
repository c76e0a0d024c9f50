"""What may be written after an option: sizes, times, lists. argparse tells what was wrong."""

from __future__ import annotations

import argparse
import re
from typing import Any

from baton.config import DEVICES, is_device

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def size(text: str) -> int:
    """Bytes from "512MiB", "2GiB" or "1048576"."""
    match = re.fullmatch(r"(\d+)\s*(|KiB|MiB|GiB)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 512MiB, 2GiB or bytes")
    return int(match[1]) * _UNITS[match[2]]


def device(text: str) -> str:
    """auto, cpu, cuda, or one GPU by its number as "cuda:1"."""
    if not is_device(text):
        known = ", ".join(DEVICES)
        raise argparse.ArgumentTypeError(f"{text!r} is no device: write {known} or cuda:1")
    return text


def share(text: str) -> float:
    """A part of the whole: above 0, at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: write a number up to 1, as 0.9")
    return value


def seconds(text: str) -> float:
    """A time above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write seconds above 0")
    return value


def count(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of things: write 1 or more")
    return int(text)


def numbers(text: str) -> list[int]:
    """Whole numbers from "1,2,3"."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = [-1]
    if min(values) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers: write 1,2,3")
    return values


def cores(text: str) -> tuple[int, ...]:
    """Cores' numbers from "0,1"."""
    return tuple(numbers(text))


class Collected(argparse.Action):
    """An option that may be given several times; a tuple of what was given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, (*getattr(namespace, self.dest), values))
