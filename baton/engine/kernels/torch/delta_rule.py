"""The gated delta rule in plain torch: the reference of faster kernels.

Linear attention that keeps, instead of KV, a matrix S `[key_size, value_size]` for each value head.
A token decays it, replaces what its key k reads there by a part `beta` of its value v, and reads it
with its query q: S = decay * S; S += k (beta * (v - k S)); o = q S. Queries, keys and values come
from a causal convolution over the last `kernel` tokens. (Yang et al., "Gated Delta Networks", 2024;
as transformers' Qwen3-Next has it.)

Tokens are processed one by one, in float32: a token's result does not depend on how its sequence
was divided into steps, nor on other sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.kernels.delta_rule import DeltaRuleShape, StateLayout
from baton.engine.kernels.torch.activation import rowwise
from baton.engine.kernels.torch.rms_norm import rms_norm

L2_EPS = 1e-6


class DeltaRuleTensors(NamedTuple):
    """A layer's parameters, float32, by key head.

    conv: `[key_heads * head_channels, kernel]` · decay: `[value_heads]`, at most 0 · decay_bias:
    `[value_heads]` · scale: `[value_size]`, of the norm of each value head's output.
    """

    conv: Tensor
    decay: Tensor
    decay_bias: Tensor
    scale: Tensor


class States(NamedTuple):
    """The states of a batch's sequences. tables: int32 `[sequences, blocks]` · context_lens,
    query_lens, kept_lens: as `StepBatch`'s; a sequence without context begins with a state of
    zeros."""

    tables: Tensor
    context_lens: Tensor
    query_lens: Tensor
    kept_lens: Tensor | None = None


@dataclass(frozen=True)
class DeltaRule:
    """The rule of a layer.

    layer: its index among those with states · eps: of the norm of outputs.
    """

    layout: StateLayout
    tensors: DeltaRuleTensors
    layer: int
    eps: float

    def run(self, mixed: Tensor, gates: Tensor, states: States, pool: Tensor) -> Tensor:
        """Advances each sequence's state by its kept rows: outputs `[rows, value_heads *
        value_size]` of all rows.

        mixed: `[rows, key_heads * (head_channels + values_per_key * value_size)]`, of each key head
        its query, key, values and output gates · gates: `[rows, 2 * value_heads]`, of each key head
        beta and decay of its value heads, before their functions.
        """
        counts, out = states.query_lens.tolist(), list[Tensor]()
        kept_lens = counts if states.kept_lens is None else states.kept_lens.tolist()
        of_sequences = zip(
            mixed.split(counts), gates.split(counts), states.tables.long(),
            states.context_lens.tolist(), kept_lens, strict=True,
        )  # fmt: skip
        for some_mixed, some_gates, table, context, kept in of_sequences:
            rows = state_rows(pool, self.layout, table, self.layer)
            state = rows.read() if context else rows.zeros()
            out.append(self._advance(some_mixed[:kept], some_gates[:kept], state))
            rows.write(state)
            if kept < len(some_mixed):
                out.append(self._advance(some_mixed[kept:], some_gates[kept:], state))
        return torch.cat(out)

    def _advance(self, mixed: Tensor, gates: Tensor, state: Tensor) -> Tensor:
        """The outputs of one sequence's rows; updates its state `[key_heads, head_rows,
        value_size]`."""
        shape, count = self.layout.shape, len(mixed)
        heads, group = shape.key_heads, shape.values_per_key
        by_head = mixed.view(count, heads, -1)
        channels, gate = by_head.split([shape.head_channels, group * shape.value_size], dim=2)
        tail = state[:, shape.matrix_rows :].flatten(1)
        conved = self._convolve(channels, tail)
        q, k, v = conved.split([shape.key_size, shape.key_size, group * shape.value_size], dim=2)
        q, k = (_unit(x.float()).repeat_interleave(group, dim=1) for x in (q, k))
        q = q * shape.key_size**-0.5
        v = v.float().reshape(count, heads * group, shape.value_size)
        strength, decay = gates.view(count, heads, 2, group).float().unbind(2)
        beta = rowwise(torch.sigmoid, strength.flatten(1)).to(mixed.dtype).float()
        decay = self.tensors.decay * rowwise(F.softplus, decay.flatten(1) + self.tensors.decay_bias)
        decay = rowwise(torch.exp, decay)
        matrices = state[:, : shape.matrix_rows].reshape(heads * group, shape.key_size, -1)
        out = torch.empty_like(v)
        for at in range(count):
            matrices *= decay[at, :, None, None]
            read = (matrices * k[at, :, :, None]).sum(1)
            delta = (v[at] - read) * beta[at, :, None]
            matrices += k[at, :, :, None] * delta[:, None]
            out[at] = (matrices * q[at, :, :, None]).sum(1)
        state[:, : shape.matrix_rows] = matrices.view(heads, shape.matrix_rows, -1)
        normed = rms_norm(out.to(mixed.dtype), self.tensors.scale.to(mixed.dtype), self.eps)
        opened = rowwise(F.silu, gate.reshape(count, -1).float())
        return (normed.flatten(1) * opened).to(mixed.dtype)

    def _convolve(self, channels: Tensor, tail: Tensor) -> Tensor:
        """The convolution of channels `[rows, key_heads, head_channels]`, then silu.

        tail: `[key_heads, …]`, the earlier inputs of each head's channels, which are updated.
        """
        shape, (count, heads, size) = self.layout.shape, channels.shape
        earlier = tail[:, : (shape.kernel - 1) * size].view(heads, -1, size)
        inputs = torch.cat((earlier.transpose(0, 1), channels.float()))
        weights = self.tensors.conv.view(heads, size, shape.kernel)
        total = inputs[:count] * weights[:, :, 0]
        for at in range(1, shape.kernel):
            total += inputs[at : at + count] * weights[:, :, at]
        earlier.copy_(inputs[count:].transpose(0, 1))
        flat = total.to(channels.dtype).flatten(1)
        return rowwise(F.silu, flat).view_as(channels)


def _unit(x: Tensor) -> Tensor:
    """Vectors `[…, size]` of unit length."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + L2_EPS)


class StateRows(NamedTuple):
    """The rows of a sequence's state in a layer, inside the pool.

    floats: `[chunks, chunk_rows, value_size]`, the pool's · chunks, places: int64 `[key_heads,
    head_rows]`, of each row.
    """

    floats: Tensor
    chunks: Tensor
    places: Tensor

    def read(self) -> Tensor:
        """A copy of the state: float32 `[key_heads, head_rows, value_size]`."""
        return self.floats[self.chunks, self.places]

    def zeros(self) -> Tensor:
        return self.floats.new_zeros(*self.chunks.shape, self.floats.shape[2])

    def write(self, state: Tensor) -> None:
        self.floats[self.chunks, self.places] = state


def state_rows(pool: Tensor, layout: StateLayout, table: Tensor, layer: int) -> StateRows:
    """Where the state of a sequence lies. table: int64 `[blocks]`, of its state."""
    shape, device = layout.shape, pool.device
    octets = pool.view(torch.uint8).view(-1, layout.chunk_bytes)
    used = octets[:, : layout.chunk_rows * shape.value_size * 4]
    floats = used.view(torch.float32).unflatten(1, (layout.chunk_rows, shape.value_size))
    of_kv_head = shape.key_heads // layout.kv_heads
    head = torch.arange(shape.key_heads, device=device)[:, None]
    first = (layer * of_kv_head + head % of_kv_head) * shape.head_rows
    row = first + torch.arange(shape.head_rows, device=device)
    chunk, place = row // layout.chunk_rows, row % layout.chunk_rows
    block, within = table[chunk // layout.block_chunks], chunk % layout.block_chunks
    chunks = (block * layout.block_chunks + within) * layout.kv_heads + head // of_kv_head
    return StateRows(floats, chunks, place)


def layout_of(shape: DeltaRuleShape, layers: int, pool: Tensor) -> StateLayout:
    """The layout of states in a KV pool. layers: that have a state."""
    _, kv_layers, parts, kv_heads, block_size, row_size = pool.shape
    chunk_bytes = block_size * row_size * pool.element_size()
    return StateLayout(shape, layers, kv_heads, chunk_bytes, kv_layers * parts)
