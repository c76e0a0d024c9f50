"""Service level objectives: latency targets of a class of requests."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from baton.errors import ConfigError

_TARGET = re.compile(r"\s*(ttft|tpot|e2e)\s*=\s*(\d+\.?\d*|\.\d+)\s*")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,32}")


@dataclass(frozen=True)
class Slo:
    """Targets of a class, in seconds; infinite if not set."""

    name: str
    ttft_s: float = math.inf
    tpot_s: float = math.inf
    e2e_s: float = math.inf

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Parses "[NAME:]ttft=SECONDS,tpot=SECONDS[,e2e=SECONDS]". Raises ConfigError."""
        before, colon, after = text.rpartition(":")
        name = before if colon else "default"
        parts = [_TARGET.fullmatch(part) for part in after.split(",")]
        targets = {f"{part[1]}_s": float(part[2]) for part in parts if part}
        if len(targets) < len(parts) or not all(targets.values()):
            raise ConfigError(
                f"--slo {text!r}: write targets in seconds, as ttft=0.5,tpot=0.05 or, with the "
                "class's name, batch:ttft=10,e2e=60"
            )
        if not _NAME.fullmatch(name):
            raise ConfigError(f"--slo {text!r}: {name!r} is no name for a class")
        return cls(name, **targets)

    def met(self, ttft_s: float, tpot_s: float, e2e_s: float) -> bool:
        """Whether these latencies meet all targets."""
        return ttft_s <= self.ttft_s and tpot_s <= self.tpot_s and e2e_s <= self.e2e_s


def parse_all(texts: tuple[str, ...]) -> tuple[Slo, ...]:
    """Parses all classes. Raises ConfigError, also for repeated names."""
    classes = tuple(map(Slo.parse, texts))
    names = [slo.name for slo in classes]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"--slo names {', '.join(sorted(twice))} twice")
    return classes
