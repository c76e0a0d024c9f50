"""The command lines of a local cluster's processes: settings in, arguments for `PROGRAM` out."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence

from baton.config import ClusterConfig, EngineConfig, RouterLimits
from baton.local.resources import Share

PROGRAM = (sys.executable, "-m", "baton")


def router(
    config: ClusterConfig,
    port: int,
    etcd: str,
    otlp: str | None,
    metrics_port: int | None = None,
    http_port: int = 0,
) -> list[str]:
    """A router's arguments."""
    return [
        "router",
        *_model(config.engine),
        *("--host", config.host, "--port", str(port)),
        *(("--http-port", str(http_port)) if http_port else ()),
        *_limits(config.limits),
        *_common(config, etcd, otlp, metrics_port),
    ]


def worker(
    config: ClusterConfig,
    role: str,
    share: Share,
    etcd: str,
    otlp: str | None,
    metrics_port: int | None = None,
) -> list[str]:
    """The arguments of a "prefill" or "decode" worker; it takes a free port by itself."""
    return [
        f"{role}-worker",
        *engine(_on(share, config.engine)),
        *("--threads", str(share.threads)),
        *(("--cpus", ",".join(map(str, share.cpus))) if share.cpus else ()),
        *(("--nice", str(config.prefill_nice)) if role == "prefill" else ()),
        *("--host", "127.0.0.1", "--port", "0"),
        *("--transport", config.transport),
        *("--worker-price", str(config.price_per_hour)),
        *_common(config, etcd, otlp, metrics_port),
    ]


def engine(config: EngineConfig) -> list[str]:
    """The engine's options, all but its threads, cores and niceness."""
    return [
        *_model(config),
        *("--dtype", config.dtype),
        *("--quantization", config.quantization),
        *("--device", config.device),
        *("--kernels", config.kernels),
        *("--speculate", str(config.speculate)),
        *("--kv-dtype", config.kv_dtype),
        *("--block-size", str(config.block_size)),
        *("--kv-blocks", str(config.kv_blocks)),
        *("--kv-cache", str(config.kv_cache_bytes)),
        *("--max-context", str(config.max_context)),
        *("--max-batch", str(config.max_batch)),
        *("--chunk-tokens", str(config.chunk_tokens)),
        *(() if config.prefix_cache else ("--no-prefix-cache",)),
        *(("--simulate", config.simulate) if config.simulate else ()),
        *("--gpu-memory", str(config.gpu_memory)),
        *(() if config.graphs else ("--no-graphs",)),
        *(() if config.overlap else ("--no-overlap",)),
    ]


def _on(share: Share, config: EngineConfig) -> EngineConfig:
    """An engine's settings, on the GPU that is its share if it has one."""
    if not share.device:
        return config
    return dataclasses.replace(config, device=share.device, gpu_memory=share.gpu_memory)


def _model(config: EngineConfig) -> Sequence[str]:
    return ("--random-weights" if config.random_weights else "--model", config.model)


def _limits(limits: RouterLimits) -> Sequence[str]:
    return (
        *("--max-queue", str(limits.max_queue)),
        *("--max-attempts", str(limits.max_attempts)),
        *("--default-timeout", str(limits.default_timeout_s)),
        *("--ttft-target", str(limits.ttft_target_ms)),
        *("--max-prompt-tokens", str(limits.max_prompt_tokens)),
        *("--silence", str(limits.silence_s)),
        *("--stall", str(limits.stall_s)),
        *("--recovery-timeout", str(limits.recovery_s)),
        *("--trace-slow", str(limits.trace_slow_s)),
        *(part for slo in limits.slos for part in ("--slo", slo)),
        *("--local-prefill-max", str(limits.local_prefill_max_tokens)),
        *(("--tenants", str(limits.tenants_file)) if limits.tenants_file else ()),
    )


def _common(
    config: ClusterConfig, etcd: str, otlp: str | None, metrics_port: int | None
) -> Sequence[str]:
    return (
        *("--etcd", etcd, "--cluster", config.cluster),
        *_etcd_access(config),
        *(("--model-name", config.model_name) if config.model_name else ()),
        *("--drain-timeout", str(config.drain_s)),
        *("--log-level", config.log_level, "--log-format", config.log_format),
        *(("--otlp", otlp) if otlp else ()),
        *("--trace-sample", str(config.trace_sample)),
        *(("--metrics-port", str(metrics_port)) if metrics_port is not None else ()),
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
