"""Sampling of a token for each row of logits, with temperature, top-k, top-p and min-p.

Semantics are those of `baton.engine.sampling.top_k_top_p`, except that weights (probabilities
relative to the largest) are summed as multiples of 2 ** -44, which is exact in any order. Top-k and
top-p both search for a threshold: the largest weight at and above which there are k tokens, or a
mass of p. A subset of the row gives bounds for the threshold. One pass over the row then sums the
weights above the bounds and collects the tokens between them as candidates, among which the
threshold is found by bisection of its bits: positive floats are ordered as their bits. If the
bounds were wrong, or too many weights are equal, the bisection runs over the whole row.
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

from baton.engine.kernels.triton.launch_configs import choose
from baton.engine.kernels.triton.specs import (
    Config,
    KernelSpec,
    Key,
    Outputs,
    Trial,
    dtype_of,
    product_of,
)
from baton.engine.sampling.randomness import uniform
from baton.engine.sampling.sampler import GREEDY_BELOW, NUM_SETTINGS
from baton.engine.sampling.top_k_top_p import sample as reference
from baton.generation.sampling_params import SamplingParams

_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _mixed(state):
    """SplitMix64's output for a state, uint64."""
    mixed = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    return mixed ^ (mixed >> 31)


@triton.jit
def random_bits(seed, position):
    """The random number of a seed (int64, as bits) and a position: uint64 of 53 bits.

    Divided by 2 ** 53 it is that of `baton.engine.sampling.randomness`."""
    gamma = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    offset = (position.to(tl.int64) + 1).to(tl.uint64, bitcast=True) * gamma
    return _mixed(_mixed(seed.to(tl.uint64, bitcast=True) + gamma) + offset) >> 11


@triton.jit
def _logits(logits, ids, vocab_size):
    """Logits of a row as float32; minus infinity beyond the vocabulary."""
    return tl.load(logits + ids, mask=ids < vocab_size, other=-_INFINITY).to(tl.float32)


@triton.jit
def _weights(row, ids):
    """Weights of tokens: 1 for the likeliest one, 0 beyond the vocabulary.

    row: pointer to its logits, vocabulary size, largest logit and reciprocal temperature."""
    logits, vocab_size, largest, rate = row
    return tl.exp((_logits(logits, ids, vocab_size) - largest) * rate)


@triton.jit
def _fixed(weights):
    """Weights as int64 multiples of 2 ** -44, whose sums are exact in any order."""
    return (weights * (1 << 44)).to(tl.int64)


@triton.jit
def _largest_kernel(
    logits, settings, positions, peaks, peak_tokens, sums, vocab_size, row_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Largest logit of a part of a row and its token, -1 if a logit is NaN. Grid `[parts, rows]`.

    If top-p needs it, also the sum of weights relative to that logit."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(positions + row) > 0:
        ids = part * BLOCK + tl.arange(0, BLOCK)
        x = _logits(logits + row * row_stride, ids, vocab_size)
        number = x == x  # noqa: PLR0124 (NaN is not)
        largest = tl.max(tl.where(number, x, -_INFINITY), 0)
        token = tl.min(tl.where(number, tl.where(x == largest, ids, vocab_size), -1), 0)
        at = row * tl.num_programs(0) + part
        tl.store(peaks + at, largest)
        tl.store(peak_tokens + at, token)
        settings += row * 4
        temperature = tl.load(settings).to(tl.float32)
        if (temperature > 0) & (tl.load(settings + 2) < 1) & (tl.abs(largest) < _INFINITY):
            tl.store(sums + at, tl.sum(tl.exp((x - largest) * (1.0 / temperature)), 0))


@triton.jit(do_not_specialize=["num_parts"])
def _bracket_kernel(
    logits, settings, positions, peaks, peak_tokens, sums, bounds, found, tokens, vocab_size,
    row_stride, num_parts, PARTS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Samples greedy and broken rows; estimates bounds of the threshold for others. Grid `[rows]`.

    The estimate uses a subset of CAPACITY tokens. bounds: the largest logit (NaN if the row is
    done) and two weights, both 0 if top-k and top-p keep all tokens · found: set to 0.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    settings += row * 4
    bounds += row * 3
    part = tl.arange(0, PARTS)
    inside = part < num_parts
    at = row * num_parts + part
    peak = tl.load(peaks + at, mask=inside, other=-_INFINITY)
    token = tl.load(peak_tokens + at, mask=inside, other=vocab_size)
    largest = tl.max(peak, 0)
    usable = (tl.min(token, 0) >= 0) & (tl.abs(largest) < _INFINITY)
    temperature = tl.load(settings).to(tl.float32)
    if tl.load(positions + row) <= 0:  # padding, whose logits were not read
        tl.store(bounds, float("nan"))
    elif usable & (temperature > 0):
        top_k, top_p = tl.load(settings + 1).to(tl.int32), tl.load(settings + 2)
        counted = (top_k > 0) & (top_k < vocab_size)
        low, high = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
        if counted | (top_p < 1):
            # From the smallest weight to infinity. Tokens with a weight of 0 are no candidates.
            low, high = low + 1, high + 0x7F800000
            if vocab_size > CAPACITY:
                rate = 1.0 / temperature
                share = vocab_size / CAPACITY  # tokens for each one in the subset
                sampled = tl.arange(0, CAPACITY)
                # Groups of four adjacent tokens, to read less memory.
                ids = sampled // 4 * vocab_size // (CAPACITY // 4) + sampled % 4
                weights = _weights((logits, vocab_size, largest, rate), ids)
                bits = weights.to(tl.int32, bitcast=True)
                rank = top_k / share
                if counted == 0:
                    # From the mass below the threshold: a few tokens above it, which the subset may
                    # lack, can have most of the mass.
                    mass = tl.load(sums + at, mask=peak > -_INFINITY, other=0.0)
                    mass = tl.sum(mass * tl.exp((peak - largest) * rate), 0)
                    below = (1.0 - top_p).to(tl.float32) * mass / share
                    edge = tl.full([], 0, tl.int32)
                    for step in range(16):
                        trial = edge + (1 << (29 - step))
                        if tl.sum(tl.where(bits < trial, weights, 0.0), 0) <= below:
                            edge = trial
                    rank = tl.sum((bits >= edge).to(tl.int32), 0).to(tl.float32)
                # Several standard deviations of the rank in a subset.
                spread = tl.minimum(16.0 + 8.0 * tl.sqrt(rank), 0.4 * CAPACITY / share)
                lower, upper = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
                for step in range(16):
                    bit = 1 << (29 - step)
                    counts = (bits >= lower + bit).to(tl.int32)
                    counts = tl.sum(counts + ((bits >= upper + bit).to(tl.int32) << 16), 0)
                    if (counts & 0xFFFF) >= rank + spread:
                        lower += bit
                    if (counts >> 16) >= rank - spread:
                        upper += bit
                low = tl.maximum(lower, low)
                if rank > spread:
                    high = upper + (1 << 14)
        tl.store(bounds, largest)
        tl.store(bounds + 1, low.to(tl.float32, bitcast=True))
        tl.store(bounds + 2, high.to(tl.float32, bitcast=True))
        tl.store(found + row, 0)
    else:
        tl.store(bounds, float("nan"))
        likeliest = tl.min(tl.where(peak == largest, token, vocab_size), 0)
        tl.store(tokens + row, tl.where(usable, likeliest, vocab_size).to(tl.int64))


@triton.jit(do_not_specialize_on_alignment=["logits"])
def _weigh_kernel(
    logits, settings, bounds, masses, counts, found, candidates, vocab_size, row_stride,
    BLOCK: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Sums a part of a row, and collects candidates. Grid `[parts, rows]`.

    masses: of all tokens, of those at or above the upper bound, and of those that min-p keeps ·
    counts: tokens at or above the upper bound · candidates: tokens between the bounds in any order,
    as bits of their weights and tokens.
    """
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_parts = tl.num_programs(0)
    bounds += row * 3
    largest = tl.load(bounds)
    if largest == largest:  # noqa: PLR0124 (NaN is not)
        settings += row * 4
        logits += row * row_stride
        low = tl.load(bounds + 1).to(tl.int32, bitcast=True)
        high = tl.load(bounds + 2).to(tl.int32, bitcast=True)
        rate = 1.0 / tl.load(settings).to(tl.float32)
        least = tl.load(settings + 3).to(tl.float32)
        COLUMNS: tl.constexpr = min(BLOCK, 256)
        ids = tl.arange(0, COLUMNS)[:, None] + tl.arange(0, BLOCK // COLUMNS)[None, :] * COLUMNS
        ids += part * BLOCK
        weights = _weights((logits, vocab_size, largest, rate), ids)
        fixed = _fixed(weights)
        own = masses + row * 3 * num_parts + part
        tl.store(own, tl.sum(fixed))
        if least > 0:
            tl.store(own + 2 * num_parts, tl.sum(tl.where(weights >= least, fixed, 0)))
        if high > 0:
            bits = weights.to(tl.int32, bitcast=True)
            width = (high - low).to(tl.uint32, bitcast=True)
            above = bits >= high
            between = ((bits - low).to(tl.uint32, bitcast=True) < width).to(tl.int32)
            # Each thread sums its columns. Two counts below 2 ** 15 share an integer.
            before = tl.cumsum(between, 1) - between
            column = tl.sum(between + (above.to(tl.int32) << 16), 1)
            total = tl.sum(column, 0)
            mass = tl.full([], 0, tl.int64)
            if high < 0x7F800000:
                mass = tl.sum(tl.where(above, fixed, 0))
            tl.store(own + num_parts, mass)
            tl.store(counts + row * num_parts + part, total >> 16)
            count = total & 0xFFFF
            if count > 0:
                column &= 0xFFFF
                first = tl.atomic_add(found + row, count, sem="relaxed")
                at = first + (tl.cumsum(column, 0) - column)[:, None] + before
                fits = (between > 0) & (at < CAPACITY)
                slots = candidates + row * 2 * CAPACITY + at
                tl.store(slots, bits, mask=fits)
                tl.store(slots + CAPACITY, ids, mask=fits)


@triton.jit
def _at_least(row, candidates, above, edge, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Number of tokens with weights of at least `edge` (as bits); if MASS, their mass, int64.

    candidates: bits of their weights (-1 if absent), masses and tokens; and whether to scan the
    whole row instead · above: amount of the tokens above all candidates.
    """
    bits, fixed, _, whole = candidates
    amount = above
    if whole:
        amounts = tl.zeros([BLOCK], tl.int64 if MASS else tl.int32)
        for first in range(0, row[1], BLOCK):
            ids = first + tl.arange(0, BLOCK)
            weights = _weights(row, ids)
            kept = (weights.to(tl.int32, bitcast=True) >= edge) & (ids < row[1])
            amounts += tl.where(kept, _fixed(weights), 0) if MASS else kept.to(tl.int32)
        amount = tl.sum(amounts, 0)
    elif MASS:
        amount += tl.sum(tl.where(bits >= edge, fixed, 0), 0)
    else:
        amount += tl.sum((bits >= edge).to(tl.int32), 0)
    return amount


@triton.jit
def _edge(row, candidates, above, low, high, wanted, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Bisects for the largest threshold in low .. high - 1 with at least `wanted` at or above it.

    Returns its bits, and the amounts above it and at it."""
    reached = _at_least(row, candidates, above, low, MASS, BLOCK)
    over = tl.where(candidates[3], 0, above)  # no weight of a row is above 1
    while high - low > 1:
        middle = (low + high) // 2
        amount = _at_least(row, candidates, above, middle, MASS, BLOCK)
        if amount >= wanted:
            low, reached = middle, amount
        else:
            high, over = middle, amount
    return low, over, reached - over


@triton.jit
def _equals(row, candidates, edge, end, BLOCK: tl.constexpr):
    """Number of tokens before `end` whose weight has these bits."""
    bits, _, ids, whole = candidates
    if whole:
        counts = tl.zeros([BLOCK], tl.int32)
        for first in range(0, end, BLOCK):
            each = first + tl.arange(0, BLOCK)
            same = (_weights(row, each).to(tl.int32, bitcast=True) == edge) & (each < end)
            counts += same.to(tl.int32)
        count = tl.sum(counts, 0)
    else:
        count = tl.sum(((bits == edge) & (ids < end)).to(tl.int32), 0)
    return count


@triton.jit
def _kept_mass(row, candidates, above, edge, last, end, BLOCK: tl.constexpr):
    """Mass of the tokens before `end` that are above the edge, or at it and not after `last`."""
    bits, fixed, ids, whole = candidates
    mass = above
    if whole:
        masses = tl.zeros([BLOCK], tl.int64)
        for first in range(0, end, BLOCK):
            each = first + tl.arange(0, BLOCK)
            weights = _weights(row, each)
            masses += tl.where(_is_kept(weights, each, edge, last), _fixed(weights), 0)
        mass = tl.sum(masses, 0)
    else:
        kept = ((bits > edge) | ((bits == edge) & (ids <= last))) & (ids < end)
        mass += tl.sum(tl.where(kept, fixed, 0), 0)
    return mass


@triton.jit
def _is_kept(weights, ids, edge, last):
    bits = weights.to(tl.int32, bitcast=True)
    return (bits > edge) | ((bits == edge) & (ids <= last))


@triton.jit(do_not_specialize=["num_parts"])
def _choose_kernel(
    logits, settings, seeds, positions, bounds, masses, counts, found, candidates, tokens,
    vocab_size, row_stride, num_parts, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
):  # fmt: skip
    """Samples the rows that `_bracket_kernel` did not. Grid `[rows]`."""
    at = tl.program_id(0).to(tl.int64)
    bounds += at * 3
    largest = tl.load(bounds)
    if largest == largest:  # noqa: PLR0124 (NaN is not)
        settings += at * 4
        row = (
            logits + at * row_stride,
            vocab_size,
            largest,
            1.0 / tl.load(settings).to(tl.float32),
        )
        high = tl.load(bounds + 2).to(tl.int32, bitcast=True)
        part = tl.arange(0, PARTS)
        inside = part < num_parts
        own = masses + at * 3 * num_parts + part
        mass = tl.load(own, mask=inside, other=0)  # of kept tokens, without candidates

        # Tokens above the edge are kept, and those at the edge up to `last`.
        edge, last = tl.full([], -1, tl.int32), tl.full([], 0, tl.int32) + vocab_size
        whole = high < 0
        count = tl.where(high > 0, tl.load(found + at), 0)
        listed = tl.arange(0, CAPACITY)
        slots = candidates + at * 2 * CAPACITY + listed
        bits = tl.load(slots, mask=listed < count, other=-1)
        ids = tl.load(slots + CAPACITY, mask=listed < count, other=vocab_size)
        fixed = _fixed(tl.maximum(bits, 0).to(tl.float32, bitcast=True))
        if high > 0:
            low = tl.load(bounds + 1).to(tl.int32, bitcast=True)
            high = tl.minimum(high, 0x3F800001)  # above the weight 1
            top_k, top_p = tl.load(settings + 1).to(tl.int32), tl.load(settings + 2)
            total = tl.sum(mass, 0)
            mass = tl.load(own + num_parts, mask=inside, other=0)
            over_mass = tl.sum(mass, 0)
            whole = count > CAPACITY
            needed, equals = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)  # at the edge
            if (top_k > 0) & (top_k < vocab_size):
                over = tl.sum(tl.load(counts + at * num_parts + part, mask=inside, other=0), 0)
                # If fewer tokens have a weight, all of them are kept.
                top_k = tl.where(whole | (low > 1), top_k, tl.minimum(top_k, over + count))
                whole |= (over >= top_k) | (over + count < top_k)
                low, high = tl.where(whole, 0, low), tl.where(whole, 0x3F800001, high)
                some = (bits, fixed, ids, whole)
                edge, over, equals = _edge(row, some, over, low, high, top_k, False, BLOCK)
                needed = top_k - over
                total = _at_least(row, some, over_mass, edge + 1, True, BLOCK)
                total += needed * _fixed(edge.to(tl.float32, bitcast=True))
            if top_p < 1:
                wanted = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
                wanted = tl.minimum(tl.maximum(wanted, 1), total)
                whole |= (over_mass >= wanted) | (over_mass + tl.sum(fixed, 0) < wanted)
                low, high = tl.where(whole, 0, low), tl.where(whole, 0x3F800001, high)
                some = (bits, fixed, ids, whole)
                edge, over, each = _edge(row, some, over_mass, low, high, wanted, True, BLOCK)
                one = _fixed(edge.to(tl.float32, bitcast=True))
                needed = tl.cdiv(wanted - over, one).to(tl.int32)
                equals = (each // one).to(tl.int32)
            if needed < equals:  # keeps the lowest ids
                some = (bits, fixed, ids, whole)
                last = tl.full([], 0, tl.int32)
                behind = tl.full([], 0, tl.int32) + vocab_size
                while behind - last > 1:
                    middle = (last + behind) // 2
                    if _equals(row, some, edge, middle, BLOCK) < needed:
                        last = middle
                    else:
                        behind = middle
        least = tl.load(settings + 3).to(tl.float32).to(tl.int32, bitcast=True)
        if (least > 0) & (edge < least):
            edge, last = least - 1, tl.full([], -1, tl.int32)
            bits = tl.full([CAPACITY], -1, tl.int32)
            mass = tl.load(own + 2 * num_parts, mask=inside, other=0)

        # The token at which the cumulated mass exceeds the target; first its part is found.
        some = (bits, fixed, ids, whole)
        total = _kept_mass(row, some, tl.sum(mass, 0), edge, last, vocab_size, BLOCK)
        number = random_bits(tl.load(seeds + at), tl.load(positions + at)) << 11
        target = tl.umulhi(number, total.to(tl.uint64)).to(tl.int64)
        first, behind = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32) + num_parts
        before = tl.full([], 0, tl.int64)
        while behind - first > 1:
            middle = (first + behind) // 2
            passed = tl.sum(tl.where(part < middle, mass, 0), 0)
            passed = _kept_mass(row, some, passed, edge, last, middle * BLOCK, BLOCK)
            if passed <= target:
                first, before = middle, passed
            else:
                behind = middle
        each = first * BLOCK + tl.arange(0, BLOCK)
        weights = _weights(row, each)
        kept = _is_kept(weights, each, edge, last)
        passing = before + tl.cumsum(tl.where(kept, _fixed(weights), 0), 0) > target
        token = tl.min(tl.where(kept & passing, each, vocab_size), 0)
        tl.store(tokens + at, token.to(tl.int64))


def sample(
    logits: Tensor, settings: Tensor, seeds: Tensor, positions: Tensor, tokens: Tensor,
    config: Config | None = None,
) -> None:  # fmt: skip
    """Writes one token for each row of logits `[rows, vocab]`, which stay as they are.

    logits: float32, float16 or bfloat16 · settings: float64 `[rows, NUM_SETTINGS]`, see
    `settings_of` · seeds: int64 `[rows]`, the bits of unsigned ones · positions: int32 `[rows]`, of
    the tokens to sample; less than 1 is a padding row, whose token is not written · tokens: int64
    `[rows]`. Of a greedy row it is the likeliest token, of equals the lowest id; of a row whose
    logits are not numbers one beyond the vocabulary. config: of the launches; None is that of
    `tuning`. Waits for nothing on the device and keeps nothing between calls: a CUDA graph can hold
    it.
    """
    rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and settings.is_contiguous() and settings.shape[1] == NUM_SETTINGS
    assert vocab_size < 1 << 19, "sums of weights are int64"
    config = dict(config or choose("sample", {"vocab": vocab_size}, logits.device))
    block, capacity, warps = (config.pop(name) for name in ("BLOCK", "CAPACITY", "ROW_WARPS"))
    parts = triton.cdiv(vocab_size, block)
    sizes = (vocab_size, logits.stride(0))
    new = partial(torch.empty, device=logits.device)
    peaks, sums = (new(rows, parts) for _ in range(2))
    peak_tokens, counts = (new(rows, parts, dtype=torch.int32) for _ in range(2))
    bounds, found = new(rows, 3), new(rows, dtype=torch.int32)
    masses = new(rows, 3, parts, dtype=torch.int64)
    candidates = new(rows, 2, capacity, dtype=torch.int32)
    row_config = {
        "PARTS": triton.next_power_of_2(parts), "CAPACITY": capacity, "num_warps": warps
    }  # fmt: skip
    _largest_kernel[parts, rows](
        logits, settings, positions, peaks, peak_tokens, sums, *sizes, BLOCK=block, **config
    )
    _bracket_kernel[(rows,)](
        logits, settings, positions, peaks, peak_tokens, sums, bounds, found, tokens, *sizes, parts,
        **row_config,
    )  # fmt: skip
    _weigh_kernel[parts, rows](
        logits, settings, bounds, masses, counts, found, candidates, *sizes, BLOCK=block,
        CAPACITY=capacity, **config,
    )  # fmt: skip
    _choose_kernel[(rows,)](
        logits, settings, seeds, positions, bounds, masses, counts, found, candidates, tokens,
        *sizes, parts, BLOCK=block, **row_config,
    )  # fmt: skip


def settings_of(params: Sequence[SamplingParams]) -> npt.NDArray[np.float64]:
    """The settings of `sample` for each row, `[rows, NUM_SETTINGS]`."""
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

    return Trial(
        {"rows": rows, "vocab": vocab_size}, run, wanted, logits.numel() * 4, tolerance=0.0
    )


SPECS = (
    KernelSpec(
        "sample",
        _sample_trial,
        cases=({"rows": 16, "vocab": 700}, {"rows": 8, "vocab": 1536, "dtype": "bf16"}),
        configs=lambda key: product_of(
            BLOCK=(1024, 2048, 4096, 8192),
            CAPACITY=(8192,),
            ROW_WARPS=(8, 16, 32),
            num_warps=(4, 8),
            num_stages=(1,),
        ),
        shapes=product_of(rows=(64,), vocab=(32000, 128256, 151936)),
    ),
)
