"""The loop on a GPU: a decode step is launched before the tokens of the one before are known.

(Async scheduling.) While a step runs, the host knows all of the next one but its tokens, which the
step leaves on the device. So as soon as a step is launched, each of its sequences gets a place for
the token that is being sampled, `UNKNOWN`, and counts as one token further. The planner plans the
next step as always, the runner feeds it the tokens on the device, and only then does the host wait
for the first step and publish it. What needs known tokens (chunks, structured output) is computed
when nothing is in flight, by `Engine`'s own step.

Why that is safe:

- *A sequence may end with an unknown token,* or be released meanwhile. Its row in flight is wasted:
  nothing of it is published. One that surely ends, by a limit, leaves the batch at its launch.
- *Blocks are shared* once a step that was waited for has filled them: all their tokens are known.
- *Blocks that are given up* while a row in flight uses them go to the next owner on this engine
  later on the same stream. A prefill worker writes through no stream of this engine: before it gets
  blocks (`Engine.reserve`), `wait_for_writes` waits for rows whose sequences gave some up.
- *A preempted sequence* keeps its place for the token, which comes with the step in flight.
- *A step that fails on the device* fails with what was launched behind it. One that cannot be
  launched is computed once nothing is in flight.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from baton.engine.loop import Engine, Progress
from baton.engine.planner import Plan, Work
from baton.engine.runner import SampledTokens

if TYPE_CHECKING:  # it imports triton, which may not be installed
    from baton.engine.backends.gpu.runner import GpuRunner, Launch

log = logging.getLogger(__name__)
UNKNOWN = 0  # in the place of a token that is being sampled


class OverlappedEngine(Engine):
    """An `Engine` with up to two decode steps on the device. Proposes no tokens."""

    _runner: GpuRunner
    _flight: Launch | None = None

    @property
    def _idle(self) -> bool:
        return self._flight is None and super()._idle

    def _step(self) -> None:
        plan = self._planner.plan()
        before, self._flight = self._flight, self._launch(plan)
        if before is not None:
            self._land(before)
            plan.work = [work for work in plan.work if self._holds(work.sequence)]
        if self._flight is None and (plan.work or before is None):
            self._compute(plan)

    def _launch(self, plan: Plan) -> Launch | None:
        """Launches a plan if it can be, and makes its sequences one token longer."""
        if not plan.work or not self._runner.launches(plan):
            return None
        try:
            launch = self._runner.launch(plan)
        except Exception:
            log.warning("a launch failed: its step waits for the one before", exc_info=True)
            return None
        self._steps += 1
        for work in plan.work:
            sequence = work.sequence
            sequence.num_computed += 1
            sequence.tokens.append(UNKNOWN)
            sequence.new_tokens += 1
            if not sequence.tokens_left(self._max_context):
                self._planner.remove(sequence)
        return launch

    def _land(self, flight: Launch) -> None:
        """Waits for a launched step and publishes it."""
        work = [work for work in flight.plan.work if self._holds(work.sequence)]
        wanted = {item.sequence for item in work}
        sampled, failure = self._watched(lambda: self._runner.tokens(flight, wanted))
        if failure is None:
            progress = [self._fill_in(item, sampled[item.sequence.seq_id]) for item in work]
        else:
            if self._flight is not None:  # it was fed by the failed one
                wanted |= {item.sequence for item in self._flight.plan.work}
                self._flight = None
            self._runner.wait_for_writes()
            progress = [
                self._give_up(sequence, failure) for sequence in wanted if self._holds(sequence)
            ]
        self._publish(flight.plan, progress, flight.began_ns)
        self._count_failures(failure)
        if self._flight is not None:
            self._flight.began_ns = time.monotonic_ns()  # what it waited for was the other's time

    def _fill_in(self, work: Work, sampled: SampledTokens) -> Progress:
        """`_advance` for a sequence whose place for this token may have one behind it."""
        sequence, at = work.sequence, work.start + 1
        behind = sequence.tokens[at + 1 :]
        sequence.new_tokens -= len(sequence.tokens) - at
        del sequence.tokens[at:]
        _, reason = self._append(sequence, sampled.token_ids)
        self._planner.publish(sequence, work.start, min(at, sequence.num_computed))
        if reason is None:
            sequence.tokens += behind
            sequence.new_tokens += len(behind)
        else:
            self._drop(sequence)
        return Progress(sequence.seq_id, at, sampled.token_ids, sampled.logprobs, reason)
