"""What may be written after an option: sizes, times, lists. argparse tells what was wrong."""

from __future__ import annotations

import argparse
import re

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def size(text: str) -> int:
    """Bytes from "512MiB", "2GiB" or "1048576"."""
    match = re.fullmatch(r"(\d+)\s*(|KiB|MiB|GiB)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 512MiB, 2GiB or bytes")
    return int(match[1]) * _UNITS[match[2]]


def seconds(text: str) -> float:
    """A time above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write seconds above 0")
    return value


def numbers(text: str) -> list[int]:
    """Whole numbers from "1,2,3"."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = [-1]
    if min(values) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers: write 1,2,3")
    return values
