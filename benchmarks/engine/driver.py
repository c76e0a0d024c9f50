"""Baton's engine, driven for one measurement at a time."""

from __future__ import annotations

import itertools
import queue
import random
import time
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

from baton.engine.build import Loaded
from baton.engine.loop import StepReport
from baton.engine.sequence import Sequence
from baton.sampling import SamplingParams

_STEP_S = 120.0  # longer than any step takes
_CANCELLED = 0.1  # of soaked sequences a step


@dataclass
class Soaked:
    """What `Driver.soak` did; survivors: which prompt each had, and its tokens."""

    survivors: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    cancelled: int = 0
    preemptions: int = 0


class Driver:
    """A started engine: planner, runner, sampler and reports; no worker, no gRPC."""

    def __init__(self, loaded: Loaded) -> None:
        self._vocab = loaded.model_config.vocab_size
        self._names, self._dice = map(str, itertools.count()), random.Random(0)
        self._reports: queue.SimpleQueue[tuple[float, StepReport]] = queue.SimpleQueue()
        self._engine = loaded.engine(
            lambda report: self._reports.put((time.perf_counter(), report))
        )

        self.waited_s = 0.0  # of a step of the last `decode`, that the host waited for the device

        self._engine.start()

    def close(self) -> None:
        """Stops the engine."""
        self._engine.stop()

    def decode(
        self,
        contexts: Items[int],
        warm_up: int,
        steps: int,
        first: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> float:
        """Seconds of a step in which sequences of those contexts get a token each.

        No prompt is computed: each sequence begins as if its KV had come from elsewhere. first:
        what the first one's settings have beside `sampling`, which is all others'.
        """
        run, batch = warm_up + steps + 1, len(contexts)
        settings = {"seed": 1, "ignore_eos": True, "max_tokens": run + 1, **sampling}
        params = [SamplingParams(**{**settings, **(first or {})})]
        params += [SamplingParams(**settings)] * (batch - 1)
        sequences = [
            self._sequence(self.prompt(context), one)
            for context, one in zip(contexts, params, strict=True)
        ]
        for sequence in sequences:
            self._engine.reserve(sequence).result()

        def start() -> None:
            for sequence in sequences:
                self._engine.resume(sequence.seq_id, sequence.num_tokens, 7)

        self._engine.submit(start).result()
        ends, waited = list[float](), list[float]()
        while len(ends) < run:
            ended, report = self._next()
            if report.num_sequences == batch:
                ends.append(ended)
                waited.append(report.waited_s)
        counted = ends[warm_up - 1 : -1]  # the last one frees everything
        self.waited_s = sum(waited[warm_up:-1]) / (len(counted) - 1)
        return (counted[-1] - counted[0]) / (len(counted) - 1)

    def prefill(self, tokens: int) -> float:
        """Seconds from a prompt's submission to its first token."""
        sequence = self._sequence(self.prompt(tokens), SamplingParams(max_tokens=1))
        began = time.perf_counter()
        self._engine.add(sequence).result()
        while True:
            ended, report = self._next()
            if any(progress.token_ids for progress in report.progress):
                return ended - began

    def generate(
        self, prompts: Items[list[int]], new_tokens: int, **sampling: Any
    ) -> list[tuple[int, ...]]:
        """Tokens for each prompt, all of them at once; greedy ones if not told otherwise."""
        params = SamplingParams(ignore_eos=True, max_tokens=new_tokens, **sampling)
        sequences = [self._sequence(list(prompt), params) for prompt in prompts]
        for sequence in sequences:
            self._engine.add(sequence).result()
        found: dict[str, tuple[int, ...]] = {sequence.seq_id: () for sequence in sequences}
        while any(len(tokens) < new_tokens for tokens in found.values()):
            for progress in self._next()[1].progress:
                found[progress.seq_id] += progress.token_ids
        return [found[sequence.seq_id] for sequence in sequences]

    def prompt(self, tokens: int) -> list[int]:
        """Another one each time."""
        return [self._dice.randrange(self._vocab) for _ in range(tokens)]

    def soak(self, prompts: Items[list[int]], new_tokens: int, most: int, seconds: float) -> Soaked:
        """Adds and cancels sequences at random for so long, up to `most` at a time.

        Each has one of the prompts and gets up to `new_tokens` greedy tokens. The last ones end.
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

    def _sequence(self, tokens: list[int], params: SamplingParams) -> Sequence:
        return Sequence(next(self._names), tokens, len(tokens), params)

    def _next(self) -> tuple[float, StepReport]:
        """The next step that computed something. Raises RuntimeError for one that failed."""
        while True:
            try:
                ended, report = self._reports.get(timeout=_STEP_S)
            except queue.Empty:
                raise RuntimeError(f"no step ended within {_STEP_S:g} s") from None
            if failed := [one.abort_reason for one in report.others if one.abort_reason]:
                raise RuntimeError(failed[0])
            if report.num_sequences:
                return ended, report
