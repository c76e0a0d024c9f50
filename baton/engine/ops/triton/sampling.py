"""Sampling: penalties and biases, then a token for each row, by one program a row.

What is kept and what is taken is as in `baton.engine.sampling.filters`, up to the rounding of sums.
Top-k and top-p both ask for the largest weight that makes up so much (tokens, or their mass) with
all larger ones. It is found by its bits, three in each pass over the row, which stays in the GPU's
L2: positive floats are ordered as their bits are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.ops.triton.spec import (
    Config,
    KernelSpec,
    Key,
    Outputs,
    Trial,
    dtype_of,
    product_of,
)
from baton.engine.ops.triton.tuning import choose
from baton.engine.sampling.filters import sample as reference
from baton.engine.sampling.randomness import uniform
from baton.engine.sampling.sampler import GREEDY_BELOW, NUM_SETTINGS
from baton.sampling import SamplingParams

NUM_PENALTIES = 3  # repetition, frequency, presence
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _mixed(state):
    """SplitMix64's output for a state, uint64."""
    mixed = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    return mixed ^ (mixed >> 31)


@triton.jit
def random_bits(seed, position):
    """The random number of a seed, int64 of which all bits count, and a position: uint64, of 53
    bits. Over 2 ** 53 it is that of `baton.engine.sampling.randomness`.
    """
    gamma = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    offset = (position.to(tl.int64) + 1).to(tl.uint64, bitcast=True) * gamma
    return _mixed(_mixed(seed.to(tl.uint64, bitcast=True) + gamma) + offset) >> 11


@triton.jit
def _weights(logits, ids, vocab_size, largest, temperature):
    """1 for the likeliest token, 0 beyond the vocabulary."""
    x = tl.load(logits + ids, mask=ids < vocab_size, other=-_INFINITY).to(tl.float32)
    return tl.exp(tl.div_rn(x - largest, temperature))


@triton.jit
def _edge(
    logits, vocab_size, largest, temperature, wanted, MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """The bits of the largest weight that has `wanted` tokens, or mass, at and above it."""
    edge = tl.full([], 0, tl.int32)
    for step in range(10):
        shift = 27 - 3 * step
        edges = edge + (tl.arange(0, 8)[:, None] << shift)
        sums = tl.zeros([8, BLOCK], tl.float64 if MASS else tl.int32)
        for first in range(0, vocab_size, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            weights = _weights(logits, ids, vocab_size, largest, temperature)
            at_or_above = weights.to(tl.int32, bitcast=True)[None, :] >= edges
            if MASS:
                sums += tl.where(at_or_above, weights[None, :], 0.0)
            else:
                sums += at_or_above.to(tl.int32)
        reached = tl.sum((tl.sum(sums, 1) >= wanted).to(tl.int32), 0)
        edge += tl.maximum(reached - 1, 0) << shift
    return edge


@triton.jit
def _sums(logits, vocab_size, largest, temperature, edge, BLOCK: tl.constexpr):
    """(tokens above an edge, their mass, tokens at the edge)."""
    above, at = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float64)
    for first in range(0, vocab_size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        weights = _weights(logits, ids, vocab_size, largest, temperature)
        bits = weights.to(tl.int32, bitcast=True)
        above += (bits > edge).to(tl.int32)
        at += ((bits == edge) & (ids < vocab_size)).to(tl.int32)
        mass += tl.where(bits > edge, weights, 0.0)
    return tl.sum(above, 0), tl.sum(mass, 0), tl.sum(at, 0)


@triton.jit
def _kept(logits, ids, vocab_size, largest, temperature, edge, room, at, passed, least):
    """(weights, those that are dropped 0; how many at the edge came so far).

    Of the `at` weights at the edge the first `room` stay, `passed` of which came before.
    """
    weights = _weights(logits, ids, vocab_size, largest, temperature)
    bits = weights.to(tl.int32, bitcast=True)
    keep = (bits >= edge) & (weights >= least)
    if at > room:
        here = (bits == edge).to(tl.int32)
        keep &= (here == 0) | (passed + tl.cumsum(here, 0) <= room)
        passed += tl.sum(here, 0)
    return tl.where(keep, weights, 0.0), passed


@triton.jit
def _sample_kernel(
    logits, settings, seeds, positions, tokens, vocab_size, row_stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    settings += row * 4
    best = tl.full([BLOCK], -_INFINITY, tl.float32)
    where, broken = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocab_size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = tl.load(logits + ids, mask=ids < vocab_size, other=-_INFINITY).to(tl.float32)
        where = tl.where(x > best, ids, where)
        best = tl.maximum(x, best)
        broken |= (x != x).to(tl.int32)  # noqa: PLR0124 (of what is no number)
    largest = tl.max(best, 0)
    token = tl.min(tl.where(best == largest, where, vocab_size), 0)
    usable = (tl.max(broken, 0) == 0) & (tl.abs(largest) < _INFINITY)
    token = tl.where(usable, token, vocab_size)
    temperature = tl.load(settings).to(tl.float32)
    if usable & (temperature > 0):
        top_k, top_p = tl.load(settings + 1).to(tl.int32), tl.load(settings + 2)
        least = tl.load(settings + 3).to(tl.float32)
        bits = random_bits(tl.load(seeds + row), tl.load(positions + row))
        number = bits.to(tl.float64) * (1.0 / (1 << 53))
        edge, kept = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32) + vocab_size
        if (top_k > 0) & (top_k < vocab_size):
            kept = top_k
            edge = _edge(logits, vocab_size, largest, temperature, top_k, False, BLOCK)
        above, mass, at = _sums(logits, vocab_size, largest, temperature, edge, BLOCK)
        if top_p < 1:
            weight = edge.to(tl.float32, bitcast=True).to(tl.float64)
            wanted = top_p * (mass + (kept - above) * weight)
            edge = _edge(logits, vocab_size, largest, temperature, wanted, True, BLOCK)
            above, mass, at = _sums(logits, vocab_size, largest, temperature, edge, BLOCK)
            weight = edge.to(tl.float32, bitcast=True).to(tl.float64)
            # A token stays if those before it do not reach top-p: the one that reaches it stays.
            needed = at
            if weight > 0:
                missing = tl.ceil((wanted - mass) / weight)
                needed = tl.minimum(tl.maximum(missing, 1.0), at.to(tl.float64)).to(tl.int32)
            kept = tl.minimum(kept, above + needed)
        room = kept - above
        sums = tl.zeros([BLOCK], tl.float64)
        passed = tl.full([], 0, tl.int32)
        for first in range(0, vocab_size, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            weights, passed = _kept(
                logits, ids, vocab_size, largest, temperature, edge, room, at, passed, least
            )
            sums += weights
        # The first token with which the sum passes the target. Where rounding lets none do so, it
        # is the last one of those that are kept.
        target, before = number * tl.sum(sums, 0), tl.full([], 0.0, tl.float64)
        passed = tl.full([], 0, tl.int32)
        for first in range(0, vocab_size, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            weights, passed = _kept(
                logits, ids, vocab_size, largest, temperature, edge, room, at, passed, least
            )
            mass = tl.sum(weights.to(tl.float64), 0)
            if (before <= target) & (mass > 0):
                inner = before + tl.cumsum(weights.to(tl.float64), 0)
                passing = tl.min(tl.where((inner > target) & (weights > 0), ids, vocab_size), 0)
                ending = tl.max(tl.where(weights > 0, ids, 0), 0)
                token = tl.minimum(passing, ending)
            before += mass
    tl.store(tokens + row, token.to(tl.int64))


def sample(
    logits: Tensor, settings: Tensor, seeds: Tensor, positions: Tensor, tokens: Tensor,
    config: Config | None = None,
) -> None:  # fmt: skip
    """Writes one token for each row of logits `[rows, vocab]`, which stay as they are.

    logits: float32, float16 or bfloat16 · settings: float64 `[rows, NUM_SETTINGS]`, see
    `settings_of` · seeds: int64 `[rows]`, the bits of unsigned ones · positions: int32 `[rows]`, of
    the tokens to sample; less than 1 is a padding row, whose token means nothing · tokens: int64
    `[rows]`. Of a greedy row it is the likeliest token, of equals the lowest id; of a row whose
    logits are not numbers one beyond the vocabulary. config: of the launch; None is that of
    `tuning`. Waits for nothing on the device: a CUDA graph can hold it.
    """
    rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and settings.is_contiguous() and settings.shape[1] == NUM_SETTINGS
    config = config or choose("sample", {"vocab": vocab_size}, logits.device)
    _sample_kernel[(rows,)](
        logits, settings, seeds, positions, tokens, vocab_size, logits.stride(0), **config
    )


@triton.jit
def _adjusted(x, bias, times, repetition, frequency, presence):
    """A logit with its bias and penalties; times: in the output, -1 in no text."""
    x += bias
    repeated = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    x = tl.where(times >= 0, repeated, x)
    output = tl.maximum(times, 0)
    return x - (output * frequency + (output > 0).to(tl.float32) * presence)


@triton.jit(do_not_specialize_on_alignment=["rows", "ends", "ids", "biases", "times", "penalties"])
def _adjust_kernel(
    logits, rows, ends, ids, biases, times, penalties, row_stride, BLOCK: tl.constexpr
):
    which = tl.program_id(0)
    logits += tl.load(rows + which).to(tl.int64) * row_stride
    penalties += which * 3
    repetition, frequency = tl.load(penalties), tl.load(penalties + 1)
    presence = tl.load(penalties + 2)
    begin, end = tl.full([], 0, tl.int32), tl.load(ends + which)
    if which > 0:
        begin = tl.load(ends + which - 1)
    for first in range(begin, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < end
        token = tl.load(ids + at, mask=inside, other=0)
        count = tl.load(times + at, mask=inside, other=-1)
        x = tl.load(logits + token, mask=inside, other=0.0)
        bias = tl.load(biases + at, mask=inside, other=0.0)
        x = _adjusted(x, bias, count, repetition, frequency, presence)
        tl.store(logits + token, x, mask=inside)


def adjust(
    logits: Tensor, rows: Tensor, ends: Tensor, ids: Tensor, biases: Tensor, times: Tensor,
    penalties: Tensor,
) -> None:  # fmt: skip
    """Applies biases and penalties to some rows of logits `[.., vocab]` float32, in place.

    rows: int32 `[n]`, which ones · ends: int32 `[n]`, where a row's tokens end in the lists of all:
    ids int32, distinct in a row, biases float32, times int32: how often each is in the output, 0 in
    the prompt alone, -1 in neither · penalties: float32 `[n, NUM_PENALTIES]`.
    """
    _adjust_kernel[(len(rows),)](
        logits, rows, ends, ids, biases, times, penalties, logits.stride(0), BLOCK=256, num_warps=4
    )


def settings_of(params: Sequence[SamplingParams]) -> npt.NDArray[np.float64]:
    """What `sample` takes of each row `[rows, NUM_SETTINGS]`."""
    rows = [
        (
            0.0 if row.temperature < GREEDY_BELOW else row.temperature,
            row.top_k,
            row.top_p,
            row.min_p,
        )
        for row in params
    ]
    return np.array(rows, np.float64)


_TRIED: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"min_p": 0.1},
    {"top_k": 40, "top_p": 0.5, "min_p": 0.05},
    {"temperature": 0.0},
)


def _sample_trial(shape: Key, device: torch.device) -> Trial:
    rows, vocab_size = int(shape["rows"]), int(shape["vocab"])
    logits = (torch.randn(rows, vocab_size, device=device) * 3).to(dtype_of(shape, default="fp32"))
    params = [
        SamplingParams(**{"temperature": 1.0, **_TRIED[at % len(_TRIED)]}) for at in range(rows)
    ]
    settings = torch.from_numpy(settings_of(params)).to(device)
    seeds = torch.arange(rows, device=device) - rows // 2
    positions = torch.arange(1, rows + 1, dtype=torch.int32, device=device)
    tokens = torch.zeros(rows, dtype=torch.int64, device=device)

    def run(config: Config | None) -> Outputs:
        sample(logits, settings, seeds, positions, tokens, config)
        return (tokens,)

    def wanted() -> Outputs:
        host = logits.float().cpu().numpy()
        numbers = uniform([seed % (1 << 64) for seed in seeds.tolist()], positions.tolist())
        drawn = reference(host, [replace(row, temperature=1.0) for row in params], numbers)
        greedy = [row.temperature == 0 for row in params]
        return (torch.from_numpy(np.where(greedy, host.argmax(1), drawn)).to(device),)

    return Trial({"vocab": vocab_size}, run, wanted, logits.numel() * 4, tolerance=0.0)


def _adjust_trial(shape: Key, device: torch.device) -> Trial:
    """Two rows of three."""
    vocab_size, listed = int(shape["vocab"]), int(shape["listed"])
    kept = torch.randn(3, vocab_size, device=device)
    i32 = partial(torch.tensor, dtype=torch.int32, device=device)
    ids = torch.stack([torch.randperm(vocab_size)[:listed] for _ in range(2)]).int().to(device)
    biases = torch.randn(2, listed).to(device)
    times = (torch.arange(2 * listed).view(2, listed) % 5 - 1).int().to(device)
    penalties = torch.tensor([[1.3, 0.5, 0.25], [0.7, -0.5, 1.0]], device=device)

    def run(config: Config | None) -> Outputs:
        logits = kept.clone()
        rows, ends = i32([2, 0]), i32([listed, 2 * listed])
        adjust(logits, rows, ends, ids.view(-1), biases.view(-1), times.view(-1), penalties)
        return (logits,)

    def wanted() -> Outputs:
        logits = kept.clone()
        for which, row in enumerate((2, 0)):
            repetition, frequency, presence = penalties[which].tolist()
            its = zip(*(part[which].tolist() for part in (ids, biases, times)), strict=True)
            for token, bias, count in its:
                x = float(logits[row, token]) + bias
                if count >= 0:
                    x = x / repetition if x > 0 else x * repetition
                logits[row, token] = x - max(count, 0) * frequency - (count > 0) * presence
        return (logits,)

    return Trial({}, run, wanted)


SPECS = (
    KernelSpec(
        "sample",
        _sample_trial,
        cases=({"rows": 16, "vocab": 700}, {"rows": 8, "vocab": 1536, "dtype": "bf16"}),
        configs=lambda key: product_of(
            BLOCK=(1024, 2048, 4096), num_warps=(4, 8, 16, 32), num_stages=(1, 2)
        ),
        shapes=product_of(rows=(64,), vocab=(32000, 128256, 151936)),
    ),
    KernelSpec("adjust", _adjust_trial, cases=({"vocab": 700, "listed": 300},)),
)
