"""The command lines of a local cluster's processes: settings in, arguments out."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from baton.config import ClusterConfig, EngineConfig
from baton.local.cpus import Share


def router(config: ClusterConfig, port: int, etcd: str, otlp: str | None) -> list[str]:
    """The router's command line."""
    return [
        *_command("router"),
        *_model(config.engine),
        *("--host", config.host, "--port", str(port)),
        *("--local-prefill-max", str(config.local_prefill_max_tokens)),
        *_common(config, etcd, otlp),
    ]


def worker(
    config: ClusterConfig, role: str, share: Share, etcd: str, otlp: str | None
) -> list[str]:
    """The command line of a "prefill" or "decode" worker; it takes a free port by itself."""
    return [
        *_command(f"{role}-worker"),
        *engine(config.engine),
        *("--threads", str(share.threads)),
        *(("--cpus", ",".join(map(str, share.cpus))) if share.cpus else ()),
        *("--host", "127.0.0.1", "--port", "0"),
        *("--transport", config.transport),
        *_common(config, etcd, otlp),
    ]


def engine(config: EngineConfig) -> list[str]:
    """The engine's options, all but the threads."""
    return [
        *_model(config),
        *("--dtype", config.dtype),
        *("--device", config.device),
        *("--block-size", str(config.block_size)),
        *("--kv-blocks", str(config.kv_blocks)),
        *("--kv-cache", str(config.kv_cache_bytes)),
        *("--max-context", str(config.max_context)),
        *("--max-batch", str(config.max_batch)),
        *("--chunk-tokens", str(config.chunk_tokens)),
        *(() if config.prefix_cache else ("--no-prefix-cache",)),
    ]


def _model(config: EngineConfig) -> Sequence[str]:
    return ("--random-weights" if config.random_weights else "--model", config.model)


def _command(name: str) -> Sequence[str]:
    return (sys.executable, "-m", "baton", name)


def _common(config: ClusterConfig, etcd: str, otlp: str | None) -> Sequence[str]:
    return (
        *("--etcd", etcd, "--cluster", config.cluster),
        *_etcd_access(config),
        *(("--model-name", config.model_name) if config.model_name else ()),
        *("--drain-timeout", str(config.drain_s)),
        *("--log-level", config.log_level),
        *(("--otlp", otlp) if otlp else ()),
        *("--die-with-parent", str(os.getpid())),
    )


def _etcd_access(config: ClusterConfig) -> Sequence[str]:
    options = (
        ("--etcd-user", config.etcd_user),
        ("--etcd-password-file", config.etcd_password_file),
        ("--etcd-ca", config.etcd_ca),
        ("--etcd-cert", config.etcd_cert),
        ("--etcd-key", config.etcd_key),
    )
    return [part for option, value in options if value for part in (option, str(value))]
