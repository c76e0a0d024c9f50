"""The engine's one thread: admit, step, launch, land, publish.

Everything that changes blocks or batch happens on this thread. Others submit closures through the
inbox and get a future; it sleeps on the inbox when there is nothing to run. What a step produced
goes out through one callback, called on this thread, which must not block.

A step is launched, and landed when its tokens are known. On a CPU both are one. On a GPU a step can
be launched before the one before has landed (overlap, or async scheduling): while a step runs, the
host knows all of the next one but its tokens, which the device has. So as soon as a step is
launched, each of its sequences gets a place for the token that is being sampled, `UNKNOWN`, and
counts as one token further. The scheduler plans the next step as always, the runner feeds it the
tokens on the device, and only then does the host wait for the first step and publish it. What the
runner does not take ahead (`StepRunner.launches_ahead`) is launched when nothing is in flight, and
landed at once. A step whose chunks take long lands before the next one is planned: sequences that
came meanwhile may go first, and there is little to gain.

Why that is safe:

- *A sequence may end with an unknown token,* or be released meanwhile. Its row in flight is wasted:
  nothing of it is published. One that surely ends, by a limit, leaves the batch at its launch.
- *Blocks are shared* once a step that has landed has filled them: all their tokens are known.
- *Blocks that are given up* while a row in flight uses them go to the next owner on this engine
  later on the same stream. A prefill worker writes through no stream of this engine: before it gets
  blocks (`Engine.reserve`), `wait_for_writes` waits for rows whose sequences gave some up.
- *A preempted sequence* keeps its place for the token, which comes with the step in flight.
- *A step that fails on the device* fails with what was launched behind it. One that cannot be
  launched is launched again once nothing is in flight.
- *What is sampled with known tokens* (penalties, grammars) is sampled when the step before has
  landed, while the forward pass runs: `StepRunner.sample`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from baton.engine.block_manager import BlockManager, CacheChanges
from baton.engine.pooling import Vector
from baton.engine.runner import Launch, RunnerFailed, SampledTokens, StepOutput, StepRunner
from baton.engine.sampling.prompt_logprobs import PromptLogprobs
from baton.engine.sampling.sampler import SampleRow, TokenLogprobs, finish_reason
from baton.engine.scheduler import ScheduledSequence, ScheduledStep, Scheduler
from baton.engine.sequence import Sequence
from baton.errors import InternalError, Overloaded, Stale, Unavailable

P = ParamSpec("P")
T = TypeVar("T")


class Inbox:
    """Takes work from any thread; one thread runs it, in order, until it closes the inbox."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = ""  # why nothing is taken any more

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """The future of `work`, which fails with Unavailable when the inbox is closed."""
        future: Future[T] = Future()
        # From here on it cannot be cancelled: a caller that hung up must not undo a release.
        future.set_running_or_notify_cancel()
        with self._lock:
            if not self._closed:
                self._jobs.put((work, future))
                return future
        future.set_exception(Unavailable(self._closed))
        return future

    def run_all(self, *, wait: bool = False) -> None:
        """Runs what is there now; sleeps until there is something if it is to wait.

        Raises RunnerFailed when work did.
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
        """Takes no more work; what was not run fails with Unavailable."""
        with self._lock:
            self._closed = reason
        while True:
            try:
                _, future = self._jobs.get_nowait()
            except queue.Empty:
                return
            future.set_exception(Unavailable(reason))


@dataclass(frozen=True)
class Reserved:
    """Blocks held for a sequence: those of the first `num_cached` tokens are filled already."""

    num_cached: int
    block_ids: tuple[int, ...]
    started: bool


@dataclass(eq=False, frozen=True)
class UnverifiedKv:
    """KV of `num_tokens` on which a sequence runs before it is verified. Its blocks, which were the
    sequence's from index `first` on, are held until then."""

    sequence: Sequence
    num_tokens: int
    first: int
    blocks: list[int]


@dataclass(frozen=True)
class Load:
    """The engine's load after a step: fields of `worker_pb2.Load`, by the same names.

    Not that message: steps are measured where there is no protobuf.
    """

    queue_tokens: int
    running: int
    waiting: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_held: int
    blocks_quarantined: int
    steps: int
    preemptions: int
    prefill_tokens_per_s: float
    chunk_tokens: int


class Progress(NamedTuple):
    """What one sequence got out of one step."""

    seq_id: str
    num_computed: int = 0  # tokens, with this step; not told where it is one token further
    token_ids: tuple[int, ...] = ()  # new ones: several where proposed tokens were accepted
    logprobs: tuple[TokenLogprobs, ...] = ()  # of each of them, if asked for
    finish_reason: str | None = None  # "stop" or "length"; the sequence is gone
    abort_reason: str | None = None  # the sequence is gone: the step failed, or
    invalid: bool = False  # the request is the cause
    prompt_logprobs: PromptLogprobs | None = None  # of its prompt's next tokens, if asked for
    pooled: Vector | None = None  # as `SampledTokens.pooled`


@dataclass(frozen=True)
class StepReport:
    """One step, as it is published.

    ended_ns is `time.time_ns`; started_ns is as much earlier as the step took by a monotonic clock.
    others: all sequences of the step that are not in `token_ids` · token_ids: by sequence ids, of
    those that got one token and go on: so that hundreds of them cost little.
    """

    started_ns: int
    ended_ns: int
    num_tokens: int  # computed, proposed ones included
    others: list[Progress]
    load: Load
    cache: CacheChanges = field(default_factory=CacheChanges)
    num_proposed: int = 0  # of the tokens computed
    num_accepted: int = 0  # of the proposed; the others are computed once more
    token_ids: Mapping[str, int] = field(default_factory=dict)
    waited_s: float = 0.0  # that the host waited for the device: as good as none if it was late

    @property
    def progress(self) -> list[Progress]:
        """What all sequences of the step got."""
        tokens = self.token_ids.items()
        return [*(Progress(seq_id, token_ids=(one,)) for seq_id, one in tokens), *self.others]

    @property
    def num_sequences(self) -> int:
        """Of the step."""
        return len(self.token_ids) + len(self.others)

    @property
    def num_sampled(self) -> int:
        """Tokens that its sequences got."""
        return len(self.token_ids) + sum(len(one.token_ids) for one in self.others)

    @property
    def num_kept(self) -> int:
        """Tokens that are computed from now on."""
        return self.num_tokens - self.num_proposed + self.num_accepted


log = logging.getLogger(__name__)
MAX_FAILED_STEPS = 3  # in a row, with no prompt in all of them: then the cause is elsewhere
# Reserved, waiting and running sequences for each place in the batch. Without a bound, sequences
# whose KV has come would pile up and wait too long for their next token.
SEQUENCES_PER_PLACE = 2
# A step with chunks that takes longer is not followed by one that was planned while it ran.
LAUNCH_AHEAD_S = 0.010
RETRY_S = 0.2  # advised when there is no room: room comes whenever a sequence ends


def _prompt_hash(sequence: Sequence) -> int:
    return hash((sequence.cache_salt, *sequence.tokens[: sequence.prompt_tokens]))


def _command(
    method: Callable[Concatenate[Engine, P], T],
) -> Callable[Concatenate[Engine, P], Future[T]]:
    """Has a method run on the engine thread: see `Engine.submit`."""

    @functools.wraps(method)
    def submit(engine: Engine, /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return engine.submit(lambda: method(engine, *args, **kwargs))

    return submit


class Engine:
    """Runs sequences until they finish. Commands are thread-safe and return futures."""

    def __init__(
        self,
        runner: StepRunner,
        scheduler: Scheduler,
        eos_token_ids: frozenset[int],
        max_context: int,
        publish: Callable[[StepReport], None],
        overlap: bool = False,
    ) -> None:
        """overlap: whether a step may be launched before the one before has landed."""
        self._overlap = overlap
        self._flight: Launch | None = None  # a step that has not landed
        self._runner = runner
        self._scheduler = scheduler
        self._blocks: BlockManager = scheduler.blocks
        self._eos_token_ids = eos_token_ids
        self._max_context = max_context
        self._publish_report = publish
        self._sequences: dict[str, Sequence] = {}  # from when one is accepted until it is dropped
        self._inbox = Inbox()
        self._stopping = False
        self._steps = 0
        self._step_began: float | None = None  # written by the thread, read by any
        self._failed_steps = 0  # in a row
        self._suspects = set[int]()  # prompts in all of these, by hash
        self._thread = threading.Thread(target=self._live, name="engine", daemon=True)
        self.ended: Future[None] = Future()  # fails if the thread does; do not cancel it
        self.ended.set_running_or_notify_cancel()

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the thread after its current step; what still runs is dropped.

        From then on every future fails with Unavailable.
        """
        self._inbox.submit(self._mark_stopping)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.error("the engine's step did not end within %.0f s", timeout_s)

    @property
    def step_age_s(self) -> float:
        """How long the step that runs now has been running; 0 when none runs.

        Needs nothing of the thread, so that it is right for a step that never ends, too.
        """
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Runs `work` on the engine thread between two steps. It cannot be cancelled.

        Fails with Unavailable once the thread has ended.
        """
        return self._inbox.submit(work)

    @_command
    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. Fails with Overloaded if the pool could never hold it."""
        self._accept(sequence)
        self._scheduler.add(sequence)

    @_command
    def reserve(self, sequence: Sequence, start_tokens: int = 0) -> Reserved:
        """Holds blocks for a sequence that `resume` starts later.

        One with no more than `start_tokens` to compute starts at once, by itself. Fails with
        Overloaded when there is no room now.
        """
        most = SEQUENCES_PER_PLACE * self._scheduler.max_batch
        if len(self._sequences) >= most:
            raise Overloaded(f"all {most} places for sequences are taken", RETRY_S)
        if self._scheduler.waiting:  # preempted ones; newcomers must not take the blocks they need
            raise Overloaded("sequences that run here wait for KV blocks", RETRY_S)
        self._accept(sequence)
        if not self._scheduler.reserve(sequence, extra_tokens=1):
            del self._sequences[sequence.seq_id]
            raise Overloaded(
                f"{sequence.num_tokens} tokens do not fit: {self._blocks.num_available} of "
                f"{self._blocks.num_blocks} KV blocks are available",
                RETRY_S,
            )
        starts = sequence.num_tokens - sequence.num_computed <= start_tokens
        reserved = Reserved(sequence.num_computed, tuple(sequence.block_ids), starts)
        if starts:
            self._scheduler.add(sequence)
        else:
            # Others write there, and know nothing of steps that run here.
            self._runner.wait_for_writes(sequence.block_ids)
            sequence.awaits_kv = True
        return reserved

    @_command
    def resume(
        self, seq_id: str, num_computed: int, token_id: int, verified: bool = True
    ) -> UnverifiedKv:
        """A parked sequence's KV is complete up to `num_computed`; it goes on with `token_id`.

        Unless the KV is verified, `accept` or `discard` has to follow. No block is shared before.
        """
        sequence = self._find(seq_id)
        assert num_computed == sequence.num_tokens, "a handoff covers every known token"
        first = sequence.num_computed // self._blocks.block_size
        kv = UnverifiedKv(sequence, num_computed, first, sequence.block_ids[first:])
        if verified:
            self._scheduler.cache_blocks(sequence, sequence.num_computed, num_computed)
        else:
            self._blocks.hold(kv.blocks)
            sequence.unverified = True
        sequence.num_computed = num_computed
        sequence.awaits_kv = False
        sequence.num_scored = None  # it was, where the KV was computed
        sequence.tokens.append(token_id)
        sequence.new_tokens += 1
        self._scheduler.add(sequence)
        return kv

    @_command
    def accept(self, kv: UnverifiedKv) -> None:
        """It is what was sent: blocks can be shared, also what was computed meanwhile."""
        sequence = kv.sequence
        sequence.unverified, start = False, kv.first * self._blocks.block_size
        if not sequence.dropped:
            end = sequence.num_computed - sequence.awaits_token  # without a step in flight
            self._scheduler.cache_blocks(sequence, start, end)
        else:
            sequence.block_ids = [-1] * kv.first + kv.blocks
            self._scheduler.cache_blocks(sequence, start, kv.num_tokens)
            sequence.block_ids = []
        self._blocks.release(kv.blocks)

    @_command
    def discard(self, kv: UnverifiedKv) -> None:
        """It is not what was sent: its sequence ends, if it has not."""
        sequence, wrong = kv.sequence, kv.blocks
        if not sequence.dropped:
            own = sequence.block_ids[kv.first :]
            if own[: len(wrong)] == wrong:  # it was not preempted
                wrong = own  # what was computed from it is no better
            self._drop(sequence)
        self._runner.zero_blocks(wrong)
        self._blocks.release(kv.blocks)

    @_command
    def pause(self, seq_id: str) -> None:
        """Runs a sequence no more; it keeps its blocks until `release`. Ignores unknown ids."""
        if sequence := self._sequences.get(seq_id):
            self._scheduler.remove(sequence)

    @_command
    def release(self, seq_id: str, quarantine_from: int | None = None) -> list[int]:
        """Ends a sequence in any state and frees its blocks; unknown ids are ignored.

        Blocks from index `quarantine_from` on are quarantined instead, and their numbers returned
        for `end_quarantine`.
        """
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            return []
        quarantined: list[int] = []
        if quarantine_from is not None:
            quarantined = sequence.block_ids[quarantine_from:]
            sequence.block_ids = sequence.block_ids[:quarantine_from]
            self._blocks.quarantine(quarantined)
        if sequence.awaits_kv:
            first = sequence.num_computed // self._blocks.block_size
            self._runner.zero_blocks(sequence.block_ids[first:])
        self._drop(sequence)
        return quarantined

    @_command
    def end_quarantine(self, blocks: list[int]) -> None:
        """Quarantined blocks are safe again."""
        self._runner.zero_blocks(blocks)
        self._blocks.end_quarantine(blocks)

    @_command
    def load(self) -> Load:
        """The load now."""
        return self._load()

    # The thread.

    def _live(self) -> None:
        with contextlib.suppress(OSError):  # the kernel's name of it, for `top -H` and profilers
            Path("/proc/thread-self/comm").write_text("engine")
        try:
            while not self._stopping:
                self._admit()
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

    def _admit(self) -> None:
        """Runs submitted commands; sleeps until there is one when there is nothing to run."""
        self._inbox.run_all(wait=self._idle)

    def _step(self) -> None:
        """Launches the next step, then lands the one before.

        What cannot be launched before that has landed is launched then, and landed at once.
        """
        before = self._flight
        if before is not None and self._scheduler.chunk.estimate_s(before.step) > LAUNCH_AHEAD_S:
            self._flight = None
            self._land(before)
            return
        step, launch = self._scheduler.schedule(), None
        ahead = self._overlap and bool(step.sequences) and self._runner.launches_ahead(step)
        ahead = ahead and not step.exclusive
        if before is not None:
            launch = self._launch_behind(step) if ahead else None
            self._flight = None
            landed = self._land(before, launch)
            if launch is None:
                held = [work for work in step.sequences if not work.sequence.dropped]
                step = ScheduledStep(held, step.prompts)
            if not step.sequences or (launch is not None and not landed):
                return
        if step.sequences:
            self._run(step, launch, ahead)
        else:
            self._wait_for_room(step)

    def _run(self, step: ScheduledStep, launch: Launch | None, ahead: bool) -> None:
        """Begins a step, unless it was launched, and lands it if it is not to be in flight."""
        began_ns = time.monotonic_ns()
        self._steps += launch is None

        def begin() -> Launch:
            begun = launch or self._runner.launch(step)
            self._runner.sample(begun)
            return begun

        begun, failure = self._watched(begin)
        if begun is None:
            self._fail(step, step.sequences, str(failure), began_ns)
            return
        if launch is None:
            begun.began_ns = began_ns
        self._scheduler.update_after_launch(step)
        if ahead:
            self._flight = begun
        else:
            self._land(begun)

    def _launch_behind(self, step: ScheduledStep) -> Launch | None:
        """Launches a step behind the step in flight, if that items."""
        try:
            launch = self._runner.launch(step)
        except Exception:
            log.warning("a launch failed: its step waits for the one before", exc_info=True)
            return None
        self._steps += 1
        return launch

    def _land(self, flight: Launch, behind: Launch | None = None) -> bool:
        """Waits for a step and publishes it; whether it succeeded.

        What was launched behind one that failed has failed, too.
        """
        step, waited_s = flight.step, self._runner.waited_s or 0.0
        output, failure = self._watched(lambda: self._runner.land(flight))
        if output is None:
            items = step.sequences + (behind.step.sequences if behind else [])
            self._fail(step, items, str(failure), flight.began_ns)
            return False
        now_ns = time.monotonic_ns()
        if behind is not None:
            behind.began_ns = now_ns  # what it waited for was this step's time
        self._scheduler.record_step(step, (now_ns - flight.began_ns) / 1e9)
        token_ids, progress = self._take(step.sequences, output)
        waited_s = (self._runner.waited_s or 0.0) - waited_s
        self._publish(step, progress, flight.began_ns, token_ids, waited_s)
        self._failed_steps = 0
        return True

    def _wait_for_room(self, step: ScheduledStep) -> None:
        """Nothing fits: waits for a command and publishes what that changed."""
        began_ns = time.monotonic_ns()
        if self._scheduler.num_waiting and not self._stopping:
            self._inbox.run_all(wait=True)
        self._publish(step, [], began_ns)

    def _watched(self, run: Callable[[], T]) -> tuple[T | None, str | None]:
        """What a part of a step gives, or why it failed; meanwhile `step_age_s` tells its age."""
        self._step_began = time.monotonic()
        try:
            return run(), None
        except RunnerFailed:
            raise
        except Exception as error:
            log.exception("engine step failed; its sequences are aborted")
            return None, f"engine step failed: {type(error).__name__}: {error}"
        finally:
            self._step_began = None

    def _fail(
        self, step: ScheduledStep, items: list[ScheduledSequence], failure: str, began_ns: int
    ) -> None:
        """Ends the sequences of a step that failed.

        Raises InternalError when steps keep failing, whatever they run: a new process may do
        better. One prompt that is sent again and again does not end the process, nor does KV from
        outside that may not be what was sent.
        """
        self._runner.wait_for_writes()
        progress = [
            self._give_up(work.sequence, failure) for work in items if not work.sequence.dropped
        ]
        self._publish(step, progress, began_ns)
        if any(work.sequence.unverified for work in items):
            return
        prompts = {_prompt_hash(work.sequence) for work in items}
        self._suspects = self._suspects & prompts if self._failed_steps else prompts
        self._failed_steps += 1
        if self._failed_steps >= MAX_FAILED_STEPS and not self._suspects:
            raise InternalError(f"{self._failed_steps} steps in a row failed; the last: {failure}")

    def _publish(
        self,
        step: ScheduledStep,
        progress: list[Progress],
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
            )
        )

    def _take(
        self, items: list[ScheduledSequence], output: StepOutput
    ) -> tuple[dict[str, int], list[Progress]]:
        """Gives a step's tokens to its sequences: (of those that got one token and go on, and
        nothing else is to be said, that token; what all others got)."""
        found, plain, progress = output.found, dict[str, int](), list[Progress]()
        if not output.token_ids:
            return plain, [
                self._advance(work, found.get(work.sequence.seq_id))
                for work in items
                if not work.sequence.dropped
            ]
        scheduler, size = self._scheduler, self._blocks.block_size
        learns = scheduler.needs_every_token
        for work, token_id in zip(items, output.token_ids, strict=True):
            sequence = work.sequence
            if sequence.dropped:
                continue
            if found and sequence.seq_id in found:
                progress.append(self._advance(work, found[sequence.seq_id]))
                continue
            known = sequence.tokens
            known[-1] = token_id
            sequence.awaits_token = False
            if learns or not (work.start + 1) % size:
                scheduler.update_after_landing(work, (token_id,))
            if token_id in sequence.ends or len(known) >= sequence.limit:
                row = SampleRow(sequence.params, known, sequence.prompt_tokens)
                reason = finish_reason(row, self._eos_token_ids, self._max_context)
                if reason is not None:
                    self._drop(sequence)
                    done = work.start + 1
                    progress.append(Progress(sequence.seq_id, done, (token_id,), (), reason))
                    continue
            plain[sequence.seq_id] = token_id
        return plain, progress

    def _advance(self, work: ScheduledSequence, sampled: SampledTokens | None) -> Progress:
        sequence = work.sequence
        if sequence.awaits_token and work.samples:
            sequence.tokens.pop()
            sequence.new_tokens -= 1
            sequence.awaits_token = False
        if sampled is None or not sampled.token_ids:
            done = self._scheduler.update_after_landing(work)
            _, _, prompt, pooled = sampled or SampledTokens(())
            return Progress(sequence.seq_id, done, prompt_logprobs=prompt, pooled=pooled)
        if sequence.grammar is not None and sequence.grammar.failure:
            return self._give_up(sequence, sequence.grammar.failure, invalid=True)
        count, reason = self._append(sequence, sampled.token_ids)
        done = self._scheduler.update_after_landing(work, sampled.token_ids[:count])
        if reason is not None:
            self._drop(sequence)
        elif sequence.num_tokens >= sequence.limit:
            self._scheduler.remove(sequence)
        return Progress(
            sequence.seq_id,
            done,
            sampled.token_ids[:count],
            sampled.logprobs[:count],
            reason,
            prompt_logprobs=sampled.prompt,
            pooled=sampled.pooled,
        )

    def _append(self, sequence: Sequence, token_ids: tuple[int, ...]) -> tuple[int, str | None]:
        """(how many tokens the sequence takes, why it ends if it does): none behind its end."""
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

    def _give_up(self, sequence: Sequence, reason: str, invalid: bool = False) -> Progress:
        self._drop(sequence)
        return Progress(sequence.seq_id, 0, abort_reason=reason, invalid=invalid)

    def _mark_stopping(self) -> None:
        self._stopping = True

    def _accept(self, sequence: Sequence) -> None:
        assert sequence.seq_id not in self._sequences, "sequence ids are unique"
        needed = -(-(sequence.num_tokens + 1) // self._blocks.block_size)
        if needed > self._blocks.num_blocks:
            raise Overloaded(
                f"the sequence needs {needed} KV blocks and the pool has {self._blocks.num_blocks}"
            )
        self._sequences[sequence.seq_id] = sequence
        sequence.priority -= self._scheduler.virtual_lag_s
        params = sequence.params
        eos = frozenset[int]() if params.ignore_eos else self._eos_token_ids
        sequence.ends = eos | params.stop_token_ids if params.stop_token_ids else eos
        sequence.limit = sequence.num_tokens + sequence.tokens_left(self._max_context)

    def _find(self, seq_id: str) -> Sequence:
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            raise Stale(f"sequence {seq_id} is not on this engine")
        return sequence

    def _drop(self, sequence: Sequence) -> None:
        """Forgets a sequence and frees its blocks."""
        self._scheduler.remove(sequence)
        self._scheduler.free(sequence)
        sequence.dropped = True
        del self._sequences[sequence.seq_id]

    def _load(self) -> Load:
        blocks, scheduler = self._blocks, self._scheduler
        return Load(
            scheduler.queue_tokens, len(scheduler.running), scheduler.num_waiting,
            blocks.num_blocks, blocks.num_free, blocks.num_cached,
            blocks.num_held, blocks.num_quarantined, self._steps,
            scheduler.preemptions, scheduler.chunk.rate, scheduler.chunk.tokens,
        )  # fmt: skip
