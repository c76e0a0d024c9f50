"""What every process tells of itself: its CPU time and its memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from baton.metrics.recorder import Attributes, Recorder

_STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def observe(recorder: Recorder) -> None:
    """Has both read at every look."""
    recorder.observe("process.cpu.time", _cpu_s)
    if _STATM.exists():
        recorder.observe("process.memory.usage", _memory_bytes)


def _cpu_s() -> Iterator[tuple[float, Attributes]]:
    times = os.times()
    yield times.user, {"cpu.mode": "user"}
    yield times.system, {"cpu.mode": "system"}


def _memory_bytes() -> Iterator[tuple[float, Attributes]]:
    yield int(_STATM.read_text().split()[1]) * _PAGE_BYTES, {}
