"""Logit biases and repetition, frequency and presence penalties, applied in place."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.triton.specs import Config, KernelSpec, Key, Outputs, Trial

NUM_PENALTIES = 3  # repetition, frequency, presence


@triton.jit
def _adjusted(x, bias, times, repetition, frequency, presence):
    """A logit with bias and penalties; times: occurrences in the output, -1 if in no text."""
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

    rows: int32 `[n]`, rows of the logits · ends: int32 `[n]`, end of each row's tokens in the
    concatenated lists `ids` (int32, distinct in a row), `biases` (float32) and `times` (int32:
    occurrences in the output, 0 if only in the prompt, -1 if in neither) · penalties: float32 `[n,
    NUM_PENALTIES]`.
    """
    _adjust_kernel[(len(rows),)](
        logits, rows, ends, ids, biases, times, penalties, logits.stride(0), BLOCK=256, num_warps=4
    )


def _adjust_trial(shape: Key, device: torch.device) -> Trial:
    """Adjusts two of three rows."""
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


SPECS = (KernelSpec("adjust", _adjust_trial, cases=({"vocab": 700, "listed": 300},)),)
