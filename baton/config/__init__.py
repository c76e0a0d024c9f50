"""Settings: one frozen dataclass for each kind of process, validated once, at the start.

Each field declares its option (`baton.config.options`). Only the command line (`baton.cli`) reads
options and the environment.
"""

from baton.config.api import ApiConfig, host_names, origins
from baton.config.cluster import HTTP_PORT, ClusterConfig
from baton.config.engine import CPU_KV_CACHE_BYTES, EngineConfig, kv_heads_of
from baton.config.model import (
    CANARY_DEFAULTS,
    DEMO_MODEL,
    ModelSource,
    ServedModel,
    default_model_name,
    full_name,
    model_path,
    shares_text,
    shown_name,
)
from baton.config.options import join_address, split_address
from baton.config.planner import PlannerConfig
from baton.config.registry import RegistryConfig
from baton.config.router import (
    DEFAULT_MAX_ITL_S,
    MAX_STREAM_INTERVAL,
    MAX_TTFT_TARGET_S,
    PROVING_TOKENS,
    REASONING_PARSERS,
    TOOL_PARSERS,
    TTFT_HINT,
    RouterConfig,
    RouterLimits,
    check_api_key,
)
from baton.config.service import SHARED_FOLDER, ServiceConfig, TlsConfig, host_id, new_incarnation
from baton.config.simulated_speed import SimulatedSpeed
from baton.config.worker import WorkerConfig

__all__ = [
    "CANARY_DEFAULTS", "CPU_KV_CACHE_BYTES", "DEFAULT_MAX_ITL_S", "DEMO_MODEL", "HTTP_PORT",
    "MAX_STREAM_INTERVAL", "MAX_TTFT_TARGET_S", "PROVING_TOKENS", "REASONING_PARSERS",
    "SHARED_FOLDER", "TOOL_PARSERS",
    "TTFT_HINT", "ApiConfig", "ClusterConfig", "EngineConfig", "ModelSource", "PlannerConfig",
    "RegistryConfig", "RouterConfig", "RouterLimits", "ServedModel", "ServiceConfig",
    "SimulatedSpeed", "TlsConfig",
    "WorkerConfig", "check_api_key", "default_model_name", "full_name", "host_id", "host_names",
    "join_address", "kv_heads_of", "model_path", "new_incarnation", "origins",
    "shares_text", "shown_name", "split_address",
]  # fmt: skip
