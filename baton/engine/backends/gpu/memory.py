"""Memory budget of a GPU: the KV cache gets what weights, activations and graphs leave.

Arithmetic over sizes in bytes, and the text that explains it.

    |0                                                          total|
    | weights | activations | graphs |      KV       | spare | others |
    |<------------ --gpu-memory of the total ------->|
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from baton.config import EngineConfig
from baton.engine.kv_cache import KvLayout, plan_layout
from baton.engine.models.model_config import ModelConfig
from baton.errors import ConfigError

# Unplanned memory of a process: kernels loaded late, buffers of transfers, fragmentation.
SPARE_BYTES = 256 << 20

# More blocks are of no use: each costs the scheduler memory, and a router that connects gets the
# hashes of all cached blocks in one message of at most `baton.net.rpc.MAX_MESSAGE_BYTES`.
MOST_BLOCKS = 1 << 20

# A graph keeps its kernels' arguments on the device; all graphs share cuBLAS's workspace. These are
# generous estimates; the memory of captured graphs is logged.
_GRAPH_BYTES_PER_LAYER = 128 << 10
_GRAPHS_SCRATCH_BYTES = 128 << 20


@dataclass(frozen=True)
class MemoryProfile:
    """Memory of a GPU before the KV cache is allocated, in bytes.

    total: of the GPU · free: after weights were loaded · weights · activations: peak of a step
    beside weights and KV · graphs: reserved for CUDA graphs.
    """

    total: int
    free: int
    weights: int
    activations: int
    graphs: int

    @property
    def others(self) -> int:
        """Memory of other processes and of CUDA itself."""
        return self.total - self.free - self.weights

    @property
    def non_kv(self) -> int:
        """Memory that this engine needs beside its KV cache."""
        return self.weights + self.activations + self.graphs

    @property
    def kv_available(self) -> int:
        """Memory that a KV cache can use at most."""
        return self.free - self.activations - self.graphs


def graphs_reserve(largest_bytes: int, graphs: int, layers: int) -> int:
    """Bytes to reserve for CUDA graphs.

    largest_bytes: memory of the largest captured step, which all graphs share · graphs: number of
    graphs.
    """
    if not graphs:
        return 0
    return largest_bytes + graphs * layers * _GRAPH_BYTES_PER_LAYER + _GRAPHS_SCRATCH_BYTES


def kv_layout(
    usage: MemoryProfile, settings: EngineConfig, config: ModelConfig, dtype: torch.dtype,
    asked: KvLayout | None,
) -> KvLayout:  # fmt: skip
    """The KV pool that is asked for, or the largest within `--gpu-memory`.

    Raises ConfigError, with remedies, if memory is short."""
    if asked is not None:
        if asked.num_bytes > usage.kv_available:
            option = "--kv-blocks" if settings.kv_blocks else "--kv-cache"
            raise ConfigError(
                f"{option} asks for {_gib(asked.num_bytes)} and the GPU has "
                f"{_gib(max(0, usage.kv_available))} left for KV; "
                f"{advice(settings, usage, option)}"
            )
        return asked
    one = plan_layout(config, dtype, settings.block_size, 1, 0, settings.chunk_tokens)
    share = int(usage.total * settings.gpu_memory)
    left = min(share - usage.non_kv, usage.kv_available - SPARE_BYTES)  # less if others leave less
    if left < one.num_bytes:
        raise ConfigError(
            f"no GPU memory is left for KV: --gpu-memory {settings.gpu_memory:g} of "
            f"{_gib(usage.total)} is {_gib(share)}; weights take {_gib(usage.weights)}, "
            f"activations {_gib(usage.activations)}, graphs {_gib(usage.graphs)}, "
            f"others {_gib(usage.others)}; {advice(settings, usage)}"
        )
    count = min(left // one.num_bytes, MOST_BLOCKS)
    return replace(one, num_blocks=count)


def summary(
    name: str, usage: MemoryProfile, layout: KvLayout, settings: EngineConfig, max_context: int
) -> str:
    """The budget as text of several lines; `build.load` logs the number of KV blocks."""
    weights = "" if settings.quantization == "none" else settings.quantization
    steps = f"up to {settings.chunk_tokens} prompt tokens, {settings.max_batch} sequences a step"
    rows = (
        ("weights", usage.weights, weights),
        ("activations", usage.activations, steps),
        ("graphs", usage.graphs, "reserved"),
        ("KV", layout.num_bytes, ""),
        ("others", usage.others, "other processes, and CUDA itself"),
        ("free", max(0, usage.kv_available - layout.num_bytes), ""),
    )
    lengths = [*(length for length in (1024, 4096, 8192) if length < max_context), max_context]
    fits = ((layout.num_bytes // layout.bytes_of(length), length) for length in lengths)
    lines = [
        f"GPU memory of {name}: {_gib(usage.total)}, of which --gpu-memory "
        f"{settings.gpu_memory:g} is {_gib(int(usage.total * settings.gpu_memory))}",
        *(f"  {what:<12}{_gib(size):>11}  {text}".rstrip() for what, size, text in rows),
        f"  sequences that fit: {', '.join(f'{n} of {length} tokens' for n, length in fits)}",
    ]
    return "\n".join(lines)


def lost(layout: KvLayout, settings: EngineConfig) -> ConfigError:
    """The error for a pool within the budget whose memory another process has allocated since."""
    return ConfigError(
        f"{_gib(layout.num_bytes)} for KV are no longer free: another process has allocated GPU "
        f"memory; try a --gpu-memory below {settings.gpu_memory:g} for each"
    )


def advice(settings: EngineConfig, usage: MemoryProfile | None, smaller: str = "") -> str:
    """Remedies for a lack of memory, the likeliest first; usage None: nothing is measured."""
    hints = [f"a smaller {smaller}"] if smaller else []
    if usage is not None and usage.others > usage.total * (1 - settings.gpu_memory):
        hints.append(
            f"another GPU (--device cuda:N), because others hold {_gib(usage.others)} of this one"
        )
    elif usage is not None and settings.gpu_memory < 0.95:
        hints.append("a larger --gpu-memory")
    if settings.quantization == "none":
        hints.append("--quantization fp8 or int8")
    if usage is None or usage.activations + usage.graphs > usage.total // 20:
        hints.append("smaller --max-batch, --chunk-tokens or --max-context")
    if usage is not None and settings.kv_dtype == "auto":
        hints.append("--kv-dtype fp8 or int8")
    hints.append("a larger GPU, or more of them: a larger --tp")
    return f"try {', or '.join(hints)}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
