"""The engine's one thread: run commands, schedule a step, launch it, land it, publish what it gave.

Everything that changes blocks or batch happens on this thread. Other threads submit commands
through the inbox and get a future; the thread sleeps on the inbox when there is nothing to run. The
report of each step goes to one callback, which runs on this thread and must not block.

Every step is launched, and lands once its tokens are known. With overlap (async scheduling, on a
GPU) a step is launched before the previous one has landed: while that runs, the host knows all of
the next step but its tokens, which are on the device. So at a step's launch each of its sequences
gets a place for the token that is being sampled, `UNKNOWN`, and counts as one token further. The
scheduler schedules the next step as always, the runner feeds it the tokens on the device, and only
then does the host wait for the previous step and publish it. Without overlap, and for a step that
the runner does not launch ahead (`StepRunner.launches_ahead`), a step lands as soon as it is
launched, which happens when nothing is in flight. A step whose chunks take long lands before the
next one is scheduled: sequences that came meanwhile may go first, and there is little to gain.

Why overlap is safe:

- *A sequence may end with an unknown token,* or be released meanwhile. Its row in flight is wasted:
  nothing of it is published. One that is sure to end, by a limit, leaves the batch at its launch.
- *Blocks are cached for others* once a step that fills them has landed: all their tokens are known.
- *Blocks that are given up* while a row in flight uses them go to their next owner on this engine
  later on the same stream. A prefill worker writes through no stream of this engine: before it gets
  blocks (`Engine.reserve`), `wait_for_writes` waits for rows whose sequences gave some up.
- *A preempted sequence* keeps its place for the token, which comes with the step in flight.
- *A step that fails on the device* fails with what was launched behind it. A step whose launch
  fails is launched again once nothing is in flight.
- *What is sampled with known tokens* (penalties, grammars) is sampled when the previous step has
  landed, while the forward pass runs: `StepRunner.sample`.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from baton.engine.adapters import AdapterTable
from baton.engine.block_manager import BlockManager
from baton.engine.runner import Launch, RunnerFailed, SampledTokens, StepOutput, StepRunner
from baton.engine.sampling.sampler import SampleRow, finish_reason
from baton.engine.scheduler import ScheduledSequence, ScheduledStep, Scheduler
from baton.engine.sequence import Sequence
from baton.engine.step_report import Load, SequenceProgress, StepReport
from baton.errors import InternalError, Unavailable

T = TypeVar("T")

log = logging.getLogger(__name__)
NOT_FINITE = "logits are not finite numbers: the model's output is broken"
MAX_FAILED_STEPS = 3  # in a row without a prompt that is in all of them, which would be the cause
# A step with chunks that is expected to take longer lands before the next one is scheduled.
LAUNCH_AHEAD_S = 0.010


class Inbox:
    """Takes work from any thread; one thread runs it in order, until it closes the inbox."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = ""  # why no more work is taken

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queues `work`; its future fails with Unavailable once the inbox is closed."""
        future: Future[T] = Future()
        # It cannot be cancelled from here on: a caller that hangs up must not undo a release.
        future.set_running_or_notify_cancel()
        with self._lock:
            if not self._closed:
                self._jobs.put((work, future))
                return future
        future.set_exception(Unavailable(self._closed))
        return future

    def run_all(self, *, wait: bool = False) -> None:
        """Runs all work that is queued; with `wait`, sleeps until there is some.

        Raises RunnerFailed if work did.
        """
        while True:
            try:
                work, future = self._jobs.get(wait)
            except queue.Empty:
                return
            wait = False
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)
                if isinstance(error, RunnerFailed):
                    raise

    def close(self, reason: str) -> None:
        """Takes no more work; work that has not run fails with Unavailable."""
        with self._lock:
            self._closed = reason
        while True:
            try:
                _, future = self._jobs.get_nowait()
            except queue.Empty:
                return
            future.set_exception(Unavailable(reason))


def _prompt_hash(sequence: Sequence) -> int:
    return hash((sequence.cache_salt, *sequence.tokens[: sequence.prompt_tokens]))


class EngineLoop:
    """The thread and its steps; `Engine` adds the commands."""

    def __init__(
        self,
        runner: StepRunner,
        scheduler: Scheduler,
        eos_token_ids: frozenset[int],
        max_context: int,
        publish: Callable[[StepReport], None],
        overlap: bool = False,
        lora_slots: int = 0,
    ) -> None:
        """overlap: whether a step may be launched before the previous one has landed."""
        self._adapters = AdapterTable(lora_slots)
        self._overlap = overlap
        self._flight: Launch | None = None  # a step that has not landed
        self._runner = runner
        self._scheduler = scheduler
        self._blocks: BlockManager = scheduler.blocks
        self._eos_token_ids = eos_token_ids
        self._max_context = max_context
        self._publish_report = publish
        self._sequences: dict[str, Sequence] = {}  # from registration until they are dropped
        self._inbox = Inbox()
        self._stopping = False
        self._steps = 0
        self._step_began: float | None = None  # written by the thread, read by any
        self._failed_steps = 0  # in a row
        self._suspects = set[int]()  # hashes of the prompts that were in all failed steps
        self._thread = threading.Thread(target=self._run_thread, name="engine", daemon=True)
        self.ended: Future[None] = Future()  # fails if the thread does; do not cancel it
        self.ended.set_running_or_notify_cancel()

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the thread after its current step; sequences that still run are dropped.

        All futures fail with Unavailable from then on.
        """
        self._inbox.submit(self._mark_stopping)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.error("the engine's step did not end within %.0f s", timeout_s)

    @property
    def step_age_s(self) -> float:
        """Seconds for which the current step has been running; 0 when none runs.

        It needs nothing from the thread, so that it also grows while a step hangs.
        """
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Runs `work` on the engine thread between two steps. It cannot be cancelled.

        Fails with Unavailable once the thread has ended.
        """
        return self._inbox.submit(work)

    def _run_thread(self) -> None:
        with contextlib.suppress(OSError):  # the kernel's name of it, for `top -H` and profilers
            Path("/proc/thread-self/comm").write_text("engine")
        try:
            while not self._stopping:
                self._run_commands()
                self._step()
            self._runner.wait_for_writes()  # so that the pool can be freed
        except Exception as error:
            log.critical("the engine thread failed", exc_info=error)
            reason = f"the engine failed: {type(error).__name__}: {error}"
            self._inbox.close(reason)
            self.ended.set_exception(InternalError(reason))
        else:
            self._inbox.close("the engine has stopped")
            self.ended.set_result(None)
        finally:
            self._runner.close()

    @property
    def _idle(self) -> bool:
        return self._flight is None and not (self._scheduler.running or self._scheduler.num_waiting)

    def _run_commands(self) -> None:
        """Runs submitted commands; sleeps until there is one when there is nothing to run."""
        self._inbox.run_all(wait=self._idle)

    def _step(self) -> None:
        """Schedules and launches a step; lands the previous one, and this one unless they overlap.

        A step that cannot be launched behind the previous one is launched once that has landed.
        """
        previous, self._flight = self._flight, None
        chunk = self._scheduler.chunk
        if previous is not None and chunk.estimate_s(previous.step) > LAUNCH_AHEAD_S:
            self._land(previous)
            return
        self._step_began = time.monotonic()  # a draft model computes meanwhile
        step, launch = self._scheduler.schedule(), None
        self._step_began = None
        overlaps = self._overlap and bool(step.sequences) and self._runner.launches_ahead(step)
        overlaps = overlaps and not (step.exclusive or self._scheduler.takes_checkpoint(step))
        if previous is not None:
            launch = self._launch_behind(step) if overlaps else None
            landed = self._land(previous, launch)
            if launch is not None and not landed:
                return
            if launch is None:
                left = [one for one in step.sequences if not one.sequence.dropped]
                step = ScheduledStep(left, step.prompts)
        if step.sequences:
            self._launch(step, launch, overlaps)
        elif previous is None:
            self._wait_for_room(step)

    def _launch(self, step: ScheduledStep, launch: Launch | None, overlaps: bool) -> None:
        """Launches a step, unless that is done, and has it sample; lands it unless it overlaps."""
        began_ns = time.monotonic_ns()
        self._steps += launch is None

        def launched() -> Launch:
            begun = launch or self._runner.launch(step)
            self._runner.sample(begun)
            return begun

        flight, failure = self._run_part(launched)
        if flight is None:
            self._fail(step, step.sequences, str(failure), began_ns)
            return
        if launch is None:
            flight.began_ns = began_ns
        self._scheduler.update_after_launch(step)
        if overlaps:
            self._flight = flight
        else:
            self._land(flight)

    def _launch_behind(self, step: ScheduledStep) -> Launch | None:
        """Launches a step behind the one in flight; None if that fails."""
        try:
            launch = self._runner.launch(step)
        except Exception:
            log.warning("a launch failed: its step waits for the previous one", exc_info=True)
            return None
        self._steps += 1
        return launch

    def _land(self, flight: Launch, behind: Launch | None = None) -> bool:
        """Waits for a step and publishes it; whether it succeeded.

        behind: launched behind this step, and failed if this one has.
        """
        step, waited_s = flight.step, self._runner.waited_s or 0.0
        output, failure = self._run_part(lambda: self._runner.land(flight))
        if output is None:
            sequences = step.sequences + (behind.step.sequences if behind else [])
            self._fail(step, sequences, str(failure), flight.began_ns)
            return False
        now_ns = time.monotonic_ns()
        if behind is not None:
            behind.began_ns = now_ns  # until now it waited for this step
        self._scheduler.record_step(step, (now_ns - flight.began_ns) / 1e9)
        token_ids, progress = self._apply(step.sequences, output)
        waited_s = (self._runner.waited_s or 0.0) - waited_s
        self._publish(step, progress, flight.began_ns, token_ids, waited_s)
        if token_ids or not progress or any(one.abort_reason != NOT_FINITE for one in progress):
            self._failed_steps = 0
        else:
            self._count_failure(step.sequences, NOT_FINITE)
        return True

    def _wait_for_room(self, step: ScheduledStep) -> None:
        """Waits for a command, as no sequence fits, and publishes what it changed."""
        began_ns = time.monotonic_ns()
        if self._scheduler.num_waiting and not self._stopping:
            self._inbox.run_all(wait=True)
        self._publish(step, [], began_ns)

    def _run_part(self, part: Callable[[], T]) -> tuple[T | None, str | None]:
        """(result of a part of a step, why it failed); `step_age_s` counts meanwhile."""
        self._step_began = time.monotonic()
        try:
            return part(), None
        except RunnerFailed:
            raise
        except Exception as error:
            log.exception("engine step failed; its sequences are aborted")
            return None, f"engine step failed: {type(error).__name__}: {error}"
        finally:
            self._step_began = None

    def _fail(
        self, step: ScheduledStep, sequences: list[ScheduledSequence], failure: str, began_ns: int
    ) -> None:
        """Aborts the sequences of a step that failed."""
        self._runner.wait_for_writes()
        progress = [
            self._abort(one.sequence, failure) for one in sequences if not one.sequence.dropped
        ]
        self._publish(step, progress, began_ns)
        self._count_failure(sequences, failure)

    def _count_failure(self, sequences: list[ScheduledSequence], failure: str) -> None:
        """Counts a step in which every sequence failed.

        Raises InternalError when steps keep failing whatever they run: a new process may do better.
        One prompt that is sent again and again does not end the process, nor does KV from outside
        that is not verified yet.
        """
        if any(one.sequence.unverified for one in sequences):
            return
        prompts = {_prompt_hash(one.sequence) for one in sequences}
        self._suspects = self._suspects & prompts if self._failed_steps else prompts
        self._failed_steps += 1
        if self._failed_steps >= MAX_FAILED_STEPS and not self._suspects:
            raise InternalError(f"{self._failed_steps} steps in a row failed; the last: {failure}")

    def _publish(
        self,
        step: ScheduledStep,
        progress: list[SequenceProgress],
        began_ns: int,
        token_ids: Mapping[str, int] | None = None,
        waited_s: float = 0.0,
    ) -> None:
        ended_ns = time.time_ns()
        self._publish_report(
            StepReport(
                ended_ns - (time.monotonic_ns() - began_ns),
                ended_ns,
                step.num_tokens,
                progress,
                self._load(),
                self._blocks.take_changes(),
                step.num_proposed,
                sum(len(one.token_ids) - 1 for one in progress if len(one.token_ids) > 1),
                token_ids or {},
                waited_s,
                step.num_chunks,
            )
        )

    def _apply(
        self, scheduled: list[ScheduledSequence], output: StepOutput
    ) -> tuple[dict[str, int], list[SequenceProgress]]:
        """Gives a step's tokens to its sequences: `token_ids` and `others` of its report."""
        found, plain, progress = output.found, dict[str, int](), list[SequenceProgress]()
        if not output.token_ids:
            return plain, [
                self._apply_sampled(one, found.get(one.sequence.seq_id))
                for one in scheduled
                if not one.sequence.dropped
            ]
        scheduler, size = self._scheduler, self._blocks.block_size
        needs_every_token = scheduler.needs_every_token
        for one, token_id in zip(scheduled, output.token_ids, strict=True):
            sequence = one.sequence
            if sequence.dropped:
                continue
            if found and sequence.seq_id in found:
                progress.append(self._apply_sampled(one, found[sequence.seq_id]))
                continue
            known = sequence.tokens
            known[-1] = token_id
            sequence.awaits_token = False
            if needs_every_token or not (one.start + 1) % size:
                scheduler.update_after_landing(one, (token_id,))
            if token_id in sequence.ends or len(known) >= sequence.limit:
                row = SampleRow(sequence.params, known, sequence.prompt_tokens)
                reason = finish_reason(row, self._eos_token_ids, self._max_context)
                if reason is not None:
                    self._drop(sequence)
                    progress.append(
                        SequenceProgress(sequence.seq_id, one.start + 1, (token_id,), (), reason)
                    )
                    continue
            plain[sequence.seq_id] = token_id
        return plain, progress

    def _apply_sampled(
        self, scheduled: ScheduledSequence, sampled: SampledTokens | None
    ) -> SequenceProgress:
        """Gives one sequence what it got in a step that has landed."""
        sequence = scheduled.sequence
        if sequence.awaits_token and scheduled.samples:
            sequence.tokens.pop()
            sequence.new_tokens -= 1
            sequence.awaits_token = False
        if sequence.grammar is not None and sequence.grammar.failure:
            return self._abort(sequence, sequence.grammar.failure, invalid=True)
        if sampled is not None and sampled.broken:
            return self._abort_broken(sequence)
        if sampled is None or not sampled.token_ids:
            computed = self._scheduler.update_after_landing(scheduled)
            prompt, pooled = (sampled.prompt, sampled.pooled) if sampled else (None, None)
            return SequenceProgress(
                sequence.seq_id, computed, prompt_logprobs=prompt, pooled=pooled
            )
        count, reason = self._append(sequence, sampled.token_ids)
        computed = self._scheduler.update_after_landing(scheduled, sampled.token_ids[:count])
        if reason is not None:
            self._drop(sequence)
        elif sequence.num_tokens >= sequence.limit:
            self._scheduler.remove(sequence)
        return SequenceProgress(
            sequence.seq_id,
            computed,
            sampled.token_ids[:count],
            sampled.logprobs[:count],
            reason,
            prompt_logprobs=sampled.prompt,
            pooled=sampled.pooled,
        )

    def _append(self, sequence: Sequence, token_ids: tuple[int, ...]) -> tuple[int, str | None]:
        """Appends tokens up to the sequence's end: (how many, the finish reason if it ends)."""
        if not sequence.params.max_tokens:
            return 0, "length"
        for count, token_id in enumerate(token_ids, 1):
            sequence.tokens.append(token_id)
            sequence.new_tokens += 1
            row = SampleRow(sequence.params, sequence.tokens, sequence.prompt_tokens)
            reason = finish_reason(row, self._eos_token_ids, self._max_context)
            if reason is not None:
                return count, reason
        return len(token_ids), None

    def _abort(self, sequence: Sequence, reason: str, invalid: bool = False) -> SequenceProgress:
        self._drop(sequence)
        return SequenceProgress(sequence.seq_id, 0, abort_reason=reason, invalid=invalid)

    def _abort_broken(self, sequence: Sequence) -> SequenceProgress:
        """Aborts a sequence whose KV may hold numbers that are not finite.

        Its blocks leave the prefix cache and are zeroed, so that no other sequence reads them.
        """
        log.error("sequence %s is aborted: %s", sequence.seq_id, NOT_FINITE)
        private = self._scheduler.uncache(sequence)
        progress = self._abort(sequence, NOT_FINITE)
        self._runner.zero_blocks(private)
        return progress

    def _mark_stopping(self) -> None:
        self._stopping = True

    def _drop(self, sequence: Sequence) -> None:
        """Forgets a sequence and frees its blocks."""
        self._scheduler.remove(sequence)
        self._scheduler.free(sequence)
        sequence.dropped = True
        self._unregister(sequence)

    def _unregister(self, sequence: Sequence) -> None:
        del self._sequences[sequence.seq_id]
        if sequence.adapter:
            self._adapters.release(sequence.adapter)

    def _load(self) -> Load:
        blocks, scheduler = self._blocks, self._scheduler
        return Load(
            scheduler.queue_tokens, len(scheduler.running), scheduler.num_waiting,
            blocks.num_blocks, blocks.num_free, blocks.num_cached, blocks.num_held,
            blocks.num_quarantined, self._steps, scheduler.preemptions,
            *(scheduler.chunk.tokens_per_s, scheduler.chunk.tokens, (*blocks.held_by_kind.counts,)),
        )  # fmt: skip
