"""Settings of a cluster on one machine, as `baton up` starts it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from baton.config import options
from baton.config.api import ApiConfig
from baton.config.engine import MAX_TP, EngineConfig
from baton.config.model import ModelSource
from baton.config.options import MAX_PORT, option, part
from baton.config.registry import RegistryConfig
from baton.config.router import MAX_ROUTER_PROCESSES, ROUTER_PROCESSES_TEXT, RouterLimits
from baton.config.service import DRAIN_TEXT, LOG_LEVEL_TEXT, LOG_LEVELS
from baton.config.worker import WorkerServiceConfig
from baton.errors import ConfigError

HTTP_PORT = 7780


@dataclass(frozen=True)
class ClusterConfig(WorkerServiceConfig):
    """Routers, workers and etcd of a cluster on this machine."""

    GROUP: ClassVar[str] = "cluster"
    engine: EngineConfig = part(EngineConfig, without=("cpus", "nice", "model"))
    models: tuple[str, ...] = option(
        (),
        "--model [NAME[@VERSION]=]DIR",
        "Hugging Face model directory, or 'demo' for the built-in model; may be repeated, and each "
        "NAME or NAME@VERSION has its own workers (default: demo)",
        str,
        many=True,
        group="model",
    )
    limits: RouterLimits = part(RouterLimits)
    api: ApiConfig = part(ApiConfig)
    etcd_access: RegistryConfig = part(RegistryConfig, without=("etcd", "lease_ttl_s"))
    prefill: int | None = option(
        None, "--prefill N", "number of prefill workers (default: 1; 0 with --mixed)", int, least=0
    )
    decode: int | None = option(
        None, "--decode N", "number of decode workers (default: 1; 0 with --mixed)", int, least=0
    )
    mixed: int = option(
        0, "--mixed N", "number of workers that routers use for prompts and for tokens", least=0
    )
    prefill_tp: int = option(
        0, "--prefill-tp RANKS", "--tp of prefill workers (default: --tp)", most=MAX_TP
    )
    decode_tp: int = option(
        0, "--decode-tp RANKS", "--tp of decode workers (default: --tp)", most=MAX_TP
    )
    # Prompts give way to streams, and to whatever serves both. Not far: beside a busy process
    # at 0 a core gives 39 % of its time to 2, but 10 % to 10: prompts took five times as long.
    prefill_nice: int = option(
        2,
        "--prefill-nice N",
        "niceness of prefill workers, up to 19, so that decode workers and routers on the same "
        "cores go first; every other busy process does too (at 10 a tenth of a core is left)",
        most=19,
    )
    routers: int = option(1, "--routers N", "number of routers", least=1)
    router_processes: int = option(
        1, "--router-processes N", ROUTER_PROCESSES_TEXT, least=1, most=MAX_ROUTER_PROCESSES
    )
    host: str = option("127.0.0.1", "--host", "address that routers listen on", group="service")
    port: int = option(
        7700, "--port PORT", "port of the first router; others follow; 0 takes free ports"
    )
    http_port: int | None = option(
        None,
        "--http-port PORT",
        "port of the first router's OpenAI-compatible HTTP API; others follow; 0 turns it off "
        f"(default: {HTTP_PORT}; off if --port is 0)",
        int,
    )
    etcd: str | None = option(
        None, "--etcd HOST:PORT", "address of an etcd to use (default: start one for the cluster)"
    )
    tls: bool = option(
        False, "--tls", "encrypt all ports but etcd's, with certificates made for this run"
    )
    trace: bool = option(False, "--trace", "print the trace of each request")
    keep_traces: int = option(
        1000,
        "--keep-traces N",
        "number of requests whose traces are kept for `baton trace`, also with --otlp; 0: none",
    )
    restart: bool = option(True, "--restart", "restart processes that end, after a growing delay")
    drain_s: float = option(5.0, "--drain-timeout SECONDS", DRAIN_TEXT, group="service")
    log_level: str = option(
        "warning", "--log-level", LOG_LEVEL_TEXT, choices=LOG_LEVELS, group="telemetry"
    )

    def __post_init__(self) -> None:
        options.check(self)
        if not sum(self.workers.values()):
            raise ConfigError("a cluster needs a worker: --mixed 1, or --prefill 1 --decode 1")
        if self.models and self.engine.random_weights:
            raise ConfigError("--model and --random-weights do not go together")
        if len(self.models) > 1:
            if self.model_name:
                raise ConfigError("--model-name is for one model: write --model NAME=DIR for each")
            served = [(one.served_name, one.version) for one in self.sources]
            if twice := {one for one in served if served.count(one) > 1}:
                raise ConfigError(f"--model: {min(twice)[0]} is given twice: write NAME=DIR")
        if self.port + self.routers - 1 > MAX_PORT:
            raise ConfigError(f"--port {self.port} leaves no ports for {self.routers} routers")
        if self.first_http_port + self.routers - 1 > MAX_PORT:
            raise ConfigError(f"--http-port {self.http_port} leaves no ports for all routers")
        self.registry(self.etcd or RegistryConfig.etcd)
        if not self.etcd and self.etcd_access != RegistryConfig(cluster=self.etcd_access.cluster):
            raise ConfigError("--etcd-user, -ca, -cert and their like need --etcd HOST:PORT")

    @property
    def first_http_port(self) -> int:
        """HTTP port of the first router; 0 if HTTP is off."""
        default = HTTP_PORT if self.port else 0
        return default if self.http_port is None else self.http_port

    @property
    def sources(self) -> list[ModelSource]:
        """The models; one without a name is called as its directory."""
        found = [ModelSource.parse(text) for text in self.models or (self.engine.model,)]
        return [replace(one, name=one.name or self.model_name) for one in found]

    @property
    def workers(self) -> dict[str, int]:
        """Number of workers by role."""
        default = 0 if self.mixed else 1
        prefill = default if self.prefill is None else self.prefill
        decode = default if self.decode is None else self.decode
        return {"prefill": prefill, "decode": decode, "mixed": self.mixed}

    @property
    def ranks(self) -> dict[str, int]:
        """Ranks of a worker by role."""
        tp = self.engine.tp
        return {"prefill": self.prefill_tp or tp, "decode": self.decode_tp or tp, "mixed": tp}

    def registry(self, etcd: str) -> RegistryConfig:
        """The registry's settings for an etcd at this address; raises ConfigError."""
        return replace(self.etcd_access, etcd=etcd)
