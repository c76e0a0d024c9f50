"""The paged KV cache: one block-major tensor, and its descriptor for other workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from baton.engine.kernels.delta_rule import StateLayout
from baton.engine.kernels.torch.row_quantization import SCALE_BYTES, is_quantized
from baton.engine.models.model_config import ModelConfig
from baton.errors import ConfigError
from baton.kv_groups import KvGroups
from baton.v1 import common_pb2


class Memory(Protocol):
    """Memory of a KV pool. tensor: uint8, initially zero."""

    @property
    def tensor(self) -> torch.Tensor: ...


Allocate = Callable[[int, torch.device], Memory | None]
"""Allocates bytes of a device that other processes can map; None if it cannot be mapped."""


@dataclass(frozen=True)
class KvLayout:
    """Shape of the pool: `[num_blocks, num_layers, parts, num_kv_heads, block_size, row_size]`.

    A row is a token's K or V of one head. Latent KV has one part and one head, whose row is what K
    and V of all heads are made of; several ranks each hold all of it, as of any KV head that their
    queries share. In int8 and fp8, the elements of all rows of a block and head come first, and
    their float32 scales last (`row_quantization.split_rows`): so a row is aligned to 16 bytes where
    head_size is a multiple of 16, as wide loads of GPUs need it.

    num_layers: of a block, which belongs to one group of layers · windows: of each group
    (`baton.kv_groups`) · step_tokens: most tokens that a step computes of one sequence.
    """

    num_blocks: int
    num_layers: int
    num_kv_heads: int
    block_size: int
    head_size: int
    dtype: torch.dtype
    parts: int = 2
    windows: tuple[int, ...] = (0,)
    step_tokens: int = 0
    state_blocks: int = 0  # of each sequence's state; 0 in models without states

    @property
    def row_size(self) -> int:
        """Size of a row in elements of `dtype`, its scale included."""
        return self.head_size + (SCALE_BYTES if is_quantized(self.dtype) else 0)

    @property
    def shape(self) -> tuple[int, ...]:
        """The pool's shape; axis 2 is K, then V, or latent KV alone."""
        heads, row_size = self.num_kv_heads, self.row_size
        return self.num_blocks, self.num_layers, self.parts, heads, self.block_size, row_size

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest sequence that the pool holds."""
        return self.groups.longest(self.num_blocks, self.step_tokens)

    @property
    def groups(self) -> KvGroups:
        """The groups of layers that share the pool."""
        return KvGroups(self.windows, self.block_size, self.state_blocks)

    @property
    def block_bytes(self) -> int:
        """Size of a block."""
        rows = self.num_layers * self.parts * self.num_kv_heads * self.block_size
        return rows * self.row_size * self.dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of the blocks of a sequence's state."""
        return self.state_blocks * self.block_bytes

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token over all layers, while it is within all windows."""
        return len(self.windows) * self.block_bytes // self.block_size

    @property
    def num_bytes(self) -> int:
        """Size of the pool."""
        return self.num_blocks * self.block_bytes

    def bytes_of(self, num_tokens: int) -> int:
        """KV bytes of a sequence, at most."""
        return self.groups.most_blocks(num_tokens, self.step_tokens) * self.block_bytes

    def descriptor(
        self, model_fingerprint: str, compute_dtype: torch.dtype, quantization: str = "none"
    ) -> common_pb2.KvDescriptor:
        """What two workers must have in common to exchange blocks.

        Includes how KV was computed, because KV of another precision would give other tokens.
        """
        name, compute_name = (
            str(dtype).removeprefix("torch.") for dtype in (self.dtype, compute_dtype)
        )
        return common_pb2.KvDescriptor(
            model_fingerprint=model_fingerprint,
            dtype=name,
            compute_dtype=compute_name if compute_name != name else "",
            quantization=quantization if quantization != "none" else "",
            num_layers=self.num_layers,
            parts=self.parts,
            group_windows=self.windows if self.groups.slide else (),
            state_blocks=self.state_blocks,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            block_size=self.block_size,
            layout_version=2 if is_quantized(self.dtype) else 1,  # 1: a scale after each row
            tensor_parallel=1,
        )


def _state_blocks(config: ModelConfig, layout: KvLayout) -> int:
    """Blocks of a sequence's state. Raises ConfigError where a block cannot hold a row of it."""
    rule = config.delta_rule
    if rule is None:
        return 0
    chunk_bytes = layout.block_size * layout.row_size * layout.dtype.itemsize
    heads, chunks = layout.num_kv_heads, layout.num_layers * layout.parts
    states = StateLayout(rule.shape, sum(rule.layers), heads, chunk_bytes, chunks)
    if not states.chunk_rows:
        raise ConfigError(
            f"the model's states have rows of {rule.shape.value_size} floats, which do not fit the "
            f"{chunk_bytes} bytes that a KV head has in a block: raise --block-size"
        )
    return states.num_blocks


def plan_layout(
    config: ModelConfig, dtype: torch.dtype, block_size: int, num_blocks: int, budget_bytes: int,
    step_tokens: int = 0,
) -> KvLayout:  # fmt: skip
    """The layout of `num_blocks` blocks, or if 0 of as many as fit into `budget_bytes`.

    step_tokens: as of `KvLayout`. Raises ConfigError when not even one block fits.
    """
    groups, heads = config.layer_groups, (config.num_kv_heads, block_size, config.head_size)
    of_groups = config.kv_parts, groups.windows, step_tokens
    one = KvLayout(1, groups.size, *heads, dtype, *of_groups)
    one = replace(one, state_blocks=_state_blocks(config, one))
    count = num_blocks or budget_bytes // one.num_bytes
    if count < 1:
        raise ConfigError(
            f"one KV block takes {one.num_bytes} bytes and the budget is {budget_bytes}: "
            "raise --kv-cache or lower --block-size"
        )
    return replace(one, num_blocks=count)


def allocate_pool(
    layout: KvLayout, allocate: Allocate | None, device: torch.device
) -> torch.Tensor:
    """The zeroed pool, in memory of `allocate` if it returns some."""
    memory = allocate(layout.num_bytes, device) if allocate else None
    if memory is None:
        return torch.zeros(layout.shape, dtype=layout.dtype, device=device)
    return memory.tensor.view(layout.dtype).view(layout.shape)
