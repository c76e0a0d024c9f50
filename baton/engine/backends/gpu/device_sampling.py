"""Sampling on the device, for rows whose logits are taken as they are.

What such a row samples depends on its logits, its settings and one random number, which belongs to
its seed and position: all but the logits the host knows before they exist. So sampling is put on
the stream behind the forward pass, with no wait in between. The result is the one of
`baton.engine.sampling.sampler`, which samples all other rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch
from torch import Tensor

from baton.engine.backends.gpu.device import Stream
from baton.engine.sampling import filters, randomness
from baton.engine.sampling.sampler import GREEDY_BELOW
from baton.sampling import SamplingParams

_NUM_VALUES = filters.NUM_SETTINGS + 2  # and the random numbers, and the rows that sample
_UNIFORM, _WHICH = filters.NUM_SETTINGS, filters.NUM_SETTINGS + 1


class DeviceSampler:
    """Samples for one launch at a time; its inputs lie in pinned memory until that is done.

    tokens: int64 `[max_batch]` on the device · host_tokens: the same, once the launch has ended.
    """

    def __init__(self, stream: Stream, max_batch: int) -> None:
        device = stream.device
        self.tokens = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self.host_tokens = stream.pinned(max_batch, torch.int64)
        self._values = torch.zeros(_NUM_VALUES * max_batch, dtype=torch.float64, device=device)
        self._host_values = stream.pinned(_NUM_VALUES * max_batch, torch.float64)

    def prepare(
        self, params: Rows[SamplingParams], positions: Rows[int], vocab_size: int
    ) -> filters.Settings | None:
        """Prepares to sample one token for each row, at its position: what `sample` is to be given.

        None: every row takes its likeliest token.
        """
        which = [at for at, row in enumerate(params) if row.temperature >= GREEDY_BELOW]
        if not which:
            return None
        sampled = [params[at] for at in which]
        settings = filters.settings_of(sampled, vocab_size)
        values = self._host_values[: _NUM_VALUES * len(which)].numpy().reshape(_NUM_VALUES, -1)
        values[: filters.NUM_SETTINGS] = settings.values
        seeds = [row.seed for row in sampled]
        values[_UNIFORM] = randomness.uniform(seeds, [positions[at] for at in which])
        values[_WHICH] = np.array(which)
        return settings

    def sample(self, settings: filters.Settings | None, logits: Tensor) -> None:
        """Samples from logits `[rows, vocab_size]`, and copies the tokens to the host.

        To be called on the stream. A row whose logits are not numbers may give a token beyond the
        vocabulary.
        """
        tokens = self.tokens[: len(logits)]
        sampled = 0 if settings is None else settings.values.shape[1]
        if sampled < len(logits):
            torch.argmax(logits, 1, out=tokens)
        if settings is not None:
            count = _NUM_VALUES * sampled
            self._values[:count].copy_(self._host_values[:count], non_blocking=True)
            values = self._values[:count].view(_NUM_VALUES, sampled)
            which = values[_WHICH].long()
            some = logits if sampled == len(logits) else logits.index_select(0, which)
            weights = filters.weigh(some, values, settings)
            tokens.index_copy_(0, which, filters.sample(weights, values[_UNIFORM]))
        self.host_tokens[: len(logits)].copy_(tokens, non_blocking=True)
