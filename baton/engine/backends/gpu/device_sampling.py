"""Sampling on the device: what `baton.engine.sampling.sampler` does, put on the stream behind the
forward pass with no wait in between.

What a row samples depends on its logits, its settings, its tokens and one random number, which
belongs to its seed and position. The host knows all but the logits before they exist, and may lack
the last token, which the launch before has left on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.engine.backends.gpu.device import Stream
from baton.engine.ops.triton import sampling
from baton.engine.ops.triton.logprobs import score
from baton.engine.sampling.sampler import (
    Adjustments,
    Sampled,
    Sampler,
    SampleRow,
    TokenLogprobs,
    token_logprobs,
)

KNOWN = -1  # the source of a row whose last token the host knows


@dataclass
class _Launch:
    """One launch's inputs, in pinned memory until it has ended; then its log-probabilities, too.

    integers, floats: what `sampling.adjust` takes, one after the other; of how many rows and tokens
    scored: the rows that want log-probabilities, int32; of how many likely tokens · found: those of
    `[scored, 1 + likely]`, the chosen token's first, and their ids.
    """

    rows: Rows[SampleRow]
    settings: Tensor
    seeds: Tensor
    positions: Tensor
    masks: Tensor | None
    allowed: Tensor | None
    integers: Tensor
    floats: Tensor
    num_adjusted: int
    num_tokens: int
    scored: Tensor
    likely: int
    found: tuple[Tensor, ...] = ()


class DeviceSampler:
    """Samples for one launch at a time.

    tokens: int64 `[rows]` on the device, once the launch has run; as many as it ever had.
    """

    def __init__(self, stream: Stream, sampler: Sampler, max_rows: int) -> None:
        self._stream, self._sampler = stream, sampler
        self._make_room(max_rows)

    def _make_room(self, rows: int) -> None:
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=self._stream.device)
        self._host_tokens = self._stream.pinned(rows, torch.int64)

    def prepare(self, rows: Rows[SampleRow], sources: Rows[int] = ()) -> None:
        """Prepares to sample one token for each row, on the host.

        sources: where among the tokens given to `sample` a row's last one is, or KNOWN; if any are
        given, all are.
        """
        if len(rows) > len(self.tokens):
            self._make_room(len(rows))
        masks = None
        if any(row.grammar for row in rows):
            masks = self._pinned(self._sampler.masks(rows))
        allowed = self._sampler.allowed(rows)
        adjusted = [at for at, row in enumerate(rows) if row.adjusted]
        sources = [sources[at] if sources else KNOWN for at in adjusted]
        changes = [
            self._sampler.adjustments(rows[at], int(source != KNOWN))
            for at, source in zip(adjusted, sources, strict=True)
        ]
        ids, biases, times = (np.concatenate([[], *parts]) for parts in _columns(changes))
        ends = np.cumsum([len(one.ids) for one in changes])
        params = [rows[at].params for at in adjusted]
        penalties = [
            (row.repetition_penalty, row.frequency_penalty, row.presence_penalty) for row in params
        ]
        scored = {
            at: row.params.logprobs
            for at, row in enumerate(rows)
            if row.params.logprobs is not None
        }
        self._launch = _Launch(
            rows,
            self._pinned(sampling.settings_of([row.params for row in rows])),
            self._pinned(np.array([row.params.seed for row in rows], np.uint64).view(np.int64)),
            self._pinned(np.array([len(row.token_ids) for row in rows], np.int32)),
            masks,
            None if allowed is None else self._pinned(allowed),
            self._pinned(np.concatenate([adjusted, ends, sources, ids, times]).astype(np.int32)),
            self._pinned(np.concatenate([np.ravel(penalties), biases]).astype(np.float32)),
            len(adjusted),
            len(ids),
            self._pinned(np.array(list(scored), np.int32)),
            min(max(scored.values(), default=0), self._sampler.vocab_size),
        )

    def _pinned(self, values: np.ndarray) -> Tensor:
        given = torch.from_numpy(values)
        held = self._stream.pinned(given.numel(), given.dtype).view(given.shape)
        return held.copy_(given)

    def sample(self, logits: Tensor, newest: Tensor | None = None) -> None:
        """Samples from logits `[rows, vocab_size]`, and changes them; copies tokens to the host.

        To be called on the stream, once. newest: what `sources` are places in.
        """
        launch, tokens = self._launch, self.tokens[: len(logits)]
        on_device = self._on_device
        if launch.masks is not None:
            logits.masked_fill_(~_unpacked(on_device(launch.masks), logits.shape[1]), -torch.inf)
        raw = logits.clone() if len(launch.scored) and launch.num_adjusted else logits
        if launch.allowed is not None:
            logits.masked_fill_(~_unpacked(on_device(launch.allowed), logits.shape[1]), -torch.inf)
        if rows := launch.num_adjusted:
            integers = on_device(launch.integers)
            which, ends, sources, ids, times = integers.split([rows] * 3 + [launch.num_tokens] * 2)
            penalties, biases = on_device(launch.floats).split(
                [sampling.NUM_PENALTIES * rows, launch.num_tokens]
            )
            newest = tokens if newest is None else newest
            sampling.adjust(logits, which, ends, ids, biases, times, penalties, sources, newest)
        settings, seeds = on_device(launch.settings), on_device(launch.seeds)
        sampling.sample(logits, settings, seeds, on_device(launch.positions), tokens)
        self._host_tokens[: len(tokens)].copy_(tokens, non_blocking=True)
        if len(launch.scored):
            found = score(raw, on_device(launch.scored), tokens, launch.likely)
            launch.found = tuple(
                self._stream.pinned(part.numel(), part.dtype).view(part.shape) for part in found
            )
            for host, there in zip(launch.found, found, strict=True):
                host.copy_(there, non_blocking=True)

    def _on_device(self, host: Tensor) -> Tensor:
        return host.to(self._stream.device, non_blocking=True)

    def sampled(self) -> Sampled:
        """What the launch sampled, once it has ended.

        A row whose logits are not numbers has a token beyond the vocabulary: see `checked`.
        """
        launch = self._launch
        tokens = self._host_tokens[: len(launch.rows)].tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        found = (part.tolist() for part in (launch.scored, *launch.found))
        for at, scores, ids in zip(*found, strict=True) if launch.found else ():
            wanted = launch.rows[at].params.logprobs or 0
            logprobs[at] = token_logprobs(tokens[at], scores[0], ids[1:], scores[1:], wanted)
        return Sampled(tokens, logprobs)


def _columns(changes: list[Adjustments]) -> Iterator[list[np.ndarray]]:
    for at in range(len(Adjustments._fields)):
        yield [one[at] for one in changes]


def _unpacked(words: Tensor, vocab_size: int) -> Tensor:
    """Bits of int32 words `[rows, words]` as bools `[rows, vocab_size]`, the lowest bit first."""
    bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)
    return (bits & 1).flatten(1)[:, :vocab_size].bool()
