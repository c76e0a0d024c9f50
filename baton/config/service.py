"""Settings that every router and worker has: addresses, TLS, telemetry, identity."""

from __future__ import annotations

import os
import re
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from baton.config.options import option
from baton.errors import ConfigError

LOG_LEVELS = ("debug", "info", "warning", "error")
# Where processes map each other's memory; containers share it with `ipc: host`.
SHARED_FOLDER = Path("/dev/shm")  # noqa: S108 (names in it cannot be guessed, nor taken by others)
LOG_LEVEL_TEXT = "lowest level of log lines on stderr"
DRAIN_TEXT = "longest time that running requests get to finish after SIGTERM"
NAME_TEXT = (
    "name of this process in status, traces and logs; an id of the run is appended "
    "(default: its role)"
)


def host_id() -> str:
    """Equal for two processes exactly if they can map each other's memory: same machine, same
    `SHARED_FOLDER`, same user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    folder = "none"  # and then no transport is offered that needs it
    if SHARED_FOLDER.is_dir():
        found = SHARED_FOLDER.stat()
        folder = f"shm:{found.st_dev}:{found.st_ino}"
    return f"{boot}/{folder}/{os.getuid()}"


def new_incarnation(name: str) -> str:
    """A unique id for one run of the process called `name`: the name with a random suffix.

    Raises ConfigError if the name has characters that etcd keys and metrics cannot have.
    """
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,63}", name):
        raise ConfigError(f"--name {name!r}: use up to 63 letters, digits, and . _ -")
    return f"{name}-{uuid.uuid4().hex[:8]}"


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """Traces, metrics and logs of a process."""

    GROUP: ClassVar[str] = "telemetry"
    otlp: str | None = option(
        None,
        "--otlp URL",
        "OTLP/gRPC address to export traces to, as http://HOST:4317; several are separated by "
        "commas",
    )
    otlp_logs: str | None = option(
        None,
        "--otlp-logs URL",
        "OTLP/gRPC address to export the access and the audit log to (default: only to stderr)",
    )
    trace_sample: float = option(
        1.0,
        "--trace-sample SHARE",
        "share of traces to export; the sampling flag of a caller's trace takes precedence, and "
        "failed and slow requests are always exported",
        most=1,
    )
    metrics_port: int | None = option(
        None,
        "--metrics-port PORT",
        "port of metrics at http://HOST:PORT/metrics; 0 takes a free one (default: none)",
    )
    log_level: str = option("info", "--log-level", LOG_LEVEL_TEXT, choices=LOG_LEVELS)
    log_format: str = option(
        "text",
        "--log-format",
        "log lines as text, or as one JSON object each",
        choices=("text", "json"),
    )


@dataclass(frozen=True, kw_only=True)
class TlsConfig:
    """Encryption of a process's ports, and who may connect; all files are PEM."""

    GROUP: ClassVar[str] = "TLS"
    tls_cert: Path | None = option(
        None, "--tls-cert FILE", "certificate of this process; its ports then accept only TLS"
    )
    tls_key: Path | None = option(None, "--tls-key FILE", "private key of --tls-cert")
    tls_client_ca: Path | None = option(
        None,
        "--tls-client-ca FILE",
        "CA that callers' certificates must be signed by; workers also check the caller's role",
    )
    tls_ca: Path | None = option(
        None,
        "--tls-ca FILE",
        "CA that signed the other processes' certificates (default: --tls-client-ca)",
    )
    health_port: int | None = option(
        None,
        "--health-port PORT",
        "port for health probes, never with TLS: GET /health is 200 while the process is alive, "
        "/ready while it accepts requests (default: none)",
    )


@dataclass(frozen=True, kw_only=True)
class ListenConfig(TelemetryConfig):
    """Where a process listens."""

    GROUP: ClassVar[str] = "service"
    host: str = option("127.0.0.1", "--host", "address to listen on")
    insecure: bool = option(
        False, "--insecure", "allow listening without TLS on an address that other machines reach"
    )


@dataclass(frozen=True, kw_only=True)
class ServiceConfig(ListenConfig):
    """Settings of every router and worker."""

    GROUP: ClassVar[str] = "service"
    model_name: str = option(
        "",
        "--model-name NAME",
        "name of the model in requests (default: the model directory's name)",
    )
    drain_s: float = option(30.0, "--drain-timeout SECONDS", DRAIN_TEXT)
