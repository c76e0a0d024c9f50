"""Settings of a worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.config import options
from baton.config.engine import MAX_TP, EngineConfig
from baton.config.model import check_model_name, check_model_version, default_model_name
from baton.config.options import option, part, split_address
from baton.config.registry import RegistryConfig
from baton.config.service import NAME_TEXT, ServiceConfig, TlsConfig, new_incarnation
from baton.errors import ConfigError

ROLES = ("prefill", "decode", "mixed")
TRANSPORTS = ("auto", "shm", "gloo", "nccl", "cuda_ipc")


@dataclass(frozen=True, kw_only=True)
class WorkerServiceConfig(ServiceConfig):
    """Settings that all workers of a cluster have in common."""

    transport: str = option(
        "auto",
        "--transport",
        "transport of KV blocks; auto takes the fastest that both workers have",
        choices=TRANSPORTS,
    )
    price_per_hour: float = option(
        0.0, "--worker-price PRICE", "price of a worker per hour, in any currency, for cost metrics"
    )


@dataclass(frozen=True)
class WorkerConfig(TlsConfig, WorkerServiceConfig):
    """One worker."""

    role: str = option(
        "mixed",
        "--role",
        "what routers prefer it for at first; `baton role` changes it while it runs",
        choices=ROLES,
    )
    engine: EngineConfig = part(EngineConfig)
    registry: RegistryConfig = part(RegistryConfig)
    port: int = option(0, "--port PORT", "port to listen on (default: a free one)")
    advertise: str = option(
        "",
        "--advertise HOST:PORT",
        "address at which others reach this worker (default: --host and the port)",
    )
    kv_host: str = option(
        "",
        "--kv-host ADDRESS",
        "this host's address for KV transfers over Gloo and for setting up NCCL links, whose data "
        "use NCCL_SOCKET_IFNAME (default: the host of --advertise)",
    )
    nnodes: int = option(
        1,
        "--nnodes HOSTS",
        "number of hosts that share this worker's --tp ranks: one process on each, all with the "
        "same --name (CPUs need --tp-backend gloo for it)",
        least=1,
        most=MAX_TP,
    )
    node_rank: int = option(
        0,
        "--node-rank N",
        "number of this host among --nnodes: 0 is the worker that others connect to, the rest run "
        "ranks for it and read only the options of model, device, cores and addresses",
    )
    lease_s: float = option(
        30.0,
        "--reservation-lease SECONDS",
        "longest time KV blocks stay reserved for a handoff that does not arrive",
        least=0.01,
    )
    transfer_timeout_s: float = option(
        10.0, "--transfer-timeout SECONDS", "longest time of one transfer of KV blocks", least=0.001
    )
    model_version: str = option(
        "",
        "--model-version VERSION",
        "version of the model: requests are routed by it, and workers of different versions hand "
        "nothing over to each other (default: none)",
    )
    name: str = option("", "--name NAME", NAME_TEXT)
    incarnation: str = field(default_factory=lambda: new_incarnation("worker"))

    def __post_init__(self) -> None:
        options.check(self)
        if self.model_name:
            check_model_name(self.model_name, "--model-name")
        if self.model_version:
            check_model_version(self.model_version, "--model-version")
        if self.advertise:
            split_address(self.advertise, "--advertise")
        if self.node_rank >= self.nnodes:
            raise ConfigError(f"--node-rank {self.node_rank} is none of --nnodes {self.nnodes}")
        if self.nnodes > 1 and self.engine.tp % self.nnodes:
            raise ConfigError(
                f"--nnodes {self.nnodes} hosts cannot share --tp {self.engine.tp} ranks evenly"
            )
        if self.nnodes > 1 and not self.name:
            raise ConfigError("--nnodes needs --name: by it the hosts of a worker find each other")

    @property
    def served_name(self) -> str:
        return self.model_name or default_model_name(self.engine.model)
