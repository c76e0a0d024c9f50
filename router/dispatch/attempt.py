"""One attempt at a request: brings two workers' messages into the order the caller must see."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TypeVar

from baton.errors import BatonError, InternalError, InvalidRequest, TransferFailed
from baton.v1 import common_pb2, decode_pb2, prefill_pb2
from router.fleet.member import Event, Member
from router.fleet.snapshot import AssignedPrompt

_COMMIT_ACK_S = 1.0
T = TypeVar("T")
# Takes new tokens, their log-probabilities, and the reason why they are the last, if they are; true
# when no more are wanted. It neither waits nor raises.
Deliver = Callable[
    [Sequence[int], Sequence[common_pb2.PositionLogprobs], common_pb2.FinishReason], bool
]


class Attempt:
    """The two workers' calls and messages, until the last token or the first error."""

    def __init__(self, handoff_id: str, deliver: Deliver) -> None:
        self.handoff_id = handoff_id
        self._deliver = deliver
        self.on_decoding: Callable[[], None] = lambda: None  # decode has brought its first token
        # Workers that a failure now counts against; an empty set stands for the decode worker.
        self.suspects: set[str] = set()
        self.finished_on_decode = False
        self.first_output_ns = 0  # wall clock
        self._decoding = False
        self._handed_over = False  # decode has all it needs, or needs nothing
        # Decode may send before prefill's first token.
        self._early: list[decode_pb2.SequenceEvent] | None = []
        self._prefill: asyncio.Task[None] | None = None
        self._assigned: Member | None = None
        self._call: asyncio.Timeout | None = None  # while `unless_lost` waits
        self._over = asyncio.Event()
        self._error: Exception | None = None

    def assign(self, worker: Member, prompt: AssignedPrompt) -> None:
        """Counts the prompt against the one that computes it: a burst sees its own beginning."""
        self.unassign()
        worker.assign(self.handoff_id, prompt)
        self._assigned = worker

    def unassign(self) -> None:
        """The prompt is computed, or is not going to be; may be called again."""
        if self._assigned is not None:
            self._assigned.unassign(self.handoff_id)
            self._assigned = None

    def follow(self, prefill: Coroutine[None, None, None]) -> None:
        """Runs the prefill call beside the decode events; its failure fails the attempt."""
        self._prefill = asyncio.create_task(prefill)
        self._prefill.add_done_callback(self._prefill_ended)

    def on_prefill(self, message: prefill_pb2.PrefillResponse) -> None:
        if message.HasField("committed"):
            self._handed_over = self._early is None
            self.suspects.clear()
        elif message.HasField("first_token"):
            first = message.first_token
            self._handed_over |= bool(first.finish_reason)
            logprobs = [first.logprobs] if first.HasField("logprobs") else []
            self._output([first.token_id], logprobs, first.finish_reason)
            self.first_token_seen()

    def on_prefill_lost(self, event: Event) -> None:
        """Handles the loss of the prefill worker, unless it is no longer needed."""
        if isinstance(event, BatonError) and not self._handed_over:
            self._end(event)

    def first_token_seen(self) -> None:
        """From now on decode's events come in order by themselves."""
        early, self._early = self._early or [], None
        for event in early:
            self.on_decode(event)

    def on_decode(self, event: Event) -> None:
        if isinstance(event, BatonError):
            self.suspects.clear()
            self._end(event)
            if self._call is not None and not self._call.expired():
                self._call.reschedule(asyncio.get_running_loop().time())
        elif event.abort_reason:
            # Before Commit it is the handoff that failed: either end may be the reason.
            waits = self._prefill is not None and not self._handed_over
            failed: type[BatonError] = TransferFailed if waits else InternalError
            if event.invalid:
                failed = InvalidRequest
            self._end(failed(event.abort_reason))
        elif self._early is not None:
            self._early.append(event)
        else:
            if not self._decoding:
                self._decoding = True
                self.unassign()
                self.on_decoding()
            self._handed_over = True
            self.suspects.clear()
            reason = event.finish_reason
            self.finished_on_decode = bool(reason)
            self._output(event.token_ids, event.logprobs, reason)

    async def unless_lost(self, call: Awaitable[T]) -> T:
        """The call's result; raises as soon as the decode worker is lost, and cancels the call."""
        try:
            async with asyncio.timeout(None) as self._call:
                return await call
        except TimeoutError:
            assert self._error is not None
            raise self._error from None
        finally:
            self._call = None

    async def finished(self) -> None:
        """Waits until all output was delivered; raises what ended it early."""
        await self._over.wait()
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        """Ends the prefill call, which frees the prompt's blocks there."""
        if self._prefill is None:
            return
        try:
            if self.finished_on_decode:  # so Commit was verified: its last message is on its way
                await asyncio.wait([self._prefill], timeout=_COMMIT_ACK_S)
        finally:
            self._prefill.cancel()
            await asyncio.gather(self._prefill, return_exceptions=True)

    def _output(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[common_pb2.PositionLogprobs],
        reason: common_pb2.FinishReason,
    ) -> None:
        if self._over.is_set():
            return
        self.first_output_ns = self.first_output_ns or time.time_ns()
        if self._deliver(token_ids, logprobs, reason) or reason:
            self._over.set()

    def _end(self, error: Exception) -> None:
        """What comes later is not delivered."""
        if not self._over.is_set():
            self._error = error
            self._over.set()

    def _prefill_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or self._handed_over:  # by `close`, or it is no longer needed
            return
        error = task.exception()
        if error is None:
            error = InternalError("the prefill call ended before the handoff was done")
        elif not isinstance(error, BatonError):
            error = InternalError(f"{type(error).__name__}: {error}")
        self._end(error)
