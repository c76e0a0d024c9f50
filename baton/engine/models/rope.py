"""Rotary position embedding: its tables, and turning queries and keys by them.

The frequencies are those of Hugging Face transformers (`modeling_rope_utils`): default, linear
(https://arxiv.org/abs/2306.15595) and llama3 (Llama 3.1's interpolation by wavelength).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from baton.engine.models.config import Rope


def inverse_frequencies(rope: Rope, head_size: int) -> Tensor:
    """Radians per position for each pair of dimensions: float32 `[head_size // 2]`."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "llama3":
        return _llama3_frequencies(frequencies, rope)
    return frequencies


def _llama3_frequencies(frequencies: Tensor, rope: Rope) -> Tensor:
    """Long waves slowed down by the factor, short ones kept, those between interpolated."""
    wavelengths = 2 * math.pi / frequencies
    longest_kept = rope.original_context / rope.high_freq_factor
    shortest_slowed = rope.original_context / rope.low_freq_factor
    slowed = torch.where(wavelengths > shortest_slowed, frequencies / rope.factor, frequencies)
    share = (rope.original_context / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (wavelengths >= longest_kept) & (wavelengths <= shortest_slowed)
    interpolated = (1 - share) * slowed / rope.factor + share * slowed
    return torch.where(between, interpolated, slowed)


def rope_tables(rope: Rope, head_size: int, max_context: int) -> tuple[Tensor, Tensor]:
    """(cos, sin) of every position's angles, float32 `[max_context, head_size]` on the CPU.

    The cosine is taken in float64 and rounded: in float32 its last bit depends on how torch splits
    the table between threads, and workers with different thread counts must agree.
    """
    positions = torch.arange(max_context, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_size)).double()
    cos, sin = angles.cos().float(), angles.sin().float()
    return torch.cat((cos, cos), dim=1), torch.cat((sin, sin), dim=1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x `[rows, heads, head_size]` turned by its rows' cos and sin `[rows, 1, head_size]`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
