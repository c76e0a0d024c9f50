"""Settings: one frozen dataclass for each kind of process, validated once, at the start.

The command line (`baton.cli`) fills them in; nothing else reads options or the environment.
"""

from __future__ import annotations

import os
import re
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton import slo
from baton.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")  # or one GPU by its number: cuda:1
QUANTIZATIONS = ("none", "int8", "fp8")
KV_DTYPES = ("auto", "int8", "fp8")
KERNELS = ("auto", "native", "torch", "triton")
TRANSPORTS = ("auto", "shm", "gloo", "nccl", "cuda_ipc")
CPU_KV_CACHE_BYTES = 512 << 20  # on a CPU, where nobody says how much memory may be taken
MAX_PORT = 65535
MAX_NICE = 19
HTTP_PORT = 7780
DEMO_MODEL = Path(__file__).parent / "demo_model"


def model_path(model: str) -> Path:
    """The directory (or, for random weights, the config file) that `--model` names.

    Raises ConfigError when there is nothing there.
    """
    path = DEMO_MODEL if model == "demo" else Path(model).expanduser()
    if not model or not path.exists():
        raise ConfigError(
            f"model {model!r} not found: give a Hugging Face model directory (config.json, "
            "*.safetensors, tokenizer.json) or 'demo'"
        )
    return path.resolve()


def default_model_name(model: str) -> str:
    """The name a model is served under when none is given: its directory's, or its config's."""
    if model == "demo":
        return "demo"
    path = model_path(model)
    return path.parent.name if path.name == "config.json" else path.name.removesuffix(".json")


def split_address(address: str, option: str = "address") -> tuple[str, int]:
    """(host, port) of "host:port"; raises ConfigError naming the option."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > MAX_PORT:
        raise ConfigError(f"{option} must be HOST:PORT, not {address!r}")
    return host, int(port)


def host_id() -> str:
    """Equal for two processes exactly when one can open the other's memory through /proc."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = Path("/proc/self/ns/pid").readlink()
    return f"{boot}/{namespace}/{os.getuid()}"


def _choice(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{option} must be one of {', '.join(allowed)}, not {value!r}")


def is_device(name: str) -> bool:
    """Whether `--device` may say this: one of `DEVICES`, or a GPU by its number, as cuda:1."""
    return name in DEVICES or re.fullmatch(r"cuda:\d+", name) is not None


def _device(name: str) -> None:
    if not is_device(name):
        raise ConfigError(
            f"--device must be one of {', '.join(DEVICES)}, or a GPU's number as cuda:1, "
            f"not {name!r}"
        )


def _at_least(option: str, value: float, least: float) -> None:
    if not value >= least:  # so that NaN is refused
        raise ConfigError(f"{option} must be at least {least}, not {value}")


def _nice(option: str, nice: int) -> None:
    if not 0 <= nice <= MAX_NICE:
        raise ConfigError(f"{option} must be between 0 and {MAX_NICE}, not {nice}")


def _port(port: int) -> None:
    if not 0 <= port <= MAX_PORT:
        raise ConfigError(f"--port must be between 0 and {MAX_PORT}, not {port}")


def _http_port(port: int | None) -> None:
    if port is not None and not 0 <= port <= MAX_PORT:
        raise ConfigError(f"--http-port must be between 0 and {MAX_PORT}, not {port}")


def _metrics(port: int | None, trace_sample: float) -> None:
    if port is not None and not 0 <= port <= MAX_PORT:
        raise ConfigError(f"--metrics-port must be between 0 and {MAX_PORT}, not {port}")
    if not 0 <= trace_sample <= 1:
        raise ConfigError(f"--trace-sample must be between 0 and 1, not {trace_sample}")


@dataclass(frozen=True)
class SimulatedSpeed:
    """How fast a simulated engine is."""

    prefill_tokens_per_s: float
    step_ms: float  # for a step that gives sequences their next token
    ms_per_sequence: float = 0.0  # more, for each of them

    @classmethod
    def parse(cls, text: str) -> SimulatedSpeed:
        """Of "PREFILL_TOKENS_PER_S,STEP_MS[,MS_PER_SEQUENCE]". Raises ConfigError."""
        try:
            numbers = [float(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        finite = all(0 <= number < float("inf") for number in numbers)
        if not (2 <= len(numbers) <= 3 and finite and numbers[0] > 0):
            raise ConfigError(
                f"--simulate {text!r}: write the prefill rate in tokens a second and the time of a "
                "decode step in ms, as 8000,10; a third number is added for each sequence"
            )
        return cls(*numbers)

    def step_s(self, prompt_tokens: int, sequences: int) -> float:
        """Seconds for a step that computes so many of prompts and one token of each sequence."""
        decode_ms = self.step_ms + self.ms_per_sequence * sequences if sequences else 0.0
        return prompt_tokens / self.prefill_tokens_per_s + decode_ms / 1e3


@dataclass(frozen=True)
class RegistryConfig:
    """Where members are kept."""

    etcd: str = "127.0.0.1:2379"
    cluster: str = "default"
    lease_ttl_s: int = 5
    user: str = ""
    password_file: Path | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    def __post_init__(self) -> None:
        for address in self.etcd.split(","):
            split_address(address.removeprefix("http://").removeprefix("https://"), "--etcd")
        _at_least("--lease-ttl", self.lease_ttl_s, 1)
        if not self.cluster or "/" in self.cluster:
            raise ConfigError(f"--cluster must be a name without '/', not {self.cluster!r}")
        if bool(self.cert_file) != bool(self.key_file):
            raise ConfigError("--etcd-cert and --etcd-key go together")

    @property
    def workers_prefix(self) -> str:
        """Every worker's key begins with this."""
        return f"/baton/v1/{self.cluster}/workers/"


@dataclass(frozen=True)
class EngineConfig:
    """How one engine runs a model. Counts are tokens unless the name says otherwise."""

    model: str = "demo"
    random_weights: bool = False
    dtype: str = "auto"
    device: str = "auto"
    block_size: int = 16
    kv_blocks: int = 0  # 0: as many as fit `kv_cache_bytes`
    kv_cache_bytes: int = 0  # 0: CPU_KV_CACHE_BYTES; on a GPU what `gpu_memory` leaves
    max_context: int = 0  # 0: the model's own
    max_batch: int = 64
    chunk_tokens: int = 512
    prefix_cache: bool = True
    threads: int = 0  # 0: torch's own choice
    cpus: tuple[int, ...] = ()  # cores that its threads are pinned to; none: not pinned
    nice: int = 0  # how far its threads stand back where they share a core; 19: the most
    simulate: str = ""  # "PREFILL_TOKENS_PER_S,STEP_MS": compute nothing, take that long
    quantization: str = "none"  # of weights, and of what they are multiplied with
    kv_dtype: str = "auto"  # auto: the compute type
    kernels: str = "auto"  # auto: native where they can be built, on a GPU triton
    speculate: int = 0  # tokens drafted from the sequence's own text for one step; 0: none
    gpu_memory: float = 0.9  # share of the GPU's memory for weights, activations, graphs and KV
    graphs: bool = True  # on a GPU: decode steps are replayed as CUDA graphs
    overlap: bool = True  # on a GPU: a step is prepared while the one before it runs

    def __post_init__(self) -> None:
        _choice("--dtype", self.dtype, DTYPES)
        _device(self.device)
        _choice("--quantization", self.quantization, QUANTIZATIONS)
        _choice("--kv-dtype", self.kv_dtype, KV_DTYPES)
        _choice("--kernels", self.kernels, KERNELS)
        _at_least("--speculate", self.speculate, 0)
        _at_least("--block-size", self.block_size, 1)
        _at_least("--kv-blocks", self.kv_blocks, 0)
        _at_least("--kv-cache", self.kv_cache_bytes, 0)
        _at_least("--max-context", self.max_context, 0)
        if self.max_context == 1:
            raise ConfigError("--max-context must be at least 2: a prompt token and an output one")
        _at_least("--max-batch", self.max_batch, 1)
        _at_least("--chunk-tokens", self.chunk_tokens, 1)
        _at_least("--threads", self.threads, 0)
        _nice("--nice", self.nice)
        if not 0 < self.gpu_memory <= 1:
            raise ConfigError(f"--gpu-memory must be above 0 and at most 1, not {self.gpu_memory}")
        if self.simulate:
            SimulatedSpeed.parse(self.simulate)
            if self.device.startswith("cuda"):
                raise ConfigError(f"--simulate computes nothing: leave --device {self.device} out")


def new_incarnation(name: str) -> str:
    """An id for one run of the router or worker called `name`, which it begins with.

    The name stays when a process is restarted, the id does not. Raises ConfigError.
    """
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,63}", name):
        raise ConfigError(f"--name {name!r}: use up to 63 letters, digits, and . _ -")
    return f"{name}-{uuid.uuid4().hex[:8]}"


@dataclass(frozen=True)
class WorkerConfig:
    """One prefill or decode worker."""

    role: str
    engine: EngineConfig = field(default_factory=EngineConfig)
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""  # host:port others use; empty: host and the bound port
    model_name: str = ""  # empty: the model directory's name
    transport: str = "auto"
    otlp: str | None = None
    drain_s: float = 30.0
    lease_s: float = 30.0
    transfer_timeout_s: float = 10.0
    metrics_port: int | None = None  # None: not served; 0: a free one
    trace_sample: float = 1.0  # of traces that begin here
    price_per_hour: float = 0.0  # of this worker, in whatever currency
    incarnation: str = field(default_factory=lambda: new_incarnation("worker"))

    def __post_init__(self) -> None:
        _choice("role", self.role, ("prefill", "decode"))
        _choice("--transport", self.transport, TRANSPORTS)
        _port(self.port)
        _at_least("--drain-timeout", self.drain_s, 0)
        _at_least("--reservation-lease", self.lease_s, 0.01)
        _at_least("--transfer-timeout", self.transfer_timeout_s, 0.001)
        _metrics(self.metrics_port, self.trace_sample)
        _at_least("--worker-price", self.price_per_hour, 0)
        if self.advertise:
            split_address(self.advertise, "--advertise")

    @property
    def served_name(self) -> str:
        """The model name that requests use."""
        return self.model_name or default_model_name(self.engine.model)


@dataclass(frozen=True)
class RouterLimits:
    """What a router accepts and how long it waits: the same for every router of a cluster."""

    max_queue: int = 1024
    max_attempts: int = 4
    default_timeout_s: float = 600.0
    ttft_target_ms: int = 0  # 0: none; a request's own goes first
    max_prompt_tokens: int = 0  # 0: what the context holds
    tenants_file: Path | None = None  # None: one tenant, no keys, no limits
    silence_s: float = 1.5  # until a worker without a heartbeat counts as lost
    stall_s: float = 10.0  # for one engine step, unless the worker's steps are long
    recovery_s: float = 30.0  # that accepted requests wait for a worker to come back
    slos: tuple[str, ...] = ()  # what classes of callers were promised: "NAME:ttft=0.5,tpot=0.05"
    trace_slow_s: float = 2.0  # to the first token: such a request's trace is kept in any case
    # Measured (python -m benchmarks local_prefill) on two CPU cores: up to 64 tokens decode is
    # sooner and the streams beside it do not notice; from 80 on they do. Half of that, because
    # models whose prompts take longer, next to their steps, disturb streams sooner.
    local_prefill_max_tokens: int = 32

    def __post_init__(self) -> None:
        _at_least("--max-queue", self.max_queue, 1)
        _at_least("--max-attempts", self.max_attempts, 1)
        _at_least("--local-prefill-max", self.local_prefill_max_tokens, 0)
        _at_least("--default-timeout", self.default_timeout_s, 0.001)
        _at_least("--ttft-target", self.ttft_target_ms, 0)
        _at_least("--max-prompt-tokens", self.max_prompt_tokens, 0)
        _at_least("--silence", self.silence_s, 0.3)
        _at_least("--stall", self.stall_s, 0.1)
        _at_least("--recovery-timeout", self.recovery_s, 0)
        _at_least("--trace-slow", self.trace_slow_s, 0)
        slo.parse_all(self.slos)


@dataclass(frozen=True)
class RouterConfig(RouterLimits):
    """One router."""

    model: str = "demo"
    random_weights: bool = False  # the model is a config: without a tokenizer, token ids only
    model_name: str = ""
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    host: str = "127.0.0.1"
    port: int = 7700
    http_port: int = 0  # of the OpenAI API; 0: none
    metrics_port: int | None = None  # None: not served; 0: a free one
    trace_sample: float = 1.0  # of traces that begin here
    otlp: str | None = None
    drain_s: float = 30.0
    incarnation: str = field(default_factory=lambda: new_incarnation("router"))

    def __post_init__(self) -> None:
        super().__post_init__()
        _port(self.port)
        _http_port(self.http_port)
        _metrics(self.metrics_port, self.trace_sample)
        _at_least("--drain-timeout", self.drain_s, 0)

    @property
    def served_name(self) -> str:
        """The model name that requests use."""
        return self.model_name or default_model_name(self.model)


@dataclass(frozen=True)
class ClusterConfig:
    """A whole cluster on this machine, as `baton up` starts it."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    limits: RouterLimits = field(default_factory=RouterLimits)
    prefill: int = 1
    decode: int = 1
    # Prompts stand back for streams, and for whatever serves both. Not far: beside a busy process
    # at 0 a core gives 39 % of its time to 2, but 10 % to 10: prompts took five times as long.
    prefill_nice: int = 2
    routers: int = 1
    host: str = "127.0.0.1"  # the routers'; workers and etcd listen on loopback
    port: int = 7700  # the first router's, the others follow; 0: free ones
    http_port: int | None = (
        None  # the same for HTTP; 0: none; None: HTTP_PORT, or none if port is 0
    )
    transport: str = "auto"
    etcd: str | None = None  # None: start an embedded one
    etcd_user: str = ""
    etcd_password_file: Path | None = None
    etcd_ca: Path | None = None
    etcd_cert: Path | None = None
    etcd_key: Path | None = None
    cluster: str = "default"
    model_name: str = ""  # empty: the model directory's name
    metrics_port: int | None = None  # the first router's, all others follow; 0: free ones
    trace_sample: float = 1.0
    price_per_hour: float = 0.0  # of each worker
    otlp: str | None = None
    trace: bool = False
    keep_traces: int = 1000  # of the last requests, for `baton trace`; 0: none
    restart: bool = True
    drain_s: float = 5.0
    log_level: str = "warning"
    log_format: str = "text"

    def __post_init__(self) -> None:
        _port(self.port)
        _at_least("--drain-timeout", self.drain_s, 0)
        _at_least("--routers", self.routers, 1)
        _at_least("--keep-traces", self.keep_traces, 0)
        _nice("--prefill-nice", self.prefill_nice)
        if self.port + self.routers - 1 > MAX_PORT:
            raise ConfigError(f"--port {self.port} leaves no ports for {self.routers} routers")
        _http_port(self.http_port)
        if self.first_http_port + self.routers - 1 > MAX_PORT:
            raise ConfigError(f"--http-port {self.http_port} leaves no ports for all routers")
        for option, workers in (("--prefill", self.prefill), ("--decode", self.decode)):
            if workers < 1:
                raise ConfigError(
                    f"{option} must be at least 1, not {workers}: "
                    "a cluster serves with a worker of each role"
                )
        _choice("--transport", self.transport, TRANSPORTS)
        _metrics(self.metrics_port, self.trace_sample)
        _at_least("--worker-price", self.price_per_hour, 0)
        if self.etcd is None and any(self._etcd_access.values()):
            raise ConfigError("--etcd-user, -ca, -cert and their like need --etcd HOST:PORT")
        self.registry(self.etcd or RegistryConfig.etcd)

    @property
    def first_http_port(self) -> int:
        """Where the first router serves HTTP; 0: nowhere."""
        default = HTTP_PORT if self.port else 0
        return default if self.http_port is None else self.http_port

    def registry(self, etcd: str) -> RegistryConfig:
        """The registry's settings when etcd is at `etcd`; raises ConfigError."""
        return RegistryConfig(etcd=etcd, cluster=self.cluster, **self._etcd_access)

    @property
    def _etcd_access(self) -> dict[str, Any]:
        return {
            "user": self.etcd_user,
            "password_file": self.etcd_password_file,
            "ca_file": self.etcd_ca,
            "cert_file": self.etcd_cert,
            "key_file": self.etcd_key,
        }
