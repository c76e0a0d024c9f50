"""What a GPU can compute: Triton's kernels or torch's, and in which of the 8-bit formats."""

from __future__ import annotations

import logging

from baton.config import EngineConfig
from baton.engine.backends.gpu.makers import Maker
from baton.engine.models.config import ModelConfig
from baton.errors import ConfigError

log = logging.getLogger(__name__)
LEAST_CAPABILITY = (8, 0)
MULTIPLE = 16  # of heads' and blocks' sizes
MOST_ELEMENTS = 256  # of a head
# GPUs with 99 KB of shared memory for a program; tiles of larger heads need more.
SMALL_MEMORY, SMALL_ELEMENTS = ((8, 6), (8, 9), (12, 0), (12, 1)), 128
MOST_HEADS = 128  # that share a KV head
Capability = tuple[int, int]


def choose_kernels(
    settings: EngineConfig, config: ModelConfig, capability: Capability, missing: str
) -> str:
    """ "triton" or "torch"; `missing` says why Triton cannot be imported, if it cannot.

    Raises ConfigError for kernels that are asked for and cannot compute here.
    """
    if settings.kernels == "native":
        raise ConfigError(
            "--kernels native: they compute on a CPU, not on a GPU; leave it out for Triton's"
        )
    if settings.kernels == "torch":
        return "torch"
    reason = missing or unsupported(config, settings.block_size, capability)
    if not reason:
        return "triton"
    if settings.kernels == "triton":
        raise ConfigError(f"--kernels triton: {reason}; leave it out to compute with torch")
    log.warning("computing with torch's own kernels, which is slow: %s", reason)
    return "torch"


def unsupported(config: ModelConfig, block_size: int, capability: Capability) -> str:
    """Why Triton's kernels cannot run a model here; empty if they can."""
    if capability < LEAST_CAPABILITY:
        found, least = (f"{major}.{minor}" for major, minor in (capability, LEAST_CAPABILITY))
        return f"a GPU of compute capability {found}, and Triton's kernels need {least}"
    if config.head_size % MULTIPLE or config.head_size > MOST_ELEMENTS:
        return (
            f"heads of {config.head_size} elements, and Triton's kernels need a multiple of "
            f"{MULTIPLE} up to {MOST_ELEMENTS}"
        )
    if config.head_size > SMALL_ELEMENTS and capability in SMALL_MEMORY:
        major, minor = capability
        return (
            f"heads of {config.head_size} elements, and a GPU of compute capability {major}.{minor}"
            f" has shared memory for tiles of {SMALL_ELEMENTS}"
        )
    if (group := config.num_heads // config.num_kv_heads) > MOST_HEADS:
        return f"{group} heads share a KV head, and Triton's kernels take {MOST_HEADS}"
    if block_size % MULTIPLE:
        return f"blocks of {block_size} tokens, and Triton's kernels need a multiple of {MULTIPLE}"
    return ""


def refuse_formats(settings: EngineConfig, capability: Capability, maker: Maker) -> None:
    """Raises ConfigError for 8-bit settings that nothing computes here."""
    for option, value in (
        ("--quantization", settings.quantization),
        ("--kv-dtype", settings.kv_dtype),
    ):
        if value in ("none", "auto"):
            continue
        if reason := maker.refusal(value, capability):
            raise ConfigError(f"{option} {value}: {reason}; leave it out, or add --device cpu")
