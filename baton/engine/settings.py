"""What an engine's settings come to, once its model and its machine are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from baton.config import EngineConfig
from baton.engine.kv_cache import KvLayout
from baton.engine.models.config import ModelConfig
from baton.engine.runner import StepRunner
from baton.engine.weights.quantize import FP8
from baton.errors import ConfigError

_KV_DTYPES = {"int8": torch.int8, "fp8": FP8}


def device_of(settings: EngineConfig) -> torch.device:
    """Where an engine keeps its KV; a simulated one has no use for a GPU. Raises ConfigError."""
    return choose_device("cpu" if settings.simulate else settings.device)


def choose_device(name: str) -> torch.device:
    """The device that a setting names; "auto" is a GPU where there is one, "cuda" the first.

    A GPU always has its number. Raises ConfigError for one that torch does not see.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type != "cuda":
        return device
    index = device.index or 0
    if index >= (torch.cuda.device_count() if torch.cuda.is_available() else 0):
        raise ConfigError(f"--device {name}: {_what_torch_sees()}")
    return torch.device("cuda", index)


def _what_torch_sees() -> str:
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        seen = ", ".join(f"cuda:{index} ({name})" for index, name in enumerate(names))
        return f"torch sees only {seen}"
    if torch.version.cuda is None:
        return (
            f"torch sees no GPU here, because torch {torch.__version__} was built without CUDA; "
            "install one with it, or use --device cpu"
        )
    return (
        "torch sees no GPU here (nvidia-smi shows those that the driver knows, and "
        "CUDA_VISIBLE_DEVICES may hide some); use --device cpu"
    )


def choose_dtype(name: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """The compute type; "auto" is bfloat16 for half-precision checkpoints where it is fast."""
    if name == "auto":
        half = checkpoint in ("bfloat16", "float16")
        fast = device.type != "cpu" or torch.cpu._is_avx512_bf16_supported()
        name = "bfloat16" if half and fast else "float32"
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def choose_kv_dtype(name: str, compute_dtype: torch.dtype) -> torch.dtype:
    """What the KV pool holds; "auto" is the compute type."""
    return _KV_DTYPES.get(name, compute_dtype)


def longest_context(settings: EngineConfig, config: ModelConfig) -> int:
    """The most tokens of a sequence that model and settings allow."""
    return min(settings.max_context or config.max_context, config.max_context)


def max_context(settings: EngineConfig, config: ModelConfig, layout: KvLayout) -> int:
    """The most tokens of a sequence: what the pool holds, too."""
    return min(longest_context(settings, config), layout.num_blocks * layout.block_size - 1)


def do_nothing() -> None:
    """What there is to prepare on a CPU."""


@dataclass(frozen=True)
class Parts:
    """A model over its KV pool.

    lookahead: slots that decoding sequences get beforehand; see `Planner` · prepare: called
    once, before the first step.
    """

    runner: StepRunner
    layout: KvLayout
    lookahead: int = 0
    prepare: Callable[[], None] = do_nothing
