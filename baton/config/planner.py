"""Settings of a planner."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from baton.config import options
from baton.config.options import option, part, split_address
from baton.config.registry import RegistryConfig
from baton.config.router import RouterConfig
from baton.config.service import NAME_TEXT, ListenConfig, TlsConfig, new_incarnation
from baton.config.slo import parse_all
from baton.config.worker import ROLES
from baton.errors import ConfigError

MAX_WORKERS = 10_000
TTFT_S, TPOT_S = 1.0, 0.05  # where no target is given


@dataclass(frozen=True)
class PlanConfig:
    """What a planner aims at."""

    GROUP: ClassVar[str] = "plan"
    apply: bool = option(
        False,
        "--apply",
        "change roles of workers (default: only say so); wanted replicas are published in any case",
    )
    slos: tuple[str, ...] = option(
        (),
        "--slo [NAME:]ttft=S,tpot=S",
        "targets in seconds, as routers take them: the shortest ttft counts for prefill workers, "
        f"the shortest tpot for decode workers (default: ttft={TTFT_S:g},tpot={TPOT_S:g})",
        str,
        many=True,
    )
    min_prefill: int = option(1, "--min-prefill WORKERS", "fewest prefill workers")
    max_prefill: int = option(
        100, "--max-prefill WORKERS", "most prefill workers", most=MAX_WORKERS
    )
    min_decode: int = option(1, "--min-decode WORKERS", "fewest decode workers")
    max_decode: int = option(100, "--max-decode WORKERS", "most decode workers", most=MAX_WORKERS)
    min_mixed: int = option(0, "--min-mixed WORKERS", "fewest mixed workers")
    max_mixed: int = option(100, "--max-mixed WORKERS", "most mixed workers", most=MAX_WORKERS)
    interval_s: float = option(
        5.0, "--interval SECONDS", "time between two decisions", least=0.1, most=60
    )
    window_s: float = option(
        60.0,
        "--window SECONDS",
        "time over which rates are measured; a number of workers changes once it was too low, or "
        "too high, for this time",
        least=1,
    )
    cooldown_s: float = option(
        30.0, "--cooldown SECONDS", "least time between two changes of roles", least=0
    )

    def __post_init__(self) -> None:
        options.check(self)
        parse_all(self.slos)
        for role in ROLES:
            if self.least[role] > self.most[role]:
                raise ConfigError(f"--min-{role} exceeds --max-{role}")

    @property
    def ttft_s(self) -> float:
        """The shortest target for the time to first token, in seconds."""
        return min((s.ttft_s for s in parse_all(self.slos) if s.ttft_s < math.inf), default=TTFT_S)

    @property
    def tpot_s(self) -> float:
        """The shortest target for the time per output token, in seconds."""
        return min((s.tpot_s for s in parse_all(self.slos) if s.tpot_s < math.inf), default=TPOT_S)

    @property
    def least(self) -> dict[str, int]:
        return {role: getattr(self, f"min_{role}") for role in ROLES}

    @property
    def most(self) -> dict[str, int]:
        return {role: getattr(self, f"max_{role}") for role in ROLES}


@dataclass(frozen=True)
class PlannerConfig(TlsConfig, ListenConfig):
    """One planner; of several with the same cluster one leads."""

    GROUP: ClassVar[str] = "service"
    plan: PlanConfig = part(PlanConfig)
    registry: RegistryConfig = part(RegistryConfig)
    target: str = option(
        f"127.0.0.1:{RouterConfig.port}",
        "--target HOST:PORT",
        "routers' addresses, separated by commas; a name with several addresses stands for all",
    )
    port: int = option(7740, "--port PORT", "port to listen on, for KEDA (gRPC)")
    name: str = option("", "--name NAME", NAME_TEXT)
    incarnation: str = field(default_factory=lambda: new_incarnation("planner"))

    def __post_init__(self) -> None:
        options.check(self)
        for address in self.target.split(","):
            split_address(address.strip(), "--target")
