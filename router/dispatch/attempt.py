"""One attempt at a request: puts two workers' messages into the order for the caller."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from opentelemetry.trace import INVALID_SPAN, Span

from baton.errors import BatonError, InternalError, InvalidRequest, TransferFailed
from baton.net.tasks import wait_at_most
from baton.telemetry import tracing
from baton.v1 import common_pb2, decode_pb2, prefill_pb2
from router.fleet.kv_index import AssignedPrompt
from router.fleet.member import Event, Member

# Least and most time to wait for a prefill worker's last message; between, the attempt's duration.
# The caller has all tokens by then, and the worker may have been stopped.
_COMMIT_ACK_S = (0.1, 1.0)
# Called with new tokens, their log-probabilities and the finish reason, if they are the last;
# returns whether no more are wanted. It neither waits nor raises.
Deliver = Callable[
    [Sequence[int], Sequence[common_pb2.PositionLogprobs], common_pb2.FinishReason], bool
]


class Attempt:
    """The messages of two workers, until the last token or the first error."""

    def __init__(self, handoff_id: str, deliver: Deliver) -> None:
        self.handoff_id = handoff_id
        self._deliver = deliver
        self.spec: common_pb2.SequenceSpec | None = None  # as sent to the decode worker
        self.on_decoding: Callable[[], None] = lambda: None  # called at decode's first token
        # Workers that a failure counts against now; an empty set means the decode worker.
        self.suspects: set[str] = set()
        self.finished_on_decode = False
        self.pooled: Sequence[float] = ()
        self.prompt_logprobs = common_pb2.PromptLogprobs()  # those received so far
        self.tries = 0  # to find room on workers
        self.refusals = 0  # of decode workers that seemed to have room
        self.last_refusal = ""  # why a try failed, the last one
        self.first_output_ns = 0  # wall clock
        self._decoding = False
        self._handed_over = False  # decode has all it needs, if anything
        # Events of decode before prefill's first token; None after it.
        self._early: list[decode_pb2.SequenceEvent] | None = []
        self._assigned: Member | None = None
        self._reserved: asyncio.Future[decode_pb2.ReserveResponse] | None = None  # once requested
        self._prefill_over: asyncio.Future[None] | None = None  # set when the prompt is sent
        self._prefill_span: Span = INVALID_SPAN
        loop = asyncio.get_running_loop()
        self._began = loop.time()
        self._over: asyncio.Future[None] = loop.create_future()
        self._error: Exception | None = None

    def assign(self, worker: Member, prompt: AssignedPrompt) -> None:
        """Counts the prompt as load of the worker that computes it, before its next report."""
        self.unassign()
        worker.assign(self.handoff_id, prompt)
        self._assigned = worker

    def unassign(self) -> None:
        """Undoes `assign`: the prompt is computed, or will not be; idempotent."""
        if self._assigned is not None:
            self._assigned.unassign(self.handoff_id)
            self._assigned = None

    async def reserved(self, timeout_s: float) -> decode_pb2.ReserveResponse:
        """Waits for the decode worker's answer; raises its refusal or its loss.

        It must be awaited at once. Raises TimeoutError if there is no answer in time.
        """
        self._reserved = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(timeout_s):  # an answer at the last moment may come too late
            return await self._reserved

    @property
    def prefilling(self) -> bool:
        """Whether a prefill worker has the prompt and has not sent its last message."""
        return self._prefill_over is not None and not self._prefill_over.done()

    def prefill_sent(self, span: Span) -> None:
        """Records that the prompt was sent; `on_prefill` handles the answers and ends the span."""
        self._prefill_over = asyncio.get_running_loop().create_future()
        self._prefill_span = span

    def prefill_ended(self, error: BatonError | None = None) -> None:
        """Records that the prefill worker sends no more; idempotent."""
        if self.prefilling:
            assert self._prefill_over is not None
            self._prefill_over.set_result(None)
            if error is not None:
                tracing.failed(self._prefill_span, error)
            self._prefill_span.end()

    def on_prefill(self, event: Event) -> None:
        """Handles a prefill worker's message; an error ends the attempt if it is still needed."""
        if not self.prefilling:
            return
        if isinstance(event, BatonError):
            self.prefill_ended(event)
            if not self._handed_over:
                self._end(event)
        elif isinstance(event, prefill_pb2.PrefillResponse):
            if event.HasField("committed"):
                self.prefill_ended()
                self._handed_over = self._early is None
                self.suspects.clear()
            elif event.HasField("prompt_logprobs"):
                self.prompt_logprobs.MergeFrom(event.prompt_logprobs)
            elif event.HasField("first_token"):
                first = event.first_token
                if first.finish_reason:
                    self.prefill_ended()
                    self._handed_over = True
                logprobs = [first.logprobs] if first.HasField("logprobs") else []
                self.pooled = first.pooled
                tokens = [first.token_id] if first.HasField("token_id") else []
                self._output(tokens, logprobs, first.finish_reason)
                self.first_token_seen()

    def first_token_seen(self) -> None:
        """Delivers the events of decode that came early; later ones are in order."""
        early, self._early = self._early or [], None
        for event in early:
            self.on_decode(event)

    def on_decode(self, event: Event) -> None:
        """Handles a decode worker's message."""
        if not isinstance(event, decode_pb2.SequenceEvent):
            self._on_answer(event)
        elif event.abort_reason:
            if event.step_failed:  # prefill's message about Commit may come after this one
                self._handed_over = True
                self.suspects.clear()
            # Before Commit the handoff failed, and either end may be the cause.
            waits = self._prefill_over is not None and not self._handed_over
            failed: type[BatonError] = TransferFailed if waits else InternalError
            if event.invalid:
                failed = InvalidRequest
            self._decode_failed(failed(event.abort_reason))
        elif self._early is not None:
            self._early.append(event)
        else:
            if not self._decoding:
                self._decoding = self._handed_over = True
                self.suspects.clear()
                self.unassign()
                self.on_decoding()
            if event.HasField("prompt_logprobs"):
                self.prompt_logprobs.MergeFrom(event.prompt_logprobs)
                if not event.token_ids:
                    return
            if reason := event.finish_reason:
                self.finished_on_decode = True
            self._output(event.token_ids, event.logprobs, reason)

    def _on_answer(self, event: Event) -> None:
        if isinstance(event, BatonError):
            self.suspects.clear()
            self._decode_failed(event)
        elif self._reserved is None or self._reserved.done():
            return  # not expected
        elif isinstance(event, decode_pb2.ReserveResponse):
            self._reserved.set_result(event)

    def _decode_failed(self, error: Exception) -> None:
        if self._reserved is None or self._reserved.done():
            self._end(error)
        else:
            self._reserved.set_exception(error)

    async def finished(self) -> None:
        """Waits until all output was delivered; raises the error that ended it early."""
        await self._over
        if self._error is not None:
            raise self._error

    async def acknowledged(self) -> None:
        """Waits briefly for the prefill worker's last message, if decode has finished.

        It is on its way then, as decode has verified Commit.
        """
        if self.prefilling and self.finished_on_decode:
            assert self._prefill_over is not None
            least_s, most_s = _COMMIT_ACK_S
            elapsed_s = asyncio.get_running_loop().time() - self._began
            longest_s = min(most_s, max(least_s, elapsed_s))
            await wait_at_most(longest_s, asyncio.shield(self._prefill_over))

    def _output(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[common_pb2.PositionLogprobs],
        reason: common_pb2.FinishReason,
    ) -> None:
        if self._over.done():
            return
        self.first_output_ns = self.first_output_ns or time.time_ns()
        if self._deliver(token_ids, logprobs, reason) or reason:
            self._over.set_result(None)

    def _end(self, error: Exception) -> None:
        """Ends the attempt; later output is not delivered."""
        if not self._over.done():
            self._error = error
            self._over.set_result(None)
