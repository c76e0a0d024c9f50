"""Sampling on the device: what `baton.engine.sampling.sampler` does.

What a row samples depends on its logits, its settings, its seed and position, and, where it has
penalties, a grammar and the like, on its tokens. Decode steps sample all rows as if they had none
of these, within their graphs; rows that have some, or want log-probabilities, are sampled once
more, behind the step, when the host knows their tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from baton.engine.backends.gpu.device import Stream
from baton.engine.backends.gpu.graphs import DecodeGraphs, Sections
from baton.engine.ops.triton import sampling
from baton.engine.ops.triton.placement import feed
from baton.engine.sampling.sampler import (
    Adjustments,
    Sampled,
    Sampler,
    SampleRow,
    TokenLogprobs,
    token_logprobs,
)

if TYPE_CHECKING:
    from baton.engine.backends.gpu.model import GpuModel


class SamplingGraphs(DecodeGraphs):
    """Decode steps of the rank that samples: each begins with the tokens that the one before has
    sampled, if it is to go on with them, and ends with its own.

    tokens: int64 `[max_batch]` on the device, those of the last step.
    """

    def __init__(
        self, model: GpuModel, pool: Tensor, stream: Stream, max_batch: int, width: int, vocab: int
    ) -> None:
        super().__init__(model, pool, stream, max_batch, width)
        self._vocab = vocab
        self.tokens = torch.zeros(max_batch, dtype=torch.int64, device=stream.device)

    def _feed(self, at: Sections[Tensor]) -> None:
        feed(at.token_ids, at.sources, self.tokens, self._vocab)

    def _sample(self, at: Sections[Tensor], logits: Tensor) -> None:
        tokens = self.tokens[: len(logits)]
        sampling.sample(logits, at.settings, at.seeds, at.positions, tokens)


@dataclass
class _Launch:
    """One launch's inputs, in pinned memory until it has ended; then its log-probabilities, too.

    integers, floats: what `sampling.adjust` takes, one after the other; of how many rows and tokens
    logprobs: of how many likely tokens; None is without · found: those of `[rows, 1 + logprobs]`,
    the chosen token's first, and their ids.
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
    logprobs: int | None
    found: tuple[Tensor, Tensor] | None = None


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

    def prepare(self, rows: Rows[SampleRow]) -> None:
        """Prepares to sample one token for each row, on the host."""
        if len(rows) > len(self.tokens):
            self._make_room(len(rows))
        masks = None
        if any(row.grammar for row in rows):
            masks = self._pinned(self._sampler.masks(rows))
        allowed = self._sampler.allowed(rows)
        adjusted = [at for at, row in enumerate(rows) if row.adjusted]
        changes = [self._sampler.adjustments(rows[at]) for at in adjusted]
        ids, biases, times = (np.concatenate([[], *parts]) for parts in _columns(changes))
        ends = np.cumsum([len(one.ids) for one in changes])
        params = [rows[at].params for at in adjusted]
        penalties = [
            (row.repetition_penalty, row.frequency_penalty, row.presence_penalty) for row in params
        ]
        wanted = [row.params.logprobs for row in rows if row.params.logprobs is not None]
        self._launch = _Launch(
            rows,
            self._pinned(sampling.settings_of([row.params for row in rows])),
            self._pinned(np.array([row.params.seed for row in rows], np.uint64).view(np.int64)),
            self._pinned(np.array([len(row.token_ids) for row in rows], np.int32)),
            masks,
            None if allowed is None else self._pinned(allowed),
            self._pinned(np.concatenate([adjusted, ends, ids, times]).astype(np.int32)),
            self._pinned(np.concatenate([np.ravel(penalties), biases]).astype(np.float32)),
            len(adjusted),
            len(ids),
            max(wanted) if wanted else None,
        )

    def _pinned(self, values: np.ndarray) -> Tensor:
        given = torch.from_numpy(values)
        held = self._stream.pinned(given.numel(), given.dtype).view(given.shape)
        return held.copy_(given)

    def sample(self, logits: Tensor) -> Tensor:
        """Samples from logits float32 `[rows, vocab_size]`, and changes them: int64 `[rows]`.

        Copies them to the host, too. To be called on the stream, once.
        """
        launch, tokens = self._launch, self.tokens[: len(logits)]
        on_device = self._on_device
        if launch.masks is not None:
            logits.masked_fill_(~_unpacked(on_device(launch.masks), logits.shape[1]), -torch.inf)
        raw = logits.clone() if launch.logprobs is not None and launch.num_adjusted else logits
        if launch.allowed is not None:
            logits.masked_fill_(~_unpacked(on_device(launch.allowed), logits.shape[1]), -torch.inf)
        if rows := launch.num_adjusted:
            integers = on_device(launch.integers)
            which, ends, ids, times = integers.split([rows] * 2 + [launch.num_tokens] * 2)
            penalties, biases = on_device(launch.floats).split(
                [sampling.NUM_PENALTIES * rows, launch.num_tokens]
            )
            sampling.adjust(logits, which, ends, ids, biases, times, penalties)
        settings, seeds, positions = map(
            on_device, (launch.settings, launch.seeds, launch.positions)
        )
        sampling.sample(logits, settings, seeds, positions, tokens)
        self._host_tokens[: len(tokens)].copy_(tokens, non_blocking=True)
        if launch.logprobs is not None:
            self._score(launch, raw, tokens, launch.logprobs)
        return tokens

    def _score(self, launch: _Launch, logits: Tensor, tokens: Tensor, likely: int) -> None:
        """Puts log-probabilities into the launch."""
        best = logits.topk(min(likely, logits.shape[1]))
        # A token beyond the vocabulary is an error, raised by `sampled`, but must be no index.
        chosen = tokens.clamp(max=logits.shape[1] - 1)[:, None]
        scores = torch.cat([logits.gather(1, chosen), best.values], 1)
        scores -= logits.logsumexp(1, keepdim=True)
        found = scores, torch.cat([chosen, best.indices], 1)
        launch.found = (
            self._stream.pinned(scores.numel(), scores.dtype).view(scores.shape),
            self._stream.pinned(scores.numel(), torch.int64).view(scores.shape),
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
        if launch.found is not None:
            scores, ids = (part.tolist() for part in launch.found)
            for at, row in enumerate(launch.rows):
                if row.params.logprobs is not None:
                    first, *rest = scores[at]
                    logprobs[at] = token_logprobs(
                        tokens[at], first, ids[at][1:], rest, row.params.logprobs
                    )
        return Sampled(tokens, logprobs)


def _columns(changes: list[Adjustments]) -> Iterator[list[np.ndarray]]:
    for at in range(len(Adjustments._fields)):
        yield [one[at] for one in changes]


def _unpacked(words: Tensor, vocab_size: int) -> Tensor:
    """Bits of int32 words `[rows, words]` as bools `[rows, vocab_size]`, the lowest bit first."""
    bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)
    return (bits & 1).flatten(1)[:, :vocab_size].bool()
