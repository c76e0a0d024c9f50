"""The engine's one thread: admit, plan, run, publish.

Everything that changes blocks or batch happens on this thread. Others hand it closures through the
inbox and get a future; it sleeps on the inbox when there is nothing to run. What a step produced
goes out through one callback, called on this thread, which must not block.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from baton.engine.blocks import BlockPool
from baton.engine.inbox import Inbox
from baton.engine.planner import Plan, Planner, Work
from baton.engine.reports import Load, Progress, Reserved, StepReport
from baton.engine.runner import Drawn, Runner
from baton.engine.sampler import SampleRow, finish_reason
from baton.engine.sequence import Sequence
from baton.errors import InternalError, Overloaded, Stale

log = logging.getLogger(__name__)
T = TypeVar("T")


class Engine:
    """Runs sequences until they finish. Methods are thread-safe and return futures."""

    def __init__(
        self,
        runner: Runner,
        planner: Planner,
        eos_token_ids: frozenset[int],
        max_context: int,
        publish: Callable[[StepReport], None],
    ) -> None:
        self._runner = runner
        self._planner = planner
        self._blocks: BlockPool = planner.blocks
        self._eos_token_ids = eos_token_ids
        self._max_context = max_context
        self._publish_report = publish
        self._sequences: dict[str, Sequence] = {}
        self._inbox = Inbox()
        self._stopping = False
        self._steps = 0
        self._thread = threading.Thread(target=self._live, name="engine", daemon=True)
        self.ended: Future[None] = Future()  # fails if the thread does; ask it, do not cancel it
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

    # What others may ask for.

    def add(self, sequence: Sequence) -> Future[None]:
        """Queues a sequence. Fails with Overloaded if the pool could never hold it."""
        return self.submit(lambda: self._add(sequence))

    def reserve(self, sequence: Sequence) -> Future[Reserved]:
        """Holds blocks for a sequence that `resume` or `start_reserved` starts later.

        Fails with Overloaded when there is no room now.
        """
        return self.submit(lambda: self._reserve(sequence))

    def start_reserved(self, seq_id: str) -> Future[None]:
        """Lets a reserved sequence compute what is not cached by itself."""
        return self.submit(lambda: self._start_reserved(seq_id))

    def resume(self, seq_id: str, num_computed: int, token_id: int) -> Future[None]:
        """A parked sequence's KV is complete up to `num_computed`; it goes on with `token_id`."""
        return self.submit(lambda: self._resume(seq_id, num_computed, token_id))

    def release(self, seq_id: str, quarantine_from: int | None = None) -> Future[list[int]]:
        """Ends a sequence in any state and frees its blocks; unknown ids are ignored.

        Blocks from index `quarantine_from` on are quarantined instead, and their numbers returned
        for `readmit`.
        """
        return self.submit(lambda: self._release(seq_id, quarantine_from))

    def readmit(self, blocks: list[int]) -> Future[None]:
        """Quarantined blocks are safe again."""
        return self.submit(lambda: self._readmit(blocks))

    def load(self) -> Future[Load]:
        """The load now."""
        return self.submit(self._load)

    def cached_hashes(self) -> Future[list[int]]:
        """Every prefix hash that can be hit now."""
        return self.submit(lambda: self._blocks.cached_hashes)

    def check(self) -> Future[None]:
        """Asserts the block pool's invariants."""
        return self.submit(self._blocks.check)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Runs `work` on the engine thread between two steps, whether or not anybody waits for it.

        Fails with Unavailable once the thread has ended.
        """
        return self._inbox.submit(work)

    # The thread.

    def _live(self) -> None:
        try:
            self._run()
        except Exception as error:
            log.critical("the engine thread failed", exc_info=error)
            reason = f"the engine failed: {type(error).__name__}: {error}"
            self._inbox.close(reason)
            self.ended.set_exception(InternalError(reason))
        else:
            self._inbox.close("the engine has stopped")
            self.ended.set_result(None)

    def _run(self) -> None:
        while not self._stopping:
            self._admit()
            plan = self._planner.plan()
            started_ns = time.time_ns()
            drawn, failure = self._compute(plan)
            self._publish(plan, drawn, failure, started_ns)

    def _admit(self) -> None:
        """Does what others asked for; sleeps until somebody asks when there is nothing to run."""
        if not (self._planner.running or self._planner.num_waiting):
            self._inbox.wait_and_run()
        self._inbox.run_all()

    def _compute(self, plan: Plan) -> tuple[dict[str, Drawn], str | None]:
        if not plan.work:
            if self._planner.num_waiting and not self._stopping:
                self._inbox.wait_and_run()  # nobody fits: wait until something is asked or given up
            return {}, None
        self._steps += 1
        try:
            return self._runner.run(plan), None
        except Exception as error:
            log.exception("engine step failed; its sequences are given up")
            return {}, f"engine step failed: {type(error).__name__}: {error}"

    def _publish(
        self, plan: Plan, drawn: dict[str, Drawn], failure: str | None, started_ns: int
    ) -> None:
        if failure is None:
            progress = [self._advance(work, drawn.get(work.sequence.seq_id)) for work in plan.work]
        else:
            progress = [self._give_up(work.sequence, failure) for work in plan.work]
        report = StepReport(
            started_ns,
            time.time_ns(),
            plan.num_tokens,
            progress,
            self._load(),
            self._blocks.take_changes(),
        )
        self._publish_report(report)

    def _advance(self, work: Work, drawn: Drawn | None) -> Progress:
        sequence = work.sequence
        self._planner.advance(work)
        if drawn is None:
            return Progress(sequence.seq_id, sequence.num_computed)
        sequence.tokens.append(drawn.token_id)
        sequence.new_tokens += 1
        row = SampleRow(sequence.params, sequence.tokens, sequence.prompt_tokens)
        reason = finish_reason(row, self._eos_token_ids, self._max_context)
        if reason is not None:
            self._drop(sequence)
        elif sequence.new_tokens == sequence.park_after:
            self._planner.remove(sequence)
        return Progress(
            sequence.seq_id, sequence.num_computed, drawn.token_id, drawn.logprobs, reason
        )

    def _give_up(self, sequence: Sequence, reason: str) -> Progress:
        self._drop(sequence)
        return Progress(sequence.seq_id, 0, abort_reason=reason)

    # On the thread, for others.

    def _add(self, sequence: Sequence) -> None:
        self._accept(sequence)
        self._planner.add(sequence)

    def _accept(self, sequence: Sequence) -> None:
        assert sequence.seq_id not in self._sequences, "sequence ids are unique"
        needed = -(-(sequence.num_tokens + 1) // self._blocks.block_size)
        if needed > self._blocks.num_blocks:
            raise Overloaded(
                f"the sequence needs {needed} KV blocks and the pool has {self._blocks.num_blocks}"
            )
        self._sequences[sequence.seq_id] = sequence

    def _reserve(self, sequence: Sequence) -> Reserved:
        self._accept(sequence)
        if not self._planner.reserve(sequence, extra_tokens=1):
            del self._sequences[sequence.seq_id]
            raise Overloaded(
                f"{sequence.num_tokens} tokens do not fit: {self._blocks.num_available} of "
                f"{self._blocks.num_blocks} KV blocks are available",
                retry_after_s=0.5,
            )
        sequence.awaits_kv = True
        return Reserved(sequence.num_computed, tuple(sequence.block_ids))

    def _start_reserved(self, seq_id: str) -> None:
        sequence = self._find(seq_id)
        sequence.awaits_kv = False
        self._planner.add(sequence)

    def _resume(self, seq_id: str, num_computed: int, token_id: int) -> None:
        sequence = self._find(seq_id)
        assert num_computed == sequence.num_tokens, "a handoff covers every known token"
        first_new = sequence.num_computed // self._blocks.block_size
        sequence.num_computed = num_computed
        sequence.awaits_kv = False
        self._planner.publish(sequence, first_new)
        sequence.tokens.append(token_id)
        sequence.new_tokens += 1
        self._planner.add(sequence)

    def _release(self, seq_id: str, quarantine_from: int | None) -> list[int]:
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
            self._runner.scrub(sequence.block_ids[first:])
        self._drop(sequence)
        return quarantined

    def _readmit(self, blocks: list[int]) -> None:
        self._runner.scrub(blocks)
        self._blocks.readmit(blocks)

    def _drop(self, sequence: Sequence) -> None:
        self._planner.remove(sequence)
        self._planner.free(sequence)
        del self._sequences[sequence.seq_id]

    def _find(self, seq_id: str) -> Sequence:
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            raise Stale(f"sequence {seq_id} is not on this engine")
        return sequence

    def _load(self) -> Load:
        blocks, planner = self._blocks, self._planner
        return Load(
            planner.queue_tokens, len(planner.running), planner.num_waiting, blocks.num_blocks,
            blocks.num_free, blocks.num_cached, blocks.num_held, blocks.num_quarantined,
            self._steps, planner.preemptions,
        )  # fmt: skip

    def _mark_stopping(self) -> None:
        self._stopping = True
