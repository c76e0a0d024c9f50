"""Log-probabilities of the sampled and the likeliest tokens, for rows that ask for them.

A first kernel computes the likeliest tokens and the sum of exponentials of each part of a row; a
second joins the parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.triton.specs import Config, KernelSpec, Key, Outputs, Trial, dtype_of
from baton.generation.sampling_params import MAX_TOP_LOGPROBS

_INFINITY = tl.constexpr(float("inf"))
_LOWEST = tl.constexpr(-(1 << 63))
_BLOCK = 2048


@triton.jit(do_not_specialize=["likely"])
def _part_kernel(
    logits, rows, keys, peaks, sums, vocab_size, row_stride, likely, BLOCK: tl.constexpr
):
    """Largest logit, sum of exponentials relative to it, and keys of the likeliest tokens of a
    part.

    Keys are ordered by logit, equal ones by ascending token. Grid `[parts, rows]`.
    """
    part, at = tl.program_id(0), tl.program_id(1).to(tl.int64)
    ids = part * BLOCK + tl.arange(0, BLOCK)
    logits += tl.load(rows + at).to(tl.int64) * row_stride
    x = tl.load(logits + ids, mask=ids < vocab_size, other=-_INFINITY).to(tl.float32)
    own = at * tl.num_programs(0) + part
    largest = tl.maximum(tl.max(x, 0), -3e38)
    tl.store(peaks + own, largest)
    tl.store(sums + own, tl.sum(tl.exp(x - largest), 0))
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    # The bits of negative floats are in descending order.
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    key = (ordered << 32) | (0x7FFFFFFF - ids).to(tl.int64)
    for which in range(likely):
        best = tl.max(key, 0)
        tl.store(keys + own * likely + which, best)
        key = tl.where(key == best, _LOWEST, key)


@triton.jit(do_not_specialize=["num_parts", "likely"])
def _join_kernel(
    logits, rows, tokens, keys, peaks, sums, scores, ids, vocab_size, row_stride, num_parts, likely,
    PARTS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Joins the parts of a row. Grid `[rows]`."""
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + at).to(tl.int64)
    part = tl.arange(0, PARTS)
    inside = part < num_parts
    peak = tl.load(peaks + at * num_parts + part, mask=inside, other=-_INFINITY)
    total = tl.load(sums + at * num_parts + part, mask=inside, other=0.0)
    largest = tl.max(peak, 0)
    base = largest + tl.log(tl.sum(total * tl.exp(peak - largest), 0))
    scores += at * (1 + likely)
    ids += at * (1 + likely)
    token = tl.minimum(tl.load(tokens + row), vocab_size - 1)
    tl.store(ids, token)
    tl.store(scores, tl.load(logits + row * row_stride + token).to(tl.float32) - base)
    slot = tl.arange(0, KEYS)
    count = num_parts * likely
    key = tl.load(keys + at * count + slot, mask=slot < count, other=_LOWEST)
    for which in range(1, likely + 1):
        best = tl.max(key, 0)
        ordered = (best >> 32).to(tl.int32)
        bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
        tl.store(scores + which, bits.to(tl.float32, bitcast=True) - base)
        tl.store(ids + which, 0x7FFFFFFF - (best & 0x7FFFFFFF))
        key = tl.where(key == best, _LOWEST, key)


def score(logits: Tensor, rows: Tensor, tokens: Tensor, likely: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities float32 `[n, 1 + likely]` and their tokens, int64. Does not wait for the
    device.

    The sampled token comes first, then the likeliest tokens, equal ones by ascending token.

    logits: `[.., vocab]` of any floating type · rows: int32 `[n]`, rows of the logits · tokens:
    int64 `[..]`, the sampled token of each row of logits; one beyond the vocabulary counts as the
    last · likely: number of likeliest tokens, at most the vocabulary.
    """
    vocab_size, count = logits.shape[1], len(rows)
    assert logits.stride(1) == 1 and likely <= min(vocab_size, MAX_TOP_LOGPROBS)
    parts = triton.cdiv(vocab_size, _BLOCK)
    peaks, sums = torch.empty(2, count, parts, device=logits.device)
    keys = torch.empty(count, parts, likely, dtype=torch.int64, device=logits.device)
    scores = torch.empty(count, 1 + likely, device=logits.device)
    ids = torch.empty(count, 1 + likely, dtype=torch.int64, device=logits.device)
    sizes = (vocab_size, logits.stride(0))
    _part_kernel[parts, count](
        logits, rows, keys, peaks, sums, *sizes, likely, BLOCK=_BLOCK, num_warps=8
    )
    _join_kernel[(count,)](
        logits, rows, tokens, keys, peaks, sums, scores, ids, *sizes, parts, likely,
        PARTS=triton.next_power_of_2(parts),
        KEYS=triton.next_power_of_2(parts * MAX_TOP_LOGPROBS), num_warps=8,
    )  # fmt: skip
    return scores, ids


def _trial(shape: Key, device: torch.device) -> Trial:
    vocab_size, likely = int(shape["vocab"]), int(shape["likely"])
    # Rounded, so that some are equal; some tokens are masked.
    logits = (torch.randn(5, vocab_size, device=device) * 40).round().to(dtype_of(shape))
    logits[2, : vocab_size // 2] = -torch.inf
    logits[1] = -logits[1].abs()  # the likeliest are zeros, of both signs
    logits[1, ::2] += 0.0
    rows = torch.tensor([4, 2, 1], dtype=torch.int32, device=device)
    tokens = torch.tensor([0, 1, vocab_size, 3, vocab_size - 1], device=device)

    def run(config: Config | None) -> Outputs:
        scores, ids = score(logits, rows, tokens, likely)
        return scores.exp(), ids.float()

    def reference() -> Outputs:
        wanted = logits[rows.long()].double()
        chosen = tokens[rows.long()].clamp(max=vocab_size - 1)[:, None]
        ids = torch.cat([chosen, wanted.sort(descending=True, stable=True).indices[:, :likely]], 1)
        return wanted.softmax(1).gather(1, ids).float(), ids.float()

    return Trial({}, run, reference)


SPECS = (
    KernelSpec(
        "logprobs",
        _trial,
        cases=(
            {"vocab": 700, "likely": 0, "dtype": "fp32"},
            {"vocab": 5000, "likely": 20, "dtype": "bf16"},
            {"vocab": 3, "likely": 2, "dtype": "fp16"},
        ),
    ),
)
