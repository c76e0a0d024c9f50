"""Settings: one frozen dataclass for each kind of process, validated once, at the start.

Each field declares its option (`baton.config.options`); the command line (`baton.cli`) fills them
in, and nothing else reads options or the environment.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from baton.config import options, slo
from baton.config.options import MAX_PORT, numbers, option, part
from baton.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")  # or one GPU by its number: cuda:1
QUANTIZATIONS = ("none", "int8", "fp8", "int4")
KV_DTYPES = ("auto", "int8", "fp8")
KERNELS = ("auto", "native", "torch", "triton")
TRANSPORTS = ("auto", "shm", "gloo", "nccl", "cuda_ipc")
LOG_LEVELS = ("debug", "info", "warning", "error")
CPU_KV_CACHE_BYTES = 512 << 20  # on a CPU, without --kv-cache or --kv-blocks
MAX_TTFT_TARGET_S = 60  # who writes more means milliseconds
HTTP_PORT = 7780
_ONE_DECODE = "only decode workers generate tokens"
# Where processes that write into each other's memory meet; containers share it with `ipc: host`.
SHARED_FOLDER = Path("/dev/shm")  # noqa: S108 (names in it cannot be guessed, nor taken by others)
DEMO_MODEL = Path(__file__).parent.parent / "demo_model"
TTFT_HINT = "it is in seconds, 0.5 for 500 ms"
# Helps of options that two processes declare.
LOG_LEVEL_TEXT = "of log lines on stderr"
DRAIN_TEXT = "for running requests to end after SIGTERM"
ROUTER_PROCESSES_TEXT = "processes of each router, at the same ports: one for each core it may use"
MAX_ROUTER_PROCESSES = 64
# Tokens of an attempt after which its request is not taken for the cause of failed steps.
PROVING_TOKENS = 16
MAX_STREAM_INTERVAL = 64  # so many may have to be computed again when a worker dies
MAX_TP = 64
NAME_TEXT = (
    "of this process in status, traces and logs, which append an id of its run to it "
    "(default: its role)"
)


def model_path(model: str) -> Path:
    """The directory (or, for random weights, the config file) that `--model` names.

    Raises ConfigError when there is nothing there, with the way to get it for a name on the Hub.
    """
    path = DEMO_MODEL if model == "demo" else Path(model).expanduser()
    if model and path.exists():
        return path.resolve()
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not model.startswith("."):
        directory = model.partition("/")[2]
        raise ConfigError(
            f"model {model!r} not found: it is no directory here. If it is a name on the Hugging "
            f"Face Hub: `hf download {model} --local-dir {directory}`, then --model {directory}"
        )
    raise ConfigError(
        f"model {model!r} not found: give a Hugging Face model directory (config.json, "
        "*.safetensors, tokenizer.json) or 'demo'"
    )


def default_model_name(model: str) -> str:
    """The name a model is served under when none is given: its directory's, or its config's."""
    if model == "demo":
        return "demo"
    path = model_path(model)
    return path.parent.name if path.name == "config.json" else path.name.removesuffix(".json")


def split_address(address: str, flag: str = "address") -> tuple[str, int]:
    """(host, port) of "host:port"; raises ConfigError naming the flag."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > MAX_PORT:
        raise ConfigError(f"{flag} must be HOST:PORT, not {address!r}")
    return host, int(port)


def host_id() -> str:
    """Equal for two processes exactly when one can have the other's memory: they are on one
    machine, share its `SHARED_FOLDER`, and run as one user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    folder = "none"  # and then no transport is offered that needs it
    if SHARED_FOLDER.is_dir():
        found = SHARED_FOLDER.stat()
        folder = f"shm:{found.st_dev}:{found.st_ino}"
    return f"{boot}/{folder}/{os.getuid()}"


def kv_heads_of(rank: int, ranks: int, num_kv_heads: int) -> range:
    """The KV heads of a model that a rank holds; where there are fewer than ranks, several hold
    one."""
    if ranks <= num_kv_heads:
        return range(num_kv_heads * rank // ranks, num_kv_heads * (rank + 1) // ranks)
    first = rank * num_kv_heads // ranks
    return range(first, first + 1)


def device_name(text: str) -> str:
    """One of `DEVICES`, or a GPU by its number, as cuda:1. Raises ConfigError."""
    if text not in DEVICES and not re.fullmatch(r"cuda:\d+", text):
        raise ConfigError(f"{text!r} is no device: write {', '.join(DEVICES)} or cuda:1")
    return text


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
    """Where members are kept, how a process proves itself there, and which cluster is meant."""

    GROUP: ClassVar[str] = "registry"
    etcd: str = option(
        "127.0.0.1:2379",
        "--etcd HOST:PORT",
        "etcd's address, several separated by commas; https:// in front for TLS",
    )
    lease_ttl_s: int = option(
        5, "--lease-ttl SECONDS", "until a member without a heartbeat counts as gone", least=1
    )
    cluster: str = option("default", "--cluster NAME", "keeps clusters on one etcd apart")
    user: str = option("", "--etcd-user NAME", "user of etcd")
    password_file: Path | None = option(
        None, "--etcd-password-file FILE", "file with the user's password"
    )
    ca_file: Path | None = option(
        None, "--etcd-ca FILE", "PEM file with the authority that signed etcd's certificate"
    )
    cert_file: Path | None = option(None, "--etcd-cert FILE", "PEM file with our certificate")
    key_file: Path | None = option(None, "--etcd-key FILE", "PEM file with our certificate's key")

    def __post_init__(self) -> None:
        options.check(self)
        for address in self.etcd.split(","):
            split_address(address.removeprefix("http://").removeprefix("https://"), "--etcd")
        if not self.cluster or "/" in self.cluster:
            raise ConfigError(f"--cluster must be a name without '/', not {self.cluster!r}")
        if bool(self.cert_file) != bool(self.key_file):
            raise ConfigError("--etcd-cert and --etcd-key go together")

    @property
    def workers_prefix(self) -> str:
        """Every worker's key begins with this."""
        return f"/baton/v1/{self.cluster}/workers/"

    @property
    def ticket_keys_prefix(self) -> str:
        """The key of what routers sign tickets with begins with this."""
        return f"/baton/v1/{self.cluster}/ticket-keys/"

    @property
    def ranks_prefix(self) -> str:
        """The key of every host with ranks of a worker that is elsewhere begins with this."""
        return f"/baton/v1/{self.cluster}/ranks/"


@dataclass(frozen=True)
class ServedModel:
    """Which model, real or with made-up weights."""

    GROUP: ClassVar[str] = "model"
    model: str = option(
        "demo", "--model DIR", "Hugging Face model directory, or 'demo' for the built-in one"
    )
    random_weights: bool = option(
        False,
        "--random-weights CONFIG",
        "for benchmarks: make weights up for this config.json or directory; without a tokenizer "
        "beside it prompts are token ids only",
        str,
        sets="model",
    )


@dataclass(frozen=True)
class CacheConfig(ServedModel):
    """The KV cache and the batch of an engine. Counts are tokens unless the name says otherwise."""

    GROUP: ClassVar[str] = "KV cache and batch"
    block_size: int = option(16, "--block-size TOKENS", "in one KV block", least=1)
    kv_blocks: int = option(
        0, "--kv-blocks BLOCKS", "size of the KV cache instead (default: what fits --kv-cache)"
    )
    kv_cache_bytes: int = option(
        0, "--kv-cache SIZE", "for KV, as 2GiB (default: 512MiB on a CPU, else by --gpu-memory)"
    )
    kv_dtype: str = option(
        "auto",
        "--kv-dtype",
        "8 bits halve memory and transfer, a little less exact; fp8 on GPUs (default: --dtype)",
        choices=KV_DTYPES,
    )
    max_context: int = option(
        0, "--max-context TOKENS", "of prompt and output together (default: the model's)"
    )
    max_batch: int = option(64, "--max-batch SEQUENCES", "in one engine step", least=1)
    chunk_ms: float = option(
        0.0,
        "--chunk-ms MS",
        "that a chunk of a prompt should take at the measured rate: as long a short prompt waits "
        "for a long one; at least 64 tokens, 256 on a GPU (default: 60 on a CPU, 25 on a GPU, 100 "
        "on a prefill worker's)",
    )
    chunk_tokens: int = option(
        2048, "--chunk-tokens TOKENS", "of prompts and drafts in one engine step, at most", least=1
    )
    prefix_cache: bool = option(True, "--prefix-cache", "keep the KV of prompts that have run")


@dataclass(frozen=True)
class EngineConfig(CacheConfig):
    """How one engine runs a model."""

    GROUP: ClassVar[str] = "engine"
    dtype: str = option("auto", "--dtype", "of weights and KV", choices=DTYPES)
    device: str = option(
        "auto",
        "--device auto|cpu|cuda|cuda:N",
        "auto is a GPU where torch sees one, cuda the first, cuda:N the Nth from 0; `baton up` "
        "spreads its workers over all GPUs unless given a number",
        device_name,
    )
    threads: int = option(
        0, "--threads N", "CPU threads (default: as many as its --cpus, else torch's choice)"
    )
    cpus: tuple[int, ...] = option(
        (),
        "--cpus 0,1",
        "pin compute threads to these cores (default: not pinned, but for ranks of --tp on CPUs "
        "whose --threads fill all cores)",
        numbers,
    )
    tp: int = option(
        1,
        "--tp RANKS",
        "tensor parallelism: processes that compute each step together, on this host's CPUs, or on "
        "its GPUs from --device on, one each; --threads and --cpus are divided among them",
        least=1,
        most=MAX_TP,
    )
    expert_parallel: bool = option(
        False,
        "--expert-parallel",
        "of a mixture of experts each rank of --tp holds some whole, and not a part of every one: "
        "where experts cannot be cut evenly, or parts of them would be too small",
    )
    tp_backend: str = option(
        "shm",
        "--tp-backend",
        "how ranks on CPUs add up: shm through memory that they share, over one KV pool, with "
        "native kernels; gloo through torch.distributed, with a KV pool for each rank's heads, as "
        "ranks on GPUs have, which add up through NCCL",
        choices=("shm", "gloo"),
    )
    nice: int = option(0, "--nice N", "niceness of compute threads, up to 19", most=19)
    simulate: str = option(
        "",
        "--simulate TOKENS_PER_S,STEP_MS",
        "compute nothing and take as long as a model of this prefill rate and decode step (a third "
        "number: ms more per sequence in it), to try routing and failures; blocks, caches and "
        "transfers are real, the tokens mean nothing",
    )
    quantization: str = option(
        "none",
        "--quantization",
        "weights and activations in 8 bits, faster, a little less exact: int8 anywhere, fp8 on "
        "GPUs that compute with it; int4 for weights alone, the smallest and least exact",
        choices=QUANTIZATIONS,
    )
    lora: Path | None = option(
        None,
        "--lora DIR",
        "a LoRA adapter in PEFT's format, added to the model's weights as they are read",
        Path,
    )
    kernels: str = option(
        "auto",
        "--kernels",
        "on a CPU native (compiled on first use by g++), on a GPU triton, or torch, which needs "
        "nothing and is slow on a GPU (default: the first where it can be had)",
        choices=KERNELS,
    )
    speculate: int = option(
        0,
        "--speculate TOKENS",
        "propose up to so many tokens a step from the text so far (n-grams) and verify them at "
        "once: the same tokens, sooner where texts repeat themselves (default: 0, none)",
    )
    gpu_memory: float = option(
        0.9,
        "--gpu-memory SHARE",
        "of a GPU, for weights, activations, graphs, KV; `baton up` divides it among workers",
        least=0.001,
        most=1,
    )
    graphs: bool = option(True, "--graphs", "on a GPU: replay steps as CUDA graphs")
    overlap: bool = option(True, "--overlap", "on a GPU: prepare a step while another runs")
    prefill_only: bool = False  # a prefill worker's: no sequence gets more than its first token

    def __post_init__(self) -> None:
        options.check(self)
        if self.max_context == 1:
            raise ConfigError("--max-context must be at least 2: a prompt token and an output one")
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


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """What a process reports of itself."""

    GROUP: ClassVar[str] = "telemetry"
    otlp: str | None = option(
        None,
        "--otlp URL",
        "export traces to this OTLP/gRPC address, as http://HOST:4317; several separated by commas",
    )
    trace_sample: float = option(
        1.0,
        "--trace-sample SHARE",
        "of traces to export; a caller's trace decides for itself, and failed and slow requests "
        "are exported in any case",
        most=1,
    )
    metrics_port: int | None = option(
        None, "--metrics-port PORT", "at http://HOST:PORT/metrics; 0: a free one (default: none)"
    )
    log_level: str = option("info", "--log-level", LOG_LEVEL_TEXT, choices=LOG_LEVELS)
    log_format: str = option(
        "text", "--log-format", "lines for people, or JSON objects", choices=("text", "json")
    )


@dataclass(frozen=True, kw_only=True)
class TlsConfig:
    """How a process's ports are encrypted, and who may call them; all files are PEM."""

    GROUP: ClassVar[str] = "TLS"
    tls_cert: Path | None = option(
        None, "--tls-cert FILE", "this process's certificate: its ports take nothing but TLS then"
    )
    tls_key: Path | None = option(None, "--tls-key FILE", "the certificate's private key")
    tls_client_ca: Path | None = option(
        None,
        "--tls-client-ca FILE",
        "callers need a certificate that this authority signed; on workers, one of their role",
    )
    tls_ca: Path | None = option(
        None,
        "--tls-ca FILE",
        "the authority of the other processes' certificates (default: --tls-client-ca)",
    )
    health_port: int | None = option(
        None,
        "--health-port PORT",
        "for probes, never with TLS: GET /health is 200 while the process is alive, /ready while "
        "it takes work; nothing else is there (default: none)",
    )


@dataclass(frozen=True, kw_only=True)
class ServiceConfig(TelemetryConfig):
    """What every service of a cluster has."""

    GROUP: ClassVar[str] = "service"
    host: str = option("127.0.0.1", "--host", "address to listen on")
    insecure: bool = option(
        False, "--insecure", "listen without TLS on an address that other machines can reach"
    )
    model_name: str = option(
        "", "--model-name NAME", "name that requests use (default: the model directory's)"
    )
    drain_s: float = option(30.0, "--drain-timeout SECONDS", DRAIN_TEXT)


@dataclass(frozen=True, kw_only=True)
class WorkerServiceConfig(ServiceConfig):
    """What every worker of a cluster has."""

    transport: str = option(
        "auto", "--transport", "for KV blocks; auto: the fastest both have", choices=TRANSPORTS
    )
    price_per_hour: float = option(
        0.0, "--worker-price PRICE", "of a worker for an hour, in any currency, for cost metrics"
    )


@dataclass(frozen=True)
class WorkerConfig(TlsConfig, WorkerServiceConfig):
    """One prefill or decode worker."""

    role: str  # prefill or decode
    engine: EngineConfig = part(EngineConfig)
    registry: RegistryConfig = part(RegistryConfig)
    port: int = option(0, "--port PORT", "port to listen on (default: a free one)")
    advertise: str = option(
        "", "--advertise HOST:PORT", "what others reach it at (default: --host and the port)"
    )
    kv_host: str = option(
        "",
        "--kv-host ADDRESS",
        "ours on the network for KV over Gloo, and where links over NCCL are set up, whose data go "
        "by NCCL_SOCKET_IFNAME (default: --advertise's host)",
    )
    nnodes: int = option(
        1,
        "--nnodes HOSTS",
        "hosts of this worker, each with its share of the --tp ranks: one process on each, with "
        "the same --name; on CPUs with --tp-backend gloo",
        least=1,
        most=MAX_TP,
    )
    node_rank: int = option(
        0,
        "--node-rank N",
        "which of them this is: 0 is the worker, which others reach; the rest have its ranks, and "
        "of their other options those of the model's place, device, cores and addresses count",
    )
    lease_s: float = option(
        30.0, "--reservation-lease SECONDS", "for a handoff; then its blocks are freed", least=0.01
    )
    transfer_timeout_s: float = option(
        10.0, "--transfer-timeout SECONDS", "for one transfer of KV blocks", least=0.001
    )
    name: str = option("", "--name NAME", NAME_TEXT)
    incarnation: str = field(default_factory=lambda: new_incarnation("worker"))

    def __post_init__(self) -> None:
        options.check(self)
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


DEFAULT_MAX_ITL_S = 0.05
TOOL_PARSERS = ("auto", "none", "hermes", "llama3", "mistral")
REASONING_PARSERS = ("auto", "none", "qwen3", "deepseek_r1", "mistral")


def api_key_digest(key: str) -> str:
    """A key as settings keep it, so that no process shows it: sha256: and a digest, which stays.

    Raises ConfigError, without the key.
    """
    if re.fullmatch(r"sha256:[0-9a-fA-F]{64}", key):
        return key
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError("an API key must be ASCII without spaces")
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


@dataclass(frozen=True)
class RouterLimits:
    """What a router accepts and how long it waits: the same for every router of a cluster."""

    GROUP: ClassVar[str] = "limits"
    max_queue: int = option(
        1024,
        "--max-queue REQUESTS",
        "waiting; when full, one more is refused at once, or displaces the last one of the tenant "
        "that has most",
        least=1,
    )
    max_attempts: int = option(
        8,
        "--max-attempts N",
        f"before a request fails; each {PROVING_TOKENS} tokens delivered allow one more",
        least=1,
    )
    default_timeout_s: float = option(
        600.0, "--default-timeout SECONDS", "for requests without a deadline", least=0.001
    )
    ttft_target_s: float = option(
        0.0,
        "--ttft-target SECONDS",
        "refuse at once what cannot have its first token in this time (default: no target)",
        most=MAX_TTFT_TARGET_S,
        hint=TTFT_HINT,
    )
    stream_interval: int = option(
        1,
        "--stream-interval TOKENS",
        "of a stream come together, at least, but for the first and the last, unless a request or "
        "its stop strings ask for others; the more, the less a stream costs router and workers",
        least=1,
        most=MAX_STREAM_INTERVAL,
    )
    max_prompt_tokens: int = option(
        0, "--max-prompt-tokens TOKENS", "of a prompt (default: what the context holds)"
    )
    tool_parser: str = option(
        "auto",
        "--tool-parser",
        "for tool calls in a chat's output (default: by the chat template)",
        choices=TOOL_PARSERS,
    )
    reasoning_parser: str = option(
        "auto",
        "--reasoning-parser",
        "for what a model thinks before it answers (default: by the chat template)",
        choices=REASONING_PARSERS,
    )
    text_processes: int = option(
        2,
        "--text-processes N",
        "that render and tokenize prompts of over 4 KiB beside the router, each with a tokenizer "
        "of its own; they start when there is one",
        least=1,
        most=64,
    )
    tenants_file: Path | None = option(
        None, "--tenants FILE", "TOML: tenants, keys, shares, limits (default: one, unlimited)"
    )
    api_keys: tuple[str, ...] = option(
        (),
        "--api-key KEY",
        "that every request and operator must show, in place of --tenants; may be given as "
        "sha256:DIGEST. Other users see command lines: BATON_OPT_API_KEY is safer",
        api_key_digest,
        many=True,
    )
    trust_traceparent: bool = option(
        False,
        "--trust-traceparent",
        "with --tenants: requests join the traces that their callers name, who decide then what is "
        "exported (without --tenants they always do)",
    )
    silence_s: float = option(
        1.5, "--silence SECONDS", "without a heartbeat until a worker counts as lost", least=0.3
    )
    stall_s: float = option(
        10.0, "--stall SECONDS", "that an engine step may take if it is no usual one", least=0.1
    )
    recovery_s: float = option(
        30.0, "--recovery-timeout SECONDS", "that requests wait for a lost worker to come back"
    )
    slos: tuple[str, ...] = option(
        (),
        "--slo [NAME:]ttft=S,tpot=S",
        "count requests that met these targets (also e2e=S); once for each class",
        str,
        many=True,
    )
    trace_slow_s: float = option(
        2.0, "--trace-slow SECONDS", "to a first token: slower requests' traces are always kept"
    )
    trace_content: int = option(
        0,
        "--trace-content CHARACTERS",
        "of each prompt, and of each answer, that are written into the request's span",
        most=1 << 16,
    )
    # Measured on two CPU cores: up to 64 tokens decode is sooner and the streams beside it do not
    # notice; from 80 on they do. Half of that, because models whose prompts take longer, next to
    # their steps, disturb streams sooner.
    local_prefill_max_tokens: int = option(
        32,
        "--local-prefill-max TOKENS",
        "left of a prompt, that decode always computes; it computes more while prefill is busy, "
        "but nothing with 0",
    )

    def __post_init__(self) -> None:
        options.check(self)
        slo.parse_all(self.slos)

    @property
    def max_itl_s(self) -> float:
        """Between two tokens of a stream while decode computes a prompt beside it: the shortest
        TPOT that an SLO promises, or what a fast reader does not notice."""
        promised = (one.tpot_s for one in slo.parse_all(self.slos) if one.tpot_s < math.inf)
        return min(promised, default=DEFAULT_MAX_ITL_S)


def origins(text: str) -> tuple[str, ...]:
    """Origins of web pages, as browsers send them, or "*" alone. Raises ConfigError."""
    found = tuple(text.split(","))
    for origin in found:
        if not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[a-z0-9.:\[\]-]+", origin):
            raise ConfigError(
                f"{origin!r} is no origin: write https://chat.example or http://127.0.0.1:3000 as "
                "the browser sends it, without a path and in lower case, or *"
            )
    return found


def host_names(text: str) -> tuple[str, ...]:
    """Names of this server, as Host headers have them, or "*" alone. Raises ConfigError."""
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
    """What a router's API offers beside its model: the same for every router of a cluster."""

    GROUP: ClassVar[str] = "API"
    model_aliases: tuple[str, ...] = option(
        (), "--model-alias NAME", "one more name of the model in requests", str, many=True
    )
    cors_origins: tuple[str, ...] = option(
        (),
        "--cors-origins ORIGINS",
        "of web pages that may call the HTTP API (CORS), separated by commas, as "
        "https://chat.example; * is all (default: none)",
        origins,
    )
    generation_config: str = option(
        "auto",
        "--generation-config",
        "sampling settings of requests that give none: of the model's generation_config.json, or "
        "none of it",
        choices=("auto", "none"),
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "--allowed-hosts NAMES",
        "of this server that requests may name in their Host header, separated by commas, beside "
        "addresses and localhost; * is all (default: all, but on a loopback address none)",
        host_names,
    )
    max_http_requests: int = option(
        2048,
        "--max-http-requests N",
        "over HTTP at a time, waiting or running, in each process; one more is a 503",
        least=1,
    )
    max_http_connections: int = option(
        4096,
        "--max-http-connections N",
        "to each process, and at most half of the files that it may open (ulimit -n); one more is "
        "a 503",
        least=1,
    )
    batch_dir: Path | None = option(
        None,
        "--batch-dir DIR",
        "serve /v1/files and /v1/batches, and keep them here; routers of one machine may share it "
        "(default: neither)",
        Path,
    )
    batch_concurrency: int = option(
        32, "--batch-concurrency REQUESTS", "of all batches that run at once", least=1
    )
    batch_disk: int = option(
        4 << 30, "--batch-disk SIZE", "in --batch-dir, for each tenant (default: 4GiB)", least=1
    )

    def __post_init__(self) -> None:
        options.check(self)


@dataclass(frozen=True)
class RouterConfig(RouterLimits, ApiConfig, ServedModel, TlsConfig, ServiceConfig):
    """One router. Of a model it needs the tokenizer; made-up weights may come without one."""

    GROUP: ClassVar[str] = "service"
    registry: RegistryConfig = part(RegistryConfig)
    port: int = option(7700, "--port PORT", "port to listen on")
    http_port: int = option(
        0, "--http-port PORT", "serve OpenAI's HTTP API at this port too (default: 0, no)"
    )
    admin_keys: tuple[str, ...] = option(
        (),
        "--admin-key sha256:DIGEST",
        "with --tenants: of one more operator's key, beside those of its [admin]",
        str,
        many=True,
    )
    router_processes: int = option(
        1, "--router-processes N", ROUTER_PROCESSES_TEXT, least=1, most=MAX_ROUTER_PROCESSES
    )
    name: str = option("", "--name NAME", NAME_TEXT)
    incarnation: str = field(default_factory=lambda: new_incarnation("router"))

    def __post_init__(self) -> None:
        super().__post_init__()
        for flag, value in (
            ("--batch-dir", self.batch_dir),
            ("--cors-origins", self.cors_origins),
            ("--allowed-hosts", self.allowed_hosts),
        ):
            if value and not self.http_port:
                raise ConfigError(f"{flag} is for the HTTP API: give --http-port PORT too")

    @property
    def served_name(self) -> str:
        return self.model_name or default_model_name(self.model)


@dataclass(frozen=True)
class ClusterConfig(WorkerServiceConfig):
    """A whole cluster on this machine, as `baton up` starts it."""

    GROUP: ClassVar[str] = "cluster"
    engine: EngineConfig = part(EngineConfig, without=("cpus", "nice"))
    limits: RouterLimits = part(RouterLimits)
    api: ApiConfig = part(ApiConfig)
    etcd_access: RegistryConfig = part(RegistryConfig, without=("etcd", "lease_ttl_s"))
    prefill: int = option(
        1, "--prefill N", "prefill workers; with 0 decode workers compute prompts", least=0
    )
    decode: int = option(1, "--decode N", "decode workers", least=1, hint=_ONE_DECODE)
    prefill_tp: int = option(
        0, "--prefill-tp RANKS", "of prefill workers alone (default: --tp)", most=MAX_TP
    )
    decode_tp: int = option(
        0, "--decode-tp RANKS", "of decode workers alone (default: --tp)", most=MAX_TP
    )
    # Prompts give way to streams, and to whatever serves both. Not far: beside a busy process
    # at 0 a core gives 39 % of its time to 2, but 10 % to 10: prompts took five times as long.
    prefill_nice: int = option(
        2,
        "--prefill-nice N",
        "niceness of prefill workers, up to 19: they give way to decode workers and routers on the "
        "same cores, but to every other busy process too (at 10: a tenth of a core beside one)",
        most=19,
    )
    routers: int = option(1, "--routers N", "routers", least=1)
    router_processes: int = option(
        1, "--router-processes N", ROUTER_PROCESSES_TEXT, least=1, most=MAX_ROUTER_PROCESSES
    )
    host: str = option("127.0.0.1", "--host", "address routers listen on", group="service")
    port: int = option(
        7700, "--port PORT", "the first router's port, others follow; 0 takes free ones"
    )
    http_port: int | None = option(
        None,
        "--http-port PORT",
        f"OpenAI's HTTP API, like --port; 0: none (default: {HTTP_PORT}; none where --port is 0)",
        int,
    )
    etcd: str | None = option(
        None, "--etcd HOST:PORT", "use this etcd (default: start one for the cluster)"
    )
    tls: bool = option(
        False, "--tls", "encrypt all ports but etcd's, with certificates made for this run"
    )
    trace: bool = option(False, "--trace", "draw the trace of each request here")
    keep_traces: int = option(
        1000, "--keep-traces N", "last requests' traces to keep for `baton trace`, unless --otlp"
    )
    restart: bool = option(True, "--restart", "start a process that ended again, later each time")
    drain_s: float = option(5.0, "--drain-timeout SECONDS", DRAIN_TEXT, group="service")
    log_level: str = option(
        "warning", "--log-level", LOG_LEVEL_TEXT, choices=LOG_LEVELS, group="telemetry"
    )

    def __post_init__(self) -> None:
        options.check(self)
        if self.port + self.routers - 1 > MAX_PORT:
            raise ConfigError(f"--port {self.port} leaves no ports for {self.routers} routers")
        if self.first_http_port + self.routers - 1 > MAX_PORT:
            raise ConfigError(f"--http-port {self.http_port} leaves no ports for all routers")
        self.registry(self.etcd or RegistryConfig.etcd)
        if not self.etcd and self.etcd_access != RegistryConfig(cluster=self.etcd_access.cluster):
            raise ConfigError("--etcd-user, -ca, -cert and their like need --etcd HOST:PORT")

    @property
    def first_http_port(self) -> int:
        """Where the first router serves HTTP; 0: nowhere."""
        default = HTTP_PORT if self.port else 0
        return default if self.http_port is None else self.http_port

    @property
    def ranks(self) -> tuple[int, int]:
        """Of a prefill worker, and of a decode worker."""
        return self.prefill_tp or self.engine.tp, self.decode_tp or self.engine.tp

    def registry(self, etcd: str) -> RegistryConfig:
        """The registry's settings when etcd is at `etcd`; raises ConfigError."""
        return replace(self.etcd_access, etcd=etcd)
