"""A GPU's memory, shared out: what weights, activations and graphs leave belongs to the KV cache.

Pure arithmetic over sizes in bytes, and the text that explains it.

    |0                                                          total|
    | weights | activations | graphs |      KV       | spare | others |
    |<------------ --gpu-memory of the total ------->|
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.config import EngineConfig
from baton.engine.kv_cache import KvLayout, plan_layout
from baton.engine.models.model_config import ModelConfig
from baton.errors import ConfigError

# What a process takes beside its plan: kernels loaded late, transfers' buffers, fragmentation.
SPARE_BYTES = 256 << 20

# More blocks are of no use. Each costs the scheduler some memory, and a router that joins gets the
# hashes of all cached ones in one message of limited size: `baton.net.rpc.MAX_MESSAGE_BYTES`.
MOST_BLOCKS = 1 << 20

# A captured graph keeps its kernels' arguments on the device; all share cuBLAS's scratch memory.
# Guesses to be on the safe side; what captured graphs really keep is logged.
_GRAPH_BYTES_PER_LAYER = 128 << 10
_GRAPHS_SCRATCH_BYTES = 128 << 20


@dataclass(frozen=True)
class Usage:
    """What holds a GPU's memory, in bytes, once all but the KV cache is known.

    total: of the GPU · free: now that the weights are there, and nothing else of this engine ·
    weights · activations: the most that a step needs beside weights and KV · graphs: what is
    reserved for captured steps.
    """

    total: int
    free: int
    weights: int
    activations: int
    graphs: int

    @property
    def others(self) -> int:
        """What other processes hold, and CUDA itself."""
        return self.total - self.free - self.weights

    @property
    def own(self) -> int:
        """What this engine needs beside its KV cache."""
        return self.weights + self.activations + self.graphs

    @property
    def most(self) -> int:
        """What a KV cache could take if nothing were spared."""
        return self.free - self.activations - self.graphs


def graphs_reserve(largest_bytes: int, graphs: int, layers: int) -> int:
    """Bytes to reserve for captured steps. graphs: their number · largest_bytes: of the largest.

    All graphs share one pool, which the largest fills.
    """
    if not graphs:
        return 0
    return largest_bytes + graphs * layers * _GRAPH_BYTES_PER_LAYER + _GRAPHS_SCRATCH_BYTES


def kv_layout(
    usage: Usage,
    settings: EngineConfig,
    config: ModelConfig,
    dtype: torch.dtype,
    asked: KvLayout | None,
) -> KvLayout:
    """The KV pool that is asked for, or one of what `--gpu-memory` leaves.

    Raises ConfigError, with hints, when that is not there.
    """
    if asked is not None:
        if asked.num_bytes > usage.most:
            option = "--kv-blocks" if settings.kv_blocks else "--kv-cache"
            raise ConfigError(
                f"{option} asks for {_gib(asked.num_bytes)} and the GPU has "
                f"{_gib(max(0, usage.most))} left for KV; "
                f"{advice(settings, usage, option)}"
            )
        return asked
    one = plan_layout(config, dtype, settings.block_size, 1, 0)
    share = int(usage.total * settings.gpu_memory)
    left = min(share - usage.own, usage.most - SPARE_BYTES)  # or less, where others leave less
    if left < one.num_bytes:
        raise ConfigError(
            f"no GPU memory is left for KV: --gpu-memory {settings.gpu_memory:g} of "
            f"{_gib(usage.total)} is {_gib(share)}; weights take {_gib(usage.weights)}, "
            f"activations {_gib(usage.activations)}, graphs {_gib(usage.graphs)}, "
            f"others {_gib(usage.others)}; {advice(settings, usage)}"
        )
    count = min(left // one.num_bytes, MOST_BLOCKS)
    return plan_layout(config, dtype, settings.block_size, count, 0)


def summary(
    name: str, usage: Usage, layout: KvLayout, settings: EngineConfig, max_context: int
) -> str:
    """All of it for people, in several lines; `build.load` logs the blocks of KV."""
    weights = "" if settings.quantization == "none" else settings.quantization
    steps = f"up to {settings.chunk_tokens} prompt tokens, {settings.max_batch} sequences a step"
    rows = (
        ("weights", usage.weights, weights),
        ("activations", usage.activations, steps),
        ("graphs", usage.graphs, "reserved"),
        ("KV", layout.num_bytes, ""),
        ("others", usage.others, "other processes, and CUDA itself"),
        ("free", max(0, usage.most - layout.num_bytes), ""),
    )
    lengths = [*(length for length in (1024, 4096, 8192) if length < max_context), max_context]
    fits = ((layout.num_blocks // -(-length // layout.block_size), length) for length in lengths)
    lines = [
        f"GPU memory of {name}: {_gib(usage.total)}, of which --gpu-memory "
        f"{settings.gpu_memory:g} is {_gib(int(usage.total * settings.gpu_memory))}",
        *(f"  {what:<12}{_gib(size):>11}  {text}".rstrip() for what, size, text in rows),
        f"  sequences that fit: {', '.join(f'{n} of {length} tokens' for n, length in fits)}",
    ]
    return "\n".join(lines)


def taken(layout: KvLayout, settings: EngineConfig) -> ConfigError:
    """The error for a pool that fitted the budget, and whose memory another process took."""
    return ConfigError(
        f"{_gib(layout.num_bytes)} for KV were free and are not any more: another process took GPU "
        f"memory meanwhile; try a --gpu-memory below {settings.gpu_memory:g} for each"
    )


def advice(settings: EngineConfig, usage: Usage | None, smaller: str = "") -> str:
    """What would leave more, the likeliest first; usage None: nothing is known of it."""
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
