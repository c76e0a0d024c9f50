"""Settings of `baton advise`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from baton.bench.workload import Workload
from baton.config import options
from baton.config.options import option, part
from baton.config.slo import Slo
from baton.errors import ConfigError

ROLES = MIXED, PREFILL, DECODE = "mixed", "prefill", "decode"


def parse_roles(text: str) -> dict[str, int]:
    """Parses "prefill=2,decode=1" or "mixed=3". Raises ConfigError."""
    found: dict[str, int] = {}
    for item in text.split(","):
        role, _, count = item.partition("=")
        if role not in ROLES or not count.isdigit() or role in found:
            raise ConfigError(
                f"--arrangement {text!r}: write a number of workers for each role, as "
                "prefill=2,decode=1 or mixed=3"
            )
        found[role] = int(count)
    roles = {role: count for role, count in found.items() if count}
    if not (roles.get(DECODE) or roles.get(MIXED)):
        raise ConfigError(f"--arrangement {text!r}: no worker decodes")
    return roles


@dataclass(frozen=True)
class AdviseConfig:
    """What is asked for."""

    GROUP: ClassVar[str] = "advice"
    workload: Workload = part(Workload)
    slo: Slo = option(
        Slo.parse("ttft=1,tpot=0.05"),
        "--slo LIMITS",
        "limits that a request has to meet, in seconds (default: ttft=1,tpot=0.05)",
        Slo.parse,
    )
    share: float = option(
        0.95, "--share SHARE", "share of the requests that have to meet them", least=0.01, most=1
    )
    workers: int = option(
        0, "--workers N", "number of workers (default: as few as meet the limits)", least=1
    )
    max_workers: int = option(64, "--max-workers N", "most workers to try", least=1)
    arrangements: tuple[dict[str, int], ...] = option(
        (),
        "--arrangement ROLES",
        "simulate only this one, as prefill=2,decode=1 or mixed=3; may be repeated",
        parse_roles,
        many=True,
    )
    planner: bool = option(
        False,
        "--planner",
        "also simulate the best arrangement with `baton planner` changing roles",
    )
    kv_tokens: int = option(
        0, "--kv-tokens TOKENS", "size of a worker's KV cache (default: as measured, or 131072)"
    )
    token_bytes: int = option(
        0, "--kv-token-bytes BYTES", "KV of a token (default: as measured, or 65536)"
    )
    handoff_ms: float = option(3.0, "--handoff-ms MS", "duration of a handoff's messages")
    router_ms: float = option(2.0, "--router-ms MS", "added by router and network to a request")
    transfer_gb_per_s: float = option(
        0.0, "--transfer-rate GB", "GB a second of handoffs (default: as measured, or 4)"
    )

    def __post_init__(self) -> None:
        options.check(self)
        if self.workload.concurrency:
            raise ConfigError("--concurrency is no load to plan for: give --rate or --trace")
