"""What a benchmark ran on: beside every figure, because none means much without it."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def cores() -> tuple[int, ...]:
    """Those this process may run on."""
    return tuple(sorted(os.sched_getaffinity(0)))


def about(cpus: Sequence[int], threads: int) -> dict[str, Any]:
    """Processor, cores, and how busy the machine was when this was asked."""
    return {
        "processor": _processor(),
        "system": platform.platform(),
        "cpus": list(cpus),
        "threads": threads,
        "load_before": round(os.getloadavg()[0], 2),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
