"""One request's story: place, reserve, prefill, hand over, decode, and again elsewhere if it fails.

    decode.Reserve -> prefill.Prefill -> first token -> (blocks, Commit) -> decode's events

Failover is one rule: prompt + tokens already delivered is the new prompt, placed elsewhere, with
the same seed and positions. The caller sees a pause, never a repeated, missing or different token.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.trace import Span, Tracer

from baton import telemetry
from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    KvMismatch,
    Overloaded,
    RetryableError,
    Stale,
    TransferFailed,
    Unavailable,
)
from baton.v1 import decode_pb2, prefill_pb2
from router import placement
from router.attempt import Attempt, Output
from router.fleet import Fleet
from router.member import Member, cancel_on
from router.placement import Pair
from router.snapshot import Assigned
from router.story import Story

log = logging.getLogger(__name__)

RESERVE_TIMEOUT_S = 5.0
CANCEL_TIMEOUT_S = 2.0
_BACKOFF_S = (0.02, 1.0)
# What a worker says of itself or of its peer, never of the request.
_PLACE_ELSEWHERE = (RetryableError, TransferFailed, Stale, Cancelled, KvMismatch, InternalError)


@dataclass(frozen=True)
class Settings:
    """What dispatch is told by configuration."""

    router_id: str
    max_attempts: int
    local_prefill_max_tokens: int


class Dispatch:
    """Runs requests over the fleet. Keeps nothing between them."""

    def __init__(self, fleet: Fleet, settings: Settings, tracer: Tracer) -> None:
        self._fleet = fleet
        self._settings = settings
        self._tracer = tracer
        self._cancels: set[asyncio.Task[None]] = set()
        self._line = asyncio.Lock()  # held by the first of those who wait for room
        self.queued = 0

    async def run(self, story: Story, parent: Context) -> AsyncGenerator[Output, None]:
        """The request's tokens, each once, in order. Raises what ended the last attempt."""
        while True:
            story.attempts += 1
            try:
                async with contextlib.aclosing(self._attempt(story, parent)) as outputs:
                    async for output in outputs:
                        story.deliver(output.token_ids)
                        yield output
                return
            except BatonError as error:
                if story.attempts >= self._settings.max_attempts or not _retryable(error, story):
                    raise
                log.warning("request %s: attempt %d failed, placing it elsewhere: %s",
                            story.ask.request_id, story.attempts, error)  # fmt: skip
            await asyncio.sleep(_backoff_s(story.attempts))

    async def close(self) -> None:
        """Waits for the cancellations that are still under way."""
        while self._cancels:
            await asyncio.gather(*self._cancels, return_exceptions=True)

    async def _attempt(self, story: Story, parent: Context) -> AsyncGenerator[Output, None]:
        handoff_id = f"{story.ask.request_id}-{story.attempts}"
        with telemetry.span(self._tracer, "router.attempt", parent) as span:
            trace = telemetry.context_of(span)
            attempt = Attempt(handoff_id)
            pair, reserved = await self._reserve(story, attempt, trace)
            decode = self._fleet.member(pair.decode.incarnation)
            _describe(span, pair, reserved, story)
            try:
                if reserved.started:
                    attempt.unassign()
                    attempt.first_token_seen()
                    story.cached_tokens = _first(story.cached_tokens, reserved.cached_tokens)
                else:
                    attempt.follow(self._prefill(story, pair, reserved, attempt, trace))
                async with contextlib.aclosing(attempt.outputs()) as outputs:
                    async for output in outputs:
                        yield output
            except BatonError:
                story.failed_workers |= attempt.suspects or {pair.decode.incarnation}
                raise
            finally:
                attempt.unassign()
                decode.unsubscribe(handoff_id)
                try:
                    await attempt.close()
                finally:
                    if not attempt.finished_on_decode:
                        self._cancel(decode, handoff_id)

    async def _reserve(
        self, story: Story, attempt: Attempt, trace: Context
    ) -> tuple[Pair, decode_pb2.ReserveResponse]:
        """Blocks on the best decode worker; waits for room as long as the deadline allows.

        Those who wait stand in line: if all of them asked at each news, they would drown workers.
        """
        self.queued += 1
        try:
            with telemetry.span(self._tracer, "router.place", trace):
                if not self._line.locked():
                    with contextlib.suppress(Overloaded):
                        return await self._place_once(story, attempt, trace)
                async with self._line:
                    while True:
                        news = self._fleet.news
                        with contextlib.suppress(Overloaded):
                            return await self._place_once(story, attempt, trace)
                        await news.wait()
        finally:
            self.queued -= 1

    async def _place_once(
        self, story: Story, attempt: Attempt, trace: Context
    ) -> tuple[Pair, decode_pb2.ReserveResponse]:
        """One pass over the decode workers that seem to have room; Overloaded when none has."""
        num_tokens = len(story.ask.prompt) + len(story.delivered)
        full: set[str] = set()
        while True:
            pair = placement.pick(self._fleet.snapshot(), num_tokens, story.failed_workers, full)
            decode = self._fleet.member(pair.decode.incarnation)
            prompt = Assigned(num_tokens, time.monotonic())
            attempt.assign(self._fleet.member(pair.prefill.incarnation), prompt)
            decode.subscribe(attempt.handoff_id, attempt.on_decode)
            try:
                reserved = await self._call_reserve(story, attempt, decode, trace)
            except BaseException as error:
                attempt.unassign()
                decode.unsubscribe(attempt.handoff_id)
                if not isinstance(error, Overloaded):
                    self._cancel(decode, attempt.handoff_id)  # it may hold blocks for us
                    story.failed_workers.add(pair.decode.incarnation)
                    raise
                full.add(pair.decode.incarnation)
                continue
            story.placed_at = story.placed_at or time.monotonic()
            return pair, reserved

    async def _call_reserve(
        self, story: Story, attempt: Attempt, decode: Member, trace: Context
    ) -> decode_pb2.ReserveResponse:
        request = decode_pb2.ReserveRequest(
            router_id=self._settings.router_id,
            sequence=story.spec(attempt.handoff_id),
            local_prefill_max_tokens=self._settings.local_prefill_max_tokens,
        )
        name, timeout_s = decode.record.incarnation, min(RESERVE_TIMEOUT_S, story.ask.time_left_s)
        try:
            with decode.calling():
                reserved: decode_pb2.ReserveResponse = await decode.decode.Reserve(
                    request, timeout=timeout_s, metadata=telemetry.inject(trace)
                )
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
        pair: Pair,
        reserved: decode_pb2.ReserveResponse,
        attempt: Attempt,
        trace: Context,
    ) -> None:
        """Runs the prompt on the prefill worker and feeds what it says into the attempt."""
        attempt.suspects = {pair.prefill.incarnation}
        member = self._fleet.member(pair.prefill.incarnation)
        spec = story.spec(attempt.handoff_id)
        request = prefill_pb2.PrefillRequest(
            sequence=spec,
            target=prefill_pb2.HandoffTarget(
                address=pair.decode.record.address,
                incarnation=reserved.incarnation,
                reservation_token=reserved.reservation_token,
                cached_tokens=reserved.cached_tokens,
                host_id=pair.decode.record.host_id,
            ),
        )
        member.subscribe(attempt.handoff_id, attempt.on_prefill_lost)
        try:
            with member.calling():
                call = member.prefill.Prefill(
                    request, timeout=story.ask.time_left_s, metadata=telemetry.inject(trace)
                )
                async for message in call:
                    if message.HasField("first_token"):
                        attempt.unassign()
                        attempt.suspects.add(pair.decode.incarnation)  # of a failed handoff
                    _note(story, message)
                    attempt.on_prefill(message)
        finally:
            member.unsubscribe(attempt.handoff_id)

    def _cancel(self, decode: Member, handoff_id: str) -> None:
        """Frees the sequence's blocks without making anybody wait for it."""
        task = asyncio.create_task(cancel_on(decode, handoff_id, CANCEL_TIMEOUT_S))
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)


def _note(story: Story, message: prefill_pb2.PrefillResponse) -> None:
    """Keeps what the caller will be told at the end."""
    if message.HasField("started"):
        if story.first_at is None:
            story.prefill_queue_ms += message.started.queue_ms
        story.cached_tokens = _first(story.cached_tokens, message.started.cached_tokens)
    elif message.HasField("committed"):
        story.transfer_bytes += message.committed.transfer_bytes
        story.transfer_ms += message.committed.transfer_ms
        story.route.transport = message.committed.transport


def _describe(span: Span, pair: Pair, reserved: decode_pb2.ReserveResponse, story: Story) -> None:
    prefill = "" if reserved.started else pair.prefill.incarnation
    story.route.prefill = prefill
    story.route.decode = pair.decode.incarnation
    span.set_attribute("baton.attempt", story.attempts)
    span.set_attribute("baton.prefill", prefill or "(decode prefills)")
    span.set_attribute("baton.decode", pair.decode.incarnation)
    span.set_attribute("baton.decode_cached_tokens", reserved.cached_tokens)


def _retryable(error: BatonError, story: Story) -> bool:
    """Whether another attempt may succeed. A limit of a call or a worker is not the deadline."""
    if isinstance(error, DeadlineExceeded):
        return story.ask.time_left_s > 0
    return isinstance(error, _PLACE_ELSEWHERE)


def _first(known: int | None, value: int) -> int:
    """The first attempt's figure stands."""
    return value if known is None else known


def _backoff_s(attempt: int) -> float:
    longest: float = min(_BACKOFF_S[1], _BACKOFF_S[0] * 4 ** (attempt - 1))
    return longest * random.uniform(0.5, 1.0)  # noqa: S311 - jitter
