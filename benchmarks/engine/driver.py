"""Drives Baton's engine for one measurement at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

from baton.bench.engine import EngineDriver
from baton.generation.sampling_params import SamplingParams

_CANCELLED = 0.1  # probability that a step of `soak` cancels a sequence


@dataclass
class Soaked:
    """Result of `Driver.soak`; survivors: index of the prompt and tokens of finished sequences."""

    survivors: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    cancelled: int = 0
    preemptions: int = 0


class Driver(EngineDriver):
    """A driver that also generates tokens, and runs a random load."""

    def generate(
        self, prompts: Items[list[int]], new_tokens: int, **sampling: Any
    ) -> list[tuple[int, ...]]:
        """Tokens for all prompts, in one batch; greedy by default."""
        params = SamplingParams(ignore_eos=True, max_tokens=new_tokens, **sampling)
        sequences = [self._sequence(list(prompt), params) for prompt in prompts]
        for sequence in sequences:
            self._engine.add(sequence).result()
        found: dict[str, tuple[int, ...]] = {sequence.seq_id: () for sequence in sequences}
        while any(len(tokens) < new_tokens for tokens in found.values()):
            for progress in self._next()[1].progress:
                found[progress.seq_id] += progress.token_ids
        return [found[sequence.seq_id] for sequence in sequences]

    def soak(self, prompts: Items[list[int]], new_tokens: int, most: int, seconds: float) -> Soaked:
        """Adds and cancels sequences at random for `seconds`, then finishes the rest.

        most: maximum number of sequences at a time. Each has one of the prompts, and up to
        `new_tokens` greedy tokens.
        """
        dice, found, ends = self._dice, Soaked(), time.monotonic() + seconds
        running: dict[str, tuple[int, tuple[int, ...]]] = {}
        while (more := time.monotonic() < ends) or running:
            while more and (not running or (len(running) < most and dice.random() < 0.8)):
                which, count = dice.randrange(len(prompts)), dice.randint(1, new_tokens)
                params = SamplingParams(ignore_eos=True, max_tokens=count)
                sequence = self._sequence(list(prompts[which]), params)
                running[sequence.seq_id] = which, ()
                self._engine.add(sequence).result()
            _, report = self._next()
            found.preemptions = report.load.preemptions
            for one in report.progress:
                if one.seq_id not in running:  # it was cancelled
                    continue
                which, tokens = running.pop(one.seq_id)
                if one.finish_reason:
                    found.survivors.append((which, tokens + one.token_ids))
                else:
                    running[one.seq_id] = which, tokens + one.token_ids
            if more and running and dice.random() < _CANCELLED:
                seq_id = dice.choice(list(running))
                del running[seq_id]
                self._engine.release(seq_id).result()
                found.cancelled += 1
        return found
