"""Tokens drawn on the device, for rows whose logits are taken as they are.

What such a row draws depends on its logits, its settings and one random number, which belongs to
its seed and position: all but the logits the host knows before they exist. So the draw is put on
the lane behind the forward pass, and nobody waits in between. The result is the one of
`baton.engine.sampling.sampler`, which draws for all other rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.engine.backends.gpu.device import Lane
from baton.engine.sampling import filters, randomness
from baton.engine.sampling.sampler import GREEDY_BELOW, SampleRow
from baton.sampling import SamplingParams

_NUM_VALUES = filters.NUM_SETTINGS + 2  # and the random numbers, and the rows that draw
_UNIFORM, _WHICH = filters.NUM_SETTINGS, filters.NUM_SETTINGS + 1


@dataclass(frozen=True)
class Draw:
    """What the host knows of a draw. `settings` None: every row takes its likeliest token."""

    rows: int
    drawn: int  # of them by a random number
    settings: filters.Settings | None


class Drawer:
    """Draws for one launch at a time. The numbers it takes lie in pinned memory until it is done.

    tokens: int64 `[max_batch]` on the device · host_tokens: the same, once the launch has ended.
    """

    def __init__(self, lane: Lane, max_batch: int) -> None:
        device = lane.device
        self.tokens = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self.host_tokens = lane.pinned(max_batch, torch.int64)
        self._values = torch.zeros(_NUM_VALUES * max_batch, dtype=torch.float64, device=device)
        self._host_values = lane.pinned(_NUM_VALUES * max_batch, torch.float64)

    def prepare(self, params: Rows[SamplingParams], positions: Rows[int], vocab_size: int) -> Draw:
        """Writes down what rows need that draw the token at such a position each."""
        which = [at for at, row in enumerate(params) if row.temperature >= GREEDY_BELOW]
        if not which:
            return Draw(len(params), 0, None)
        drawn = [params[at] for at in which]
        settings = filters.settings_of(drawn, vocab_size)
        values = self._host_values[: _NUM_VALUES * len(which)].numpy().reshape(_NUM_VALUES, -1)
        values[: filters.NUM_SETTINGS] = settings.values
        seeds = [row.seed for row in drawn]
        values[_UNIFORM] = randomness.uniform(seeds, [positions[at] for at in which])
        values[_WHICH] = np.array(which)
        return Draw(len(params), len(which), settings)

    def draw(self, draw: Draw, logits: Tensor) -> None:
        """Draws from logits `[rows, vocab_size]`, and copies the tokens to the host.

        To be called on the lane. A row whose logits are not numbers may give a token beyond the
        vocabulary.
        """
        tokens = self.tokens[: draw.rows]
        if draw.settings is None or draw.drawn < draw.rows:
            torch.argmax(logits, 1, out=tokens)
        if draw.settings is not None:
            count = _NUM_VALUES * draw.drawn
            self._values[:count].copy_(self._host_values[:count], non_blocking=True)
            values = self._values[:count].view(_NUM_VALUES, draw.drawn)
            which = values[_WHICH].long()
            some = logits if draw.drawn == draw.rows else logits.index_select(0, which)
            weights = filters.weigh(some, values, draw.settings)
            tokens.index_copy_(0, which, filters.draw(weights, values[_UNIFORM]))
        self.host_tokens[: draw.rows].copy_(tokens, non_blocking=True)


def is_plain(row: SampleRow) -> bool:
    """Whether a row's logits are taken as they are, and nothing but its token is asked for.

    It stays so: output only grows.
    """
    return row.params.logprobs is None and not row.adjusted
