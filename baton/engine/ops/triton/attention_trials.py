"""What both attention kernels need to be compiled without a GPU, and tuned on one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from baton.engine.ops.triton.attention_common import PoolShape, factor_types
from baton.engine.ops.triton.spec import CompileCase, Config, Key
from baton.engine.weights.quantize import SCALE_BYTES, is_quantized

BLOCK_SIZE = 16
KV_HEADS = 8
GROUP = 4

TRITON_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv",
}

# The shapes of models as they are served: those of Llama 3, Qwen 2.5 and 3, and Gemma.
SHAPES: tuple[Key, ...] = tuple(
    {"head_size": head_size, "query_bytes": 2, "kv_bytes": kv_bytes}
    for head_size in (64, 128, 256)
    for kv_bytes in (2, 1)
)


@dataclass(frozen=True)
class Heads:
    """Queries of a type and the pool that they attend to, in a model of 8 KV heads."""

    query_type: torch.dtype
    kv_type: torch.dtype
    head_size: int = 128
    group: int = GROUP

    @property
    def row_size(self) -> int:
        """Elements of a row of the pool."""
        return self.head_size + (SCALE_BYTES if is_quantized(self.kv_type) else 0)

    def case(
        self,
        fn: triton.JITFunction,
        config: Config,
        types: Mapping[str, str],
        constexprs: Mapping[str, object],
        note: str = "",
    ) -> CompileCase:
        """How an attention kernel is compiled for them.

        types, constexprs: of those arguments that the other kernel does not have.
        """
        quantized = is_quantized(self.kv_type)
        k_type, v_type = factor_types(self.query_type, quantized, interpreted=False)
        shape = PoolShape(
            BLOCK_SIZE, KV_HEADS, self.head_size, self.row_size, quantized, k_type, v_type
        )
        query, kept = TRITON_NAMES[self.query_type], TRITON_NAMES[self.kv_type]
        parts = [query, kept, f"{self.head_size}", f"group {self.group}", str(config), note]
        return CompileCase(
            " ".join(part for part in parts if part),
            fn,
            {
                "q_rows": f"*{query}",
                "pool": f"*{kept}",
                "tables": "*i32",
                "out": f"*{query}",
                "layer": "i32",
                "table_stride": "i32",
                "block_stride": "i32",
                "scale": "fp32",
                "window": "i32",
                **types,
            },
            {"HEADS": KV_HEADS * self.group, **shape.constexprs, **config.sizes, **constexprs},
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            least=89 if self.kv_type == torch.float8_e4m3fn else 80,
            aligned=("block_stride",),
        )


def heads_of(key: Key) -> Heads:
    """Those that a key of `pages.kernel_key` is of; eight-bit KV is int8."""
    types = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32}
    query_type, kv_type = types[int(key["query_bytes"])], types[int(key["kv_bytes"])]
    return Heads(query_type, kv_type, int(key["head_size"]))


def full_pool(
    heads: Heads, sequences: int, tokens: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """A pool of one layer and block tables int32 `[sequences, blocks]` of sequences that fill it.

    Blocks lie in a random order, as in a pool that has been in use for long.
    """
    width = -(-tokens // BLOCK_SIZE)
    shape = (sequences * width, 1, 2, KV_HEADS, BLOCK_SIZE, heads.row_size)
    pool = torch.zeros(shape, dtype=heads.kv_type, device=device)
    order = torch.randperm(sequences * width, device=device, dtype=torch.int32)
    return pool, order.view(sequences, width)


def fitting(candidates: Sequence[Config], key: Key) -> list[Config]:
    """Those whose tiles of K and V under way fit a multiprocessor's shared memory."""
    row_bytes = int(triton.next_power_of_2(int(key["head_size"]))) * int(key["kv_bytes"])
    most = 144 * 1024
    return [
        config
        for config in candidates
        if (config.num_stages - 1) * 2 * config["TILE"] * row_bytes <= most
    ]
