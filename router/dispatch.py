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

from baton import rpc, telemetry
from baton.errors import (
    BatonError,
    InternalError,
    Overloaded,
    RetryableError,
    Stale,
    TransferFailed,
)
from baton.v1 import decode_pb2, prefill_pb2
from router import placement
from router.attempt import Attempt, Output
from router.fleet import Fleet
from router.member import Member, cancel_on
from router.placement import Pair
from router.story import Story

log = logging.getLogger(__name__)

RESERVE_TIMEOUT_S = 5.0
CANCEL_TIMEOUT_S = 2.0
_BACKOFF_S = (0.02, 1.0)
_PLACE_ELSEWHERE = (RetryableError, TransferFailed, Stale, InternalError)


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
            except _PLACE_ELSEWHERE as error:
                if story.attempts >= self._settings.max_attempts:
                    raise
                log.warning("request %s: attempt %d failed, placing it elsewhere: %s",
                            story.ask.request_id, story.attempts, error)  # fmt: skip
            await asyncio.sleep(_backoff_s(story.attempts))

    async def close(self) -> None:
        """Waits for the cancellations that are still under way."""
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
                    attempt.first_token_seen()
                    story.cached_tokens = _first(story.cached_tokens, reserved.cached_tokens)
                else:
                    attempt.follow(self._prefill(story, pair, reserved, attempt, trace))
                async for output in attempt.outputs():
                    yield output
            except BatonError:
                story.failed_workers.add(attempt.suspect or pair.decode.incarnation)
                raise
            finally:
                decode.unsubscribe(handoff_id)
                await attempt.close()
                if not attempt.finished_on_decode:
                    self._cancel(decode, handoff_id)

    async def _reserve(
        self, story: Story, attempt: Attempt, trace: Context
    ) -> tuple[Pair, decode_pb2.ReserveResponse]:
        """Blocks on the best decode worker; waits for room as long as the deadline allows."""
        full: set[str] = set()
        self.queued += 1
        try:
            with telemetry.span(self._tracer, "router.place", trace):
                while True:
                    news = asyncio.ensure_future(self._fleet.changed())
                    try:
                        return await self._place_once(story, attempt, full, trace)
                    except Overloaded:
                        await news
                        full.clear()
                    finally:
                        news.cancel()
        finally:
            self.queued -= 1

    async def _place_once(
        self, story: Story, attempt: Attempt, full: set[str], trace: Context
    ) -> tuple[Pair, decode_pb2.ReserveResponse]:
        """One pass over the decode workers that seem to have room; Overloaded when none has."""
        num_tokens = len(story.ask.prompt) + len(story.delivered)
        while True:
            pair = placement.pick(self._fleet.snapshot(), num_tokens, story.failed_workers | full)
            decode = self._fleet.member(pair.decode.incarnation)
            if pair.decode.incarnation in full:
                raise Overloaded("every decode worker refused", placement.RETRY_AFTER_S)
            decode.subscribe(attempt.handoff_id, attempt.on_decode)
            try:
                reserved = await self._call_reserve(story, attempt, decode, trace)
            except BaseException as error:
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
        timeout = min(RESERVE_TIMEOUT_S, story.ask.time_left_s)
        with rpc.translated():
            reserved: decode_pb2.ReserveResponse = await decode.decode.Reserve(
                request, timeout=timeout, metadata=telemetry.inject(trace)
            )
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
        member = self._fleet.member(pair.prefill.incarnation)
        attempt.suspect = pair.prefill.incarnation
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
        waiting = len(spec.token_ids)
        member.assigned_tokens += waiting
        try:
            with rpc.translated():
                call = member.prefill.Prefill(
                    request, timeout=story.ask.time_left_s, metadata=telemetry.inject(trace)
                )
                async for message in call:
                    if message.HasField("first_token"):
                        member.assigned_tokens -= waiting
                        waiting = 0
                    _note(story, message)
                    attempt.on_prefill(message)
        finally:
            member.assigned_tokens -= waiting

    def _cancel(self, decode: Member, handoff_id: str) -> None:
        """Frees the sequence's blocks without making anybody wait for it."""
        task = asyncio.create_task(cancel_on(decode, handoff_id, CANCEL_TIMEOUT_S))
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)


def _note(story: Story, message: prefill_pb2.PrefillResponse) -> None:
    """Keeps what the caller will be told at the end."""
    if message.HasField("started"):
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


def _first(known: int | None, value: int) -> int:
    """The first attempt's figure stands."""
    return value if known is None else known


def _backoff_s(attempt: int) -> float:
    longest: float = min(_BACKOFF_S[1], _BACKOFF_S[0] * 4 ** (attempt - 1))
    return longest * random.uniform(0.5, 1.0)  # noqa: S311 - jitter
