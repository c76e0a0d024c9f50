"""Rotary position embeddings: their frequencies, and tables of cosines and sines.

The frequencies are those of transformers' `modeling_rope_utils`: default, linear
(https://arxiv.org/abs/2306.15595), proportional (of a part of a head, by the size of all of it),
llama3 (Llama 3.1's interpolation by wavelength), dynamic (NTK,
for the longest context), yarn (https://arxiv.org/abs/2309.00071) and longrope
(https://arxiv.org/abs/2402.13753).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from baton.engine.models.model_config import ModelConfig
from baton.engine.models.rope_config import Rope


def inverse_frequencies(rope: Rope, head_size: int) -> Tensor:
    """Radians per position of each rotated pair of dimensions: float32 `[pairs]`."""
    size, factor, theta = rope.size or head_size, rope.factor, rope.theta
    if rope.scaling == "dynamic":  # of `factor` times the context
        theta *= (factor * factor - (factor - 1)) ** (size / (size - 2))
    of = head_size if rope.scaling == "proportional" else size
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / of
    frequencies = 1.0 / (theta**exponents)
    if rope.scaling in ("linear", "proportional"):
        return frequencies / factor
    if rope.scaling == "llama3":
        return _by_wavelength(rope, frequencies)
    if rope.scaling == "yarn":
        kept = _yarn_kept(rope, size)
        return frequencies / factor * (1 - kept) + frequencies * kept
    if rope.scaling == "longrope":
        return 1.0 / (torch.tensor(rope.factors) * theta**exponents)
    return frequencies


def _by_wavelength(rope: Rope, frequencies: Tensor) -> Tensor:
    """llama3: long wavelengths scaled by the factor, short ones kept, in between interpolated."""
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


def _yarn_kept(rope: Rope, size: int) -> Tensor:
    """The share of each frequency that is not scaled, 1 for fast ones: float32 `[pairs]`."""

    def pair_with(rotations: float) -> float:
        """The pair with that number of rotations in the original context."""
        wavelength = rope.original_context / (rotations * 2 * math.pi)
        return size * math.log(wavelength) / (2 * math.log(rope.theta))

    first, last = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    last += 0.001 * (first == last)
    ramp = (torch.arange(size // 2, dtype=torch.float32) - first) / (last - first)
    return 1 - ramp.clamp(0, 1)


def rope_table(rope: Rope | None, head_size: int, max_context: int) -> Tensor:
    """Cosines and sines of each position's angles, float32 `[2, max_context, head_size]`, on a CPU.

    Elements i and i + head_size / 2 are a pair. Dimensions that are not rotated have an angle of 0.
    Cosines are computed in float64 and rounded: in float32 the last bit depends on how torch splits
    the table between threads, and workers with different thread counts must agree.
    """
    half = torch.zeros(max_context, head_size // 2, dtype=torch.float64)
    factor = 1.0
    if rope is not None:
        frequencies, factor = inverse_frequencies(rope, head_size), rope.attention_factor
        positions = torch.arange(max_context, dtype=torch.float32)
        half[:, : len(frequencies)] = torch.outer(positions, frequencies)
    table = torch.stack((half.cos(), half.sin())).float()
    if factor != 1:
        table[..., : len(frequencies)] *= factor
    return torch.cat((table, table), dim=2)


def query_scales(config: ModelConfig, device: torch.device) -> Tensor | None:
    """What multiplies the queries of each position in layers without rotary embedding, float32
    `[max_context, 1]` (https://arxiv.org/abs/2501.19399); None if nothing does."""
    if config.query_scaling is None:
        return None
    length, scale = config.query_scaling
    positions = torch.arange(config.max_context, dtype=torch.float32, device=device)
    return (torch.log1p(torch.floor((positions + 1) / length)) * scale + 1)[:, None]


def rope_tables(config: ModelConfig) -> tuple[list[Tensor], list[int]]:
    """The tables of distinct ropes, each `[2, max_context, head_size]`, and each layer's index."""
    sizes = (config.layer(index).rope_size for index in range(config.num_layers))
    ropes = list(zip(config.ropes, sizes, strict=True))
    distinct = list(dict.fromkeys(ropes))
    tables = [rope_table(*one, config.max_context) for one in distinct]
    return tables, [distinct.index(one) for one in ropes]
