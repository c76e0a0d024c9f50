"""Command lines of a local cluster's processes, which get their settings as one JSON object."""

from __future__ import annotations

import os
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from baton.config import ClusterConfig, ModelSource, RouterConfig, WorkerConfig, options
from baton.local.resources import Share

PROGRAM = (sys.executable, "-m", "baton")


def router(
    config: ClusterConfig,
    etcd: str,
    port: int,
    http_port: int = 0,
    metrics_port: int | None = None,
    certs: Path | None = None,
) -> list[str]:
    """Arguments of a router; `certs` is a folder written by `baton.local.certs.write`."""
    settings = RouterConfig(
        limits=config.limits,
        api=config.api,
        **_shared(config, RouterConfig),
        models=tuple(map(str, config.sources)),
        random_weights=config.engine.random_weights,
        host=config.host,
        port=port,
        http_port=http_port,
        registry=config.registry(etcd),
        metrics_port=metrics_port,
        **(_tls(certs, "router") if certs else {}),
    )
    return arguments("router", settings)


def worker(
    config: ClusterConfig,
    etcd: str,
    role: str,
    share: Share,
    metrics_port: int | None = None,
    certs: Path | None = None,
    source: ModelSource | None = None,
) -> list[str]:
    """Arguments of a worker with a role of `WorkerConfig`, which chooses a free port itself."""
    source = source or config.sources[0]
    engine = replace(config.engine, model=source.path)
    engine = replace(engine, threads=share.threads, cpus=tuple(share.cpus))
    if role == "prefill":
        engine = replace(engine, nice=config.prefill_nice)
    engine = replace(engine, tp=config.ranks[role])
    if share.device:
        engine = replace(engine, device=share.device, gpu_memory=share.gpu_memory)
    settings = WorkerConfig(
        role,
        engine,
        config.registry(etcd),
        **_shared(config, WorkerConfig),
        model_name=source.name,
        model_version=source.version or "",
        metrics_port=metrics_port,
        **(_tls(certs, "worker") if certs else {}),
    )
    return arguments("worker", settings)


def _tls(certs: Path, role: str) -> dict[str, Any]:
    """TLS settings for one role. Routers do not ask their callers for certificates."""
    trust = "tls_ca" if role == "router" else "tls_client_ca"
    own = {"tls_cert": certs / f"{role}.pem", "tls_key": certs / f"{role}-key.pem"}
    return {**own, trust: certs / "ca.pem"}


def _shared(config: ClusterConfig, cls: type[Any]) -> dict[str, Any]:
    """Settings of the cluster that `cls` has, too, with the same name and meaning."""
    own = {"engine", "limits", "api", "registry", "host", "port", "http_port", "metrics_port"}
    own |= {"models", "model_name"}
    names = {field.name for field in fields(cls)} & {field.name for field in fields(config)}
    return {name: getattr(config, name) for name in names - own}


def arguments(command: str, settings: RouterConfig | WorkerConfig) -> list[str]:
    """A command with its settings, for a child process of this one."""
    parent = str(os.getpid())
    return [command, "--config", options.to_json(settings), "--die-with-parent", parent]
