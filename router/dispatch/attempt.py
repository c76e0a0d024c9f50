"""One attempt at a request: brings two workers' messages into the order the caller must see."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import TypeVar

from baton.errors import BatonError, InternalError, TransferFailed
from baton.v1 import common_pb2, prefill_pb2
from router.fleet.member import Event, Member
from router.fleet.snapshot import AssignedPrompt

_COMMIT_ACK_S = 1.0
MAX_UNREAD_BYTES = 1 << 20  # of one request's output that wait for a caller that reads slowly
_BACKLOG = 8  # outputs: more are joined, so that what is behind costs less a token
_OUTPUT_BYTES = 128  # what an output takes besides its message
T = TypeVar("T")


@dataclass(frozen=True)
class Output:
    """New tokens of a request; `finish_reason` is set on the last."""

    token_ids: list[int]
    logprobs: list[common_pb2.PositionLogprobs]
    finish_reason: common_pb2.FinishReason
    num_bytes: int = 0  # memory it takes while it waits

    def singly(self) -> Iterator[Output]:
        last = len(self.token_ids) - 1
        for at, token_id in enumerate(self.token_ids):
            reason = self.finish_reason if at == last else common_pb2.FINISH_REASON_UNSPECIFIED
            yield Output([token_id], self.logprobs[at : at + 1], reason)


class Attempt:
    """The two workers' calls and messages, until the last token or the first error."""

    def __init__(self, handoff_id: str, on_unread: Callable[[], None] = lambda: None) -> None:
        """`on_unread` is called when more than MAX_UNREAD_BYTES of output wait to be read."""
        self.handoff_id = handoff_id
        self._on_unread = on_unread
        self._unread_bytes = 0
        self.on_decoding: Callable[[], None] = lambda: None  # decode has brought its first token
        # Workers that a failure now counts against; an empty set stands for the decode worker.
        self.suspects: set[str] = set()
        self.finished_on_decode = False
        self._decoding = False
        self._handed_over = False  # decode has all it needs, or needs nothing
        self._queue: asyncio.Queue[Output | BatonError] = asyncio.Queue()
        self._early: list[Event] | None = []  # decode may send before prefill's first token
        self._prefill: asyncio.Task[None] | None = None
        self._assigned: Member | None = None
        self._call: asyncio.Timeout | None = None  # while `unless_lost` waits
        self._lost: BatonError | None = None  # why it did not wait any longer

    def assign(self, prefill: Member, prompt: AssignedPrompt) -> None:
        """Counts the prompt against a prefill worker, so that a burst sees its own beginning."""
        self.unassign()
        prefill.assign(self.handoff_id, prompt)
        self._assigned = prefill

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
            self._queue.put_nowait(Output([first.token_id], logprobs, first.finish_reason))
            self.first_token_seen()

    def on_prefill_lost(self, event: Event) -> None:
        """Handles the loss of the prefill worker, unless it is no longer needed."""
        if isinstance(event, BatonError) and not self._handed_over:
            self._queue.put_nowait(event)

    def first_token_seen(self) -> None:
        """From now on decode's events come in order by themselves."""
        early, self._early = self._early or [], None
        for event in early:
            self.on_decode(event)

    def on_decode(self, event: Event) -> None:
        if isinstance(event, BatonError):
            self.suspects.clear()
            self._queue.put_nowait(event)
            if self._call is not None and self._lost is None:
                self._lost = event
                self._call.reschedule(asyncio.get_running_loop().time())
        elif event.abort_reason:
            # Before Commit it is the handoff that failed: either end may be the reason.
            waits = self._prefill is not None and not self._handed_over
            failed = TransferFailed if waits else InternalError
            self._queue.put_nowait(failed(event.abort_reason))
        elif self._early is not None:
            self._early.append(event)
        else:
            if not self._decoding:
                self._decoding = True
                self.on_decoding()
            self._handed_over = True
            self.suspects.clear()
            self.finished_on_decode = bool(event.finish_reason)
            num_bytes = event.ByteSize() + _OUTPUT_BYTES
            self._unread_bytes += num_bytes
            if self._unread_bytes > MAX_UNREAD_BYTES:
                self._on_unread()  # the request ends: nothing more is kept of it
                return
            tokens, logprobs = list(event.token_ids), list(event.logprobs)
            self._queue.put_nowait(Output(tokens, logprobs, event.finish_reason, num_bytes))

    async def unless_lost(self, call: Awaitable[T]) -> T:
        """The call's result; raises as soon as the decode worker is lost, and cancels the call."""

        try:
            async with asyncio.timeout(None) as self._call:
                return await call
        except TimeoutError:
            assert self._lost is not None
            raise self._lost from None
        finally:
            self._call = self._lost = None

    async def outputs(self) -> AsyncGenerator[Output, None]:
        """All output of both workers, up to the last token; raises what ended it early."""
        while True:
            item = await self._queue.get()
            if isinstance(item, BatonError):
                raise item
            self._unread_bytes -= item.num_bytes
            if self._queue.qsize() > _BACKLOG:
                item = self._joined(item)
            yield item
            if item.finish_reason:
                return

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

    def _joined(self, first: Output) -> Output:
        """An output and all that wait behind it as one, up to an error, which is raised next."""
        token_ids, logprobs = [*first.token_ids], [*first.logprobs]
        reason = first.finish_reason
        while not self._queue.empty():
            item = self._queue.get_nowait()
            if isinstance(item, BatonError):
                self._queue = asyncio.Queue()  # what came behind it is not to be delivered
                self._queue.put_nowait(item)
                break
            self._unread_bytes -= item.num_bytes
            token_ids += item.token_ids
            logprobs += item.logprobs
            reason = item.finish_reason
        return Output(token_ids, logprobs, reason)

    def _prefill_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or self._handed_over:  # by `close`, or it is no longer needed
            return
        error = task.exception()
        if error is None:
            error = InternalError("the prefill call ended before the handoff was done")
        elif not isinstance(error, BatonError):
            error = InternalError(f"{type(error).__name__}: {error}")
        self._queue.put_nowait(error)
