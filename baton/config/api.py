"""Settings of a router's HTTP API."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from baton.config import options
from baton.config.options import option
from baton.errors import ConfigError


def origins(text: str) -> tuple[str, ...]:
    """Parses origins of web pages, as browsers send them, or "*" alone. Raises ConfigError."""
    found = tuple(text.split(","))
    for origin in found:
        if not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[a-z0-9.:\[\]-]+", origin):
            raise ConfigError(
                f"{origin!r} is no origin: write https://chat.example or http://127.0.0.1:3000 as "
                "the browser sends it, without a path and in lower case, or *"
            )
    return found


def host_names(text: str) -> tuple[str, ...]:
    """Parses this server's names, as in Host headers, or "*" alone. Raises ConfigError."""
    found = tuple(text.lower().split(","))
    for name in found:
        if not re.fullmatch(r"\*|[a-z0-9._-]+", name):
            raise ConfigError(
                f"{name!r} is no host name: write chat.example,gpu1, without a scheme and a port, "
                "or *"
            )
    return found


@dataclass(frozen=True)
class ApiConfig:
    """What the HTTP API accepts and offers; equal for all routers of a cluster."""

    GROUP: ClassVar[str] = "API"
    model_aliases: tuple[str, ...] = option(
        (),
        "--model-alias NAME[=MODEL]",
        "additional name of a model in requests (default: of the first --model); may be repeated, "
        "and `baton route` sets such names while the router runs",
        str,
        many=True,
    )
    cors_origins: tuple[str, ...] = option(
        (),
        "--cors-origins ORIGINS",
        "origins of web pages that may call the HTTP API (CORS), separated by commas, as "
        "https://chat.example; * allows all (default: none)",
        origins,
    )
    generation_config: str = option(
        "auto",
        "--generation-config",
        "default sampling settings: auto reads the model's generation_config.json, none ignores it",
        choices=("auto", "none"),
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "--allowed-hosts NAMES",
        "host names accepted in the Host header besides addresses and localhost, separated by "
        "commas; * accepts all (default: all, but none on a loopback address)",
        host_names,
    )
    max_http_requests: int = option(
        2048,
        "--max-http-requests N",
        "most HTTP requests that wait or run at a time in each process; further ones get a 503",
        least=1,
    )
    max_http_connections: int = option(
        4096,
        "--max-http-connections N",
        "most HTTP connections to each process, and never more than half of its open-file limit "
        "(ulimit -n); further ones get a 503",
        least=1,
    )
    batch_dir: Path | None = option(
        None,
        "--batch-dir DIR",
        "serve /v1/files and /v1/batches and store them in this directory, which routers of one "
        "machine may share (default: not served)",
        Path,
    )
    batch_concurrency: int = option(
        32,
        "--batch-concurrency REQUESTS",
        "most requests of all batches that run at a time",
        least=1,
    )
    batch_disk: int = option(
        4 << 30,
        "--batch-disk SIZE",
        "most disk space in --batch-dir for each tenant (default: 4GiB)",
        least=1,
    )

    response_dir: Path | None = option(
        None,
        "--response-dir DIR",
        "store responses and conversations in this directory, which routers of one machine may "
        "share (default: none are stored)",
        Path,
    )
    response_disk: int = option(
        1 << 30,
        "--response-disk SIZE",
        "most disk space in --response-dir for each tenant, whose oldest responses and "
        "conversations are removed (default: 1GiB)",
        least=1,
    )
    response_lifetime_s: float = option(
        30 * 86400.0,
        "--response-lifetime SECONDS",
        "time after which a stored response is removed, and a conversation without new items "
        "(default: 30 days)",
        least=1.0,
    )

    def __post_init__(self) -> None:
        options.check(self)
