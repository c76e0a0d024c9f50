"""One request's story: place, reserve, prefill, hand over, decode, and again elsewhere if it fails.

    decode.Reserve -> prefill.Prefill -> first token -> (blocks, Commit) -> decode's events

Failover is one rule: prompt + tokens already delivered is the new prompt, placed elsewhere, with
the same seed and positions. The caller sees a pause, never a repeated, missing or different token.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Tracer

from baton import telemetry
from baton.errors import BatonError, DeadlineExceeded, Overloaded, Stale, Unavailable
from baton.log_format import about
from baton.v1 import decode_pb2, prefill_pb2
from router.admission.wait_queue import Line
from router.dispatch.attempt import Attempt, Output
from router.dispatch.backoff import backoff_s, is_retryable
from router.dispatch.failover import Recovery
from router.dispatch.request_state import Story
from router.fleet import blame
from router.fleet.fleet import Fleet
from router.fleet.member import Member, cancel_on
from router.fleet.snapshot import Assigned
from router.placement import placement
from router.placement.placement import Choice, Wants
from router.telemetry.stats import Tally

log = logging.getLogger(__name__)

RESERVE_TIMEOUT_S = 5.0
CANCEL_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Settings:
    """What dispatch is told by configuration."""

    max_attempts: int  # in a row without a token
    recovery_s: float  # that a request waits for a role that nobody fills
    local_prefill_max_tokens: int


@dataclass(frozen=True)
class _Placed:
    """A pair of workers, the decode one of which holds blocks for us."""

    choice: Choice
    decode: Member
    reserved: decode_pb2.ReserveResponse


class Dispatch:
    """Runs requests over the fleet. Keeps nothing between them but counts."""

    def __init__(self, fleet: Fleet, line: Line, settings: Settings, tracer: Tracer) -> None:
        self._fleet = fleet
        self._line = line
        self._settings = settings
        self._tracer = tracer
        self.tally = Tally()
        self._cancels: set[asyncio.Task[None]] = set()

    async def run(self, story: Story, parent: Context) -> AsyncGenerator[Output, None]:
        """The request's tokens, each once, in order. Raises what ended the last attempt."""
        failures = 0
        while True:
            story.attempts += 1
            try:
                async with contextlib.aclosing(self._attempt(story, parent)) as outputs:
                    async for output in outputs:
                        failures = 0
                        # A stop string may end among the tokens of a step: those behind it are not
                        # to be delivered.
                        for part in output.singly() if story.ask.stop else (output,):
                            gap_s = story.deliver(part.token_ids)
                            self.tally.delivered(len(part.token_ids), gap_s)
                            yield part
                return
            except BatonError as error:
                failures += 1
                if failures >= self._settings.max_attempts or not is_retryable(error, story):
                    raise
                trace_id = telemetry.trace_id_in(parent)
                extra = about(trace_id=trace_id, request_id=story.ask.request_id)
                log.warning("request %s: attempt %d failed, placing it elsewhere: %s",
                            story.ask.request_id, story.attempts, error, extra=extra)  # fmt: skip
                self.tally.failed_over(story, trace_id, error)
            with telemetry.span(self._tracer, "router.backoff", parent):
                await asyncio.sleep(backoff_s(failures))

    def wants(self, story: Story) -> Wants:
        """What placement is asked for."""
        return story.wants(self._settings.local_prefill_max_tokens)

    async def close(self) -> None:
        """Waits for the cancellations that are still under way."""
        while self._cancels:
            await asyncio.gather(*self._cancels, return_exceptions=True)

    async def _attempt(self, story: Story, parent: Context) -> AsyncGenerator[Output, None]:
        handoff_id = f"{story.ask.request_id}-{story.attempts}"
        with telemetry.span(self._tracer, "router.attempt", parent) as span:
            trace = telemetry.context_of(span)
            attempt = Attempt(handoff_id, story.on_unread)
            placed = await self._reserve(story, attempt, trace)
            choice, decode, reserved = placed.choice, placed.decode, placed.reserved
            attempt.on_decoding = partial(self._fleet.health.succeeded, choice.decode.incarnation)
            _describe(span, choice, reserved, story)
            streams_ns = time.time_ns() if reserved.started else 0
            try:
                if reserved.started:
                    attempt.unassign()
                    attempt.first_token_seen()
                    story.note_cached(reserved.cached_tokens)
                else:
                    attempt.suspects = {choice.prefill.incarnation}  # it may have left by now
                    self._assign(choice, self.wants(story), attempt)
                    attempt.follow(self._prefill(story, choice, reserved, attempt, trace))
                async with contextlib.aclosing(attempt.outputs()) as outputs:
                    async for output in outputs:
                        streams_ns = streams_ns or time.time_ns()
                        yield output
            except BatonError as error:
                self._blame(choice, attempt, story, error)
                raise
            finally:
                if streams_ns:  # known also where the workers' own spans died with them
                    telemetry.record(self._tracer, "router.stream", trace, streams_ns)
                attempt.unassign()
                decode.unsubscribe(handoff_id)
                try:
                    await attempt.close()
                finally:
                    if not attempt.finished_on_decode:
                        self._cancel(decode, handoff_id)

    async def _reserve(self, story: Story, attempt: Attempt, trace: Context) -> _Placed:
        """Blocks on the best decode worker; waits for room as long as the deadline allows.

        Those who wait stand in line: if all of them asked at each news, they would drown workers.
        """
        wants = self.wants(story)
        ticket = story.ticket()
        with telemetry.span(self._tracer, "router.place", trace):
            async with Recovery(self._settings.recovery_s) as recovery:
                return await self._line.place(
                    ticket,
                    lambda: self._place_once(story, wants, attempt, recovery, trace),
                    lambda: self._fleet.news,
                    accepted=story.placed_at is not None,
                )

    async def _place_once(
        self, story: Story, wants: Wants, attempt: Attempt, recovery: Recovery, trace: Context
    ) -> _Placed:
        """One pass over the decode workers that seem to have room; Overloaded when none has."""
        full: set[str] = set()
        while True:
            with recovery.waits_for_workers():
                choice = placement.pick(self._fleet.snapshot(), wants, story.failed_workers, full)
            decode = self._fleet.member(choice.decode.incarnation)
            if not choice.decode_prefills:
                self._assign(choice, wants, attempt)
            decode.subscribe(attempt.handoff_id, attempt.on_decode)
            try:
                reserved = await self._call_reserve(story, attempt, choice, decode, trace)
            except BaseException as error:
                attempt.unassign()
                decode.unsubscribe(attempt.handoff_id)
                if isinstance(error, Overloaded):
                    self._fleet.health.succeeded(choice.decode.incarnation)  # it answered
                else:
                    self._cancel(decode, attempt.handoff_id)  # it may hold blocks for us
                    if isinstance(error, BatonError):
                        self._blame(choice, attempt, story, error)
                    raise
                full.add(choice.decode.incarnation)
                continue
            story.placed_at = story.placed_at or time.monotonic()
            return _Placed(choice, decode, reserved)

    def _assign(self, choice: Choice, wants: Wants, attempt: Attempt) -> None:
        prompt = Assigned(wants.num_tokens - choice.prefill_cached, wants.due)
        attempt.assign(self._fleet.member(choice.prefill.incarnation), prompt)

    async def _call_reserve(
        self, story: Story, attempt: Attempt, choice: Choice, decode: Member, trace: Context
    ) -> decode_pb2.ReserveResponse:
        request = decode_pb2.ReserveRequest(
            stream_id=decode.stream_id,
            sequence=story.spec(attempt.handoff_id),
            local_prefill_max_tokens=choice.local_prefill_max_tokens,
        )
        name, timeout_s = decode.record.incarnation, min(RESERVE_TIMEOUT_S, story.ask.time_left_s)
        self._fleet.health.sent(name)
        story.workers.add(name)
        try:
            with decode.calling():
                call = decode.decode.Reserve(
                    request, timeout=timeout_s, metadata=telemetry.inject(trace)
                )
                reserved: decode_pb2.ReserveResponse = await attempt.unless_lost(call)
        except DeadlineExceeded as error:
            if timeout_s < RESERVE_TIMEOUT_S:
                raise  # the caller's own deadline
            raise Unavailable(f"decode worker {name} did not answer in {timeout_s} s") from error
        if reserved.incarnation != name:
            raise Stale(f"another process, {reserved.incarnation}, has taken the place of {name}")
        return reserved

    async def _prefill(
        self,
        story: Story,
        choice: Choice,
        reserved: decode_pb2.ReserveResponse,
        attempt: Attempt,
        trace: Context,
    ) -> None:
        """Runs the prompt on the prefill worker and feeds what it says into the attempt."""
        name = choice.prefill.incarnation
        member = self._fleet.member(name)
        request = prefill_pb2.PrefillRequest(
            sequence=story.spec(attempt.handoff_id),
            target=prefill_pb2.HandoffTarget(
                incarnation=reserved.incarnation,
                reservation_token=reserved.reservation_token,
                cached_tokens=reserved.cached_tokens,
            ),
        )
        member.subscribe(attempt.handoff_id, attempt.on_prefill_lost)
        self._fleet.health.sent(name)
        self._fleet.health.sent(choice.names)
        story.workers.add(name)
        calling = telemetry.span(self._tracer, "router.prefill", trace, kind=SpanKind.CLIENT)
        try:
            with calling, member.calling():
                call = member.prefill.Prefill(
                    request, timeout=story.ask.time_left_s, metadata=telemetry.inject(trace)
                )
                async for message in call:
                    if message.HasField("first_token"):
                        attempt.unassign()
                        attempt.suspects.add(reserved.incarnation)  # of a failed handoff
                        self._fleet.health.succeeded(name)
                    elif message.HasField("committed"):
                        self._fleet.health.succeeded(choice.names)
                    story.note(message)
                    attempt.on_prefill(message)
        finally:
            member.unsubscribe(attempt.handoff_id)

    def _blame(self, choice: Choice, attempt: Attempt, story: Story, error: BatonError) -> None:
        """The request avoids whom it failed on; so does everybody, if it happens often."""
        blamed = blame.suspects(choice, attempt.suspects, error)
        story.failed_workers |= blamed
        blame.tell(self._fleet.health, choice, blamed, error)

    def _cancel(self, decode: Member, handoff_id: str) -> None:
        """Frees the sequence's blocks without making anybody wait for it."""
        task = asyncio.create_task(cancel_on(decode, handoff_id, CANCEL_TIMEOUT_S))
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)


def _describe(
    span: Span, choice: Choice, reserved: decode_pb2.ReserveResponse, story: Story
) -> None:
    prefill = "" if reserved.started else choice.prefill.incarnation
    story.route.prefill = prefill
    story.route.decode = choice.decode.incarnation
    span.set_attribute("baton.attempt", story.attempts)
    span.set_attribute("baton.prefill", prefill or "(decode prefills)")
    span.set_attribute("baton.decode", choice.decode.incarnation)
    span.set_attribute("baton.decode_cached_tokens", reserved.cached_tokens)
    for name, value in placement.why(choice).items():
        span.set_attribute(f"baton.placement.{name}", value)
