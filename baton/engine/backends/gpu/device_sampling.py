"""Sampling on the device, with the semantics of `baton.engine.sampling.sampler`.

A sampled token depends on logits, settings, seed and position and, with penalties or a grammar, on
the tokens before. CUDA graphs sample all rows without the latter; rows with penalties or a grammar
are sampled again after the graph, when the host has their tokens. Log-probabilities are computed
after the graph, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from baton.config import EngineConfig
from baton.engine.backends.gpu.cuda_graphs import StepGraphs, StepInputs
from baton.engine.backends.gpu.device import Stream
from baton.engine.kernels.triton import penalties, sampling
from baton.engine.kernels.triton.logprobs import score
from baton.engine.kernels.triton.slot_mapping import gather_tokens
from baton.engine.sampling.logprobs import TokenLogprobs, possible
from baton.engine.sampling.sampler import Adjustments, Sampled, Sampler, SampleRow

if TYPE_CHECKING:
    from baton.engine.backends.gpu.model import GpuModel


class SamplingGraphs(StepGraphs):
    """CUDA graphs of the first rank: they load tokens sampled by the previous step, and sample.

    tokens: int64 on the device, the sampled tokens of the last step by rows of logits."""

    def __init__(
        self, model: GpuModel, pool: Tensor, stream: Stream, settings: EngineConfig,
        max_context: int, vocab_size: int,
    ) -> None:  # fmt: skip
        super().__init__(model, pool, stream, settings, max_context)
        self._vocab_size = vocab_size
        self.tokens = torch.zeros(self.largest.logits, dtype=torch.int64, device=stream.device)

    def _load_tokens(self, inputs: StepInputs[Tensor]) -> None:
        if decodes := len(inputs.sources):
            gather_tokens(inputs.token_ids[:decodes], inputs.sources, self.tokens, self._vocab_size)

    def _sample(self, inputs: StepInputs[Tensor], logits: Tensor) -> None:
        tokens = self.tokens[: len(logits)]
        sampling.sample(logits, inputs.settings, inputs.seeds, inputs.positions, tokens)


class Scores:
    """Computes log-probabilities of some rows of a step, for one launch at a time."""

    def __init__(self, stream: Stream, vocab_size: int) -> None:
        self._stream, self._vocab_size = stream, vocab_size
        self._wanted: list[int] = []

    def prepare(self, rows: Rows[int], wanted: list[int]) -> None:
        """rows: rows of the logits · wanted: number of likeliest tokens for each."""
        self._wanted = wanted
        self._likely = min(max(wanted, default=0), self._vocab_size)
        shape = len(wanted), 1 + self._likely
        self._rows = pinned_copy(self._stream, np.array(rows, np.int32))
        size = shape[0] * shape[1]
        self._scores = self._stream.pinned(size, torch.float32).view(shape)
        self._ids = self._stream.pinned(size, torch.int64).view(shape)

    def compute(self, logits: Tensor, tokens: Tensor) -> None:
        """Computes them from unchanged logits and sampled tokens. Called once, on the stream."""
        rows = self._rows.to(self._stream.device, non_blocking=True)
        scores, ids = score(logits, rows, tokens, self._likely)
        self._scores.copy_(scores, non_blocking=True)
        self._ids.copy_(ids, non_blocking=True)

    def found(self, token_ids: Rows[int]) -> list[TokenLogprobs]:
        """Log-probabilities of each row, given its sampled token; after the launch has ended."""
        parts = zip(token_ids, self._scores.tolist(), self._ids.tolist(), self._wanted, strict=True)
        return [
            possible(token, scores[0], ids[1:], scores[1:], wanted)
            for token, scores, ids, wanted in parts
        ]


def pinned_copy(stream: Stream, values: np.ndarray) -> Tensor:
    """A copy in pinned memory, from which copies to the device do not block."""
    given = torch.from_numpy(values)
    return stream.pinned(given.numel(), given.dtype).view(given.shape).copy_(given)


@dataclass
class _Launch:
    """Inputs of one launch, kept in pinned memory until it has ended.

    integers, floats: the arguments of `penalties.adjust`, concatenated · num_adjusted, num_tokens:
    rows and tokens in them · scored: rows that want log-probabilities.
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
    scored: list[int]


class DeviceSampler:
    """Samples on the device, for one launch at a time.

    tokens: int64 on the device, the sampled tokens in its first rows."""

    def __init__(self, stream: Stream, sampler: Sampler, max_rows: int) -> None:
        self._stream, self._sampler = stream, sampler
        self._scores = Scores(stream, sampler.vocab_size)
        self._make_room(max_rows)

    def _make_room(self, rows: int) -> None:
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=self._stream.device)
        self._host_tokens = self._stream.pinned(rows, torch.int64)

    def prepare(self, rows: Rows[SampleRow]) -> None:
        """Prepares the inputs of sampling a token for each row, on the host."""
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
        strengths = [
            (row.repetition_penalty, row.frequency_penalty, row.presence_penalty) for row in params
        ]
        scored = [at for at, row in enumerate(rows) if row.params.logprobs is not None]
        if scored:
            self._scores.prepare(scored, [rows[at].params.logprobs or 0 for at in scored])
        self._launch = _Launch(
            rows,
            self._pinned(sampling.settings_of([row.params for row in rows])),
            self._pinned(np.array([row.params.seed for row in rows], np.uint64).view(np.int64)),
            self._pinned(np.array([len(row.token_ids) for row in rows], np.int32)),
            masks,
            None if allowed is None else self._pinned(allowed),
            self._pinned(np.concatenate([adjusted, ends, ids, times]).astype(np.int32)),
            self._pinned(np.concatenate([np.ravel(strengths), biases]).astype(np.float32)),
            len(adjusted),
            len(ids),
            scored,
        )

    def _pinned(self, values: np.ndarray) -> Tensor:
        return pinned_copy(self._stream, values)

    def sample(self, logits: Tensor) -> Tensor:
        """Samples from logits float32 `[rows, vocab_size]`, which it changes: int64 `[rows]`.

        Also copies the tokens to the host. Called once, on the stream."""
        launch, tokens = self._launch, self.tokens[: len(logits)]
        on_device = self._on_device
        if launch.masks is not None:
            logits.masked_fill_(~_unpacked(on_device(launch.masks), logits.shape[1]), -torch.inf)
        raw = logits.clone() if launch.scored and launch.num_adjusted else logits
        if launch.allowed is not None:
            logits.masked_fill_(~_unpacked(on_device(launch.allowed), logits.shape[1]), -torch.inf)
        if rows := launch.num_adjusted:
            integers = on_device(launch.integers)
            which, ends, ids, times = integers.split([rows] * 2 + [launch.num_tokens] * 2)
            strengths, biases = on_device(launch.floats).split(
                [penalties.NUM_PENALTIES * rows, launch.num_tokens]
            )
            penalties.adjust(logits, which, ends, ids, biases, times, strengths)
        settings, seeds, positions = map(
            on_device, (launch.settings, launch.seeds, launch.positions)
        )
        sampling.sample(logits, settings, seeds, positions, tokens)
        self._host_tokens[: len(tokens)].copy_(tokens, non_blocking=True)
        if launch.scored:
            self._scores.compute(raw, tokens)
        return tokens

    def _on_device(self, host: Tensor) -> Tensor:
        return host.to(self._stream.device, non_blocking=True)

    def sampled(self) -> Sampled:
        """Tokens and log-probabilities, after the launch has ended.

        A row whose logits are not finite has NO_TOKEN."""
        launch = self._launch
        tokens = self._sampler.checked(self._host_tokens[: len(launch.rows)].tolist())
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        if scored := launch.scored:
            found = self._scores.found([tokens[at] for at in scored])
            for at, one in zip(scored, found, strict=True):
                logprobs[at] = one
        return Sampled(tokens, logprobs)


def _columns(changes: list[Adjustments]) -> Iterator[list[np.ndarray]]:
    for at in range(len(Adjustments._fields)):
        yield [one[at] for one in changes]


def _unpacked(words: Tensor, vocab_size: int) -> Tensor:
    """Bits of int32 words `[rows, words]` as bools `[rows, vocab_size]`, the lowest bit first."""
    bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)
    return (bits & 1).flatten(1)[:, :vocab_size].bool()
