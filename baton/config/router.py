"""Settings of a router."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from baton.config import options, slo
from baton.config.api import ApiConfig
from baton.config.model import ModelSource
from baton.config.options import option, part
from baton.config.registry import RegistryConfig
from baton.config.service import NAME_TEXT, ServiceConfig, TlsConfig, new_incarnation
from baton.errors import ConfigError

MAX_TTFT_TARGET_S = 60  # a larger value was meant in milliseconds
TTFT_HINT = "it is in seconds, 0.5 for 500 ms"
DEFAULT_MAX_ITL_S = 0.05
# After this many tokens of an attempt its request is not blamed for a failed engine step.
PROVING_TOKENS = 16
MAX_STREAM_INTERVAL = 64  # these tokens may have to be computed again when a worker dies
TOOL_PARSERS = (
    "auto", "none", "hermes", "llama3", "mistral", "deepseek_v3", "deepseek_v31", "deepseek_v32",
    "functiongemma", "gemma4", "glm45", "granite", "harmony", "jamba", "kimi_k2", "lfm2",
    "minimax_m2", "nemotron", "olmo3", "phi4_mini", "pythonic", "qwen3_coder", "seed_oss",
)  # fmt: skip
REASONING_PARSERS = (
    "auto", "none", "apriel", "deepseek_r1", "ernie45", "gemma4", "granite", "hunyuan_a13b",
    "mistral", "olmo3", "qwen3", "seed_oss",
)  # fmt: skip
ROUTER_PROCESSES_TEXT = "processes of each router, at the same ports: one for each core it may use"
MAX_ROUTER_PROCESSES = 64


def check_api_key(key: str, source: str = "an API key") -> None:
    """Raises ConfigError, without the key, where it cannot be sent in a header."""
    if not isinstance(key, str) or not re.fullmatch("[!-~]+", key):
        raise ConfigError(f"{source} must be ASCII without spaces, and not empty")


def api_key_digest(key: str) -> str:
    """The form in which settings hold a key, "sha256:" and its digest, so that nothing shows it.

    A digest is returned as it is. Raises ConfigError, whose text does not contain the key.
    """
    if re.fullmatch(r"sha256:[0-9a-fA-F]{64}", key):
        return key
    check_api_key(key)
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


@dataclass(frozen=True)
class RouterLimits:
    """What a router accepts and how long it waits; equal for all routers of a cluster."""

    GROUP: ClassVar[str] = "limits"
    max_queue: int = option(
        1024,
        "--max-queue REQUESTS",
        "most waiting requests; when full, a new one is refused or displaces the last one of the "
        "tenant with the most",
        least=1,
    )
    max_attempts: int = option(
        8,
        "--max-attempts N",
        f"most attempts of a request before it fails; each {PROVING_TOKENS} delivered tokens allow "
        "one more",
        least=1,
    )
    default_timeout_s: float = option(
        600.0, "--default-timeout SECONDS", "deadline of requests that do not set one", least=0.001
    )
    ttft_target_s: float = option(
        0.0,
        "--ttft-target SECONDS",
        "refuse requests at once whose first token is predicted to take longer than this (default: "
        "no target)",
        most=MAX_TTFT_TARGET_S,
        hint=TTFT_HINT,
    )
    stream_interval: int = option(
        1,
        "--stream-interval TOKENS",
        "fewest tokens of a stream that are sent together, except the first and the last; larger "
        "values lower the CPU cost of a stream; requests may override it, and stop strings do",
        least=1,
        most=MAX_STREAM_INTERVAL,
    )
    max_prompt_tokens: int = option(
        0, "--max-prompt-tokens TOKENS", "longest prompt (default: the context length)"
    )
    unknown_tools: str = option(
        "drop",
        "--unknown-tools",
        "tools of /v1/responses and /v1/messages that are no functions: drop names them in a "
        "header of the answer, refuse answers 400",
        choices=("drop", "refuse"),
    )
    tool_parser: str = option(
        "auto",
        "--tool-parser",
        "format of tool calls in a chat's output (default: by the chat template)",
        choices=TOOL_PARSERS,
    )
    reasoning_parser: str = option(
        "auto",
        "--reasoning-parser",
        "format of reasoning before the answer (default: by the chat template)",
        choices=REASONING_PARSERS,
    )
    chat_template: Path | None = option(
        None,
        "--chat-template FILE",
        "jinja file with the chat template, instead of the checkpoint's; for a router of one model",
    )
    score_tokens: str = option(
        "",
        "--score-tokens NO,YES",
        "texts of the tokens with which a reranker answers that a document is not relevant, and "
        "that it is: no,yes for Qwen3-Reranker (default: as the checkpoint's LogitScore module or "
        "classification head says)",
    )
    text_processes: int = option(
        2,
        "--text-processes N",
        "processes that render and tokenize prompts of over 4 KiB, each with its own tokenizer; "
        "they start with the first long prompt",
        least=1,
        most=64,
    )
    tenants_file: Path | None = option(
        None,
        "--tenants FILE",
        "TOML file with tenants, their keys, shares and limits (default: one tenant, unlimited)",
    )
    api_keys: tuple[str, ...] = option(
        (),
        "--api-key KEY",
        "key that every request and operator must show, instead of --tenants; may be repeated, and "
        "given as sha256:DIGEST. Other users see command lines: prefer BATON_OPT_API_KEY",
        api_key_digest,
        many=True,
    )
    trust_traceparent: bool = option(
        False,
        "--trust-traceparent",
        "with --tenants: let callers' trace ids and sampling flags apply (they always do without "
        "--tenants)",
    )
    silence_s: float = option(
        1.5,
        "--silence SECONDS",
        "longest time without a heartbeat before a worker counts as lost",
        least=0.3,
    )
    stall_s: float = option(
        10.0,
        "--stall SECONDS",
        "longest time an engine step may take before its worker counts as stalled, unless its "
        "steps usually take that long",
        least=0.1,
    )
    recovery_s: float = option(
        30.0,
        "--recovery-timeout SECONDS",
        "longest time requests wait for a lost worker to come back",
    )
    slos: tuple[str, ...] = option(
        (),
        "--slo [NAME:]ttft=S,tpot=S",
        "targets in seconds of a class of requests, for goodput metrics (also e2e=S); may be "
        "repeated",
        str,
        many=True,
    )
    trace_slow_s: float = option(
        2.0,
        "--trace-slow SECONDS",
        "time to first token from which a request's trace is always kept",
    )
    access_log: float = option(
        0.0,
        "--access-log SHARE",
        "share of requests that get a line in the log when they have ended, 0 to 1: tenant, model, "
        "status, tokens, TTFT (default: 0, none)",
        group="telemetry",
        most=1.0,
    )
    trace_content: int = option(
        0,
        "--trace-content CHARACTERS",
        "most characters of each prompt and answer to record in the request's span",
        most=1 << 16,
    )
    # Measured on two CPU cores: up to 64 tokens decode is sooner and the streams beside it do not
    # notice; from 80 on they do. Half of that, because models whose prompts take longer, next to
    # their steps, disturb streams sooner.
    local_prefill_max_tokens: int = option(
        32,
        "--local-prefill-max TOKENS",
        "longest uncached rest of a prompt that the decode worker always computes itself; it "
        "computes longer ones while prefill workers are busy; 0 sends all to prefill workers",
    )

    def __post_init__(self) -> None:
        options.check(self)
        slo.parse_all(self.slos)

    @property
    def max_itl_s(self) -> float:
        """Longest time between two tokens of a stream while decode computes a prompt beside it:
        the shortest TPOT target, by default what a fast reader does not notice."""
        targets = (one.tpot_s for one in slo.parse_all(self.slos) if one.tpot_s < math.inf)
        return min(targets, default=DEFAULT_MAX_ITL_S)


@dataclass(frozen=True)
class RouterConfig(TlsConfig, ServiceConfig):
    """One router. It needs the models' tokenizers, which may be missing with random weights."""

    GROUP: ClassVar[str] = "service"
    models: tuple[str, ...] = option(
        ("demo",),
        "--model [NAME[@VERSION]=]DIR",
        "Hugging Face directory with the tokenizer, chat template and generation settings of a "
        "model, or 'demo' for the built-in model; may be repeated. NAME is what workers have as "
        "--model-name (default: --model-name, else the directory's name); it serves all versions "
        "whose tokenizer is this one, or with @VERSION that version only",
        str,
        many=True,
        group="model",
    )
    random_weights: bool = option(
        False,
        "--random-weights CONFIG",
        "the model of workers with --random-weights; without a tokenizer beside it prompts must "
        "be token ids",
        str,
        sets="models",
        group="model",
    )
    limits: RouterLimits = part(RouterLimits)
    api: ApiConfig = part(ApiConfig)
    registry: RegistryConfig = part(RegistryConfig)
    port: int = option(7700, "--port PORT", "port to listen on")
    http_port: int = option(
        0, "--http-port PORT", "port of the OpenAI-compatible HTTP API (default: 0, none)"
    )
    admin_keys: tuple[str, ...] = option(
        (),
        "--admin-key sha256:DIGEST",
        "with --tenants: digest of an operator's key, in addition to the file's [admin]; may be "
        "repeated",
        str,
        many=True,
    )
    router_processes: int = option(
        1, "--router-processes N", ROUTER_PROCESSES_TEXT, least=1, most=MAX_ROUTER_PROCESSES
    )
    name: str = option("", "--name NAME", NAME_TEXT)
    incarnation: str = field(default_factory=lambda: new_incarnation("router"))

    def __post_init__(self) -> None:
        options.check(self)
        for flag, value in (
            ("--batch-dir", self.api.batch_dir),
            ("--response-dir", self.api.response_dir),
            ("--cors-origins", self.api.cors_origins),
            ("--allowed-hosts", self.api.allowed_hosts),
        ):
            if value and not self.http_port:
                raise ConfigError(f"{flag} is for the HTTP API: give --http-port PORT too")

        if self.model_name and len(self.models) > 1:
            raise ConfigError("--model-name is for one model: write --model NAME=DIR for each")

    @property
    def sources(self) -> list[ModelSource]:
        """The models, with names; the first is that of requests without a name."""
        found = [ModelSource.parse(text) for text in self.models]
        return [replace(one, name=one.name or self.model_name or one.served_name) for one in found]
