"""Runs one request on a pair of workers: place, reserve, prefill, hand over, decode.

    decode.Reserve -> prefill.Prefill -> first token -> (blocks, Commit) -> decode's events

`failover` repeats that on other workers if it fails. Read this file after `router.request`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Set
from functools import partial

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Tracer

from baton.config import RouterLimits
from baton.errors import BatonError, DeadlineExceeded, Overloaded, Unavailable
from baton.telemetry import propagation, tracing
from baton.v1 import common_pb2, decode_pb2, prefill_pb2
from router.dispatch.attempt import Attempt, Deliver
from router.dispatch.attempt_spans import describe_attempt, describe_place
from router.dispatch.failover import RoleMissing, run_with_failover
from router.fleet.fleet import Fleet
from router.fleet.kv_index import AssignedPrompt
from router.fleet.member import Event, Member
from router.fleet.snapshot import Snapshot
from router.placement import room, scoring
from router.placement.cost_model import Estimate
from router.placement.scoring import Pair
from router.queueing.wait_queue import NoWorker, WaitQueue
from router.request import Demand, RequestState
from router.telemetry.stats import RouterStats

RESERVE_TIMEOUT_S = 5.0

# A pair, and its decode worker with the blocks it reserved; None if nothing is to be decoded.
_Placed = tuple[Pair, Member | None, decode_pb2.ReserveResponse]


class Dispatch:
    """Runs requests over a fleet; the only state that outlives them is the router's `stats`."""

    def __init__(
        self,
        fleet: Fleet,
        wait_queue: WaitQueue,
        limits: RouterLimits,
        tracer: Tracer,
        stats: RouterStats,
    ) -> None:
        self._fleet = fleet
        self._wait_queue = wait_queue
        self._limits = limits
        self._max_itl_s = limits.max_itl_s  # parsed from SLOs: once
        self._tracer = tracer
        self.stats = stats

    async def run(self, state: RequestState, parent: Context, deliver: Deliver) -> None:
        """Gives the request's tokens to `deliver`, each once, in order; returns after the last.

        `deliver` adds delivered tokens to `state.delivered`. Raises the last attempt's error.
        """
        attempt = partial(self._attempt, state, parent, deliver)
        max_attempts = self._limits.max_attempts
        await run_with_failover(state, attempt, max_attempts, self.stats, self._tracer, parent)

    def demand(self, state: RequestState) -> Demand:
        """What the request's next attempt needs, by this router's settings."""
        return state.demand(self._limits.local_prefill_max_tokens, self._max_itl_s)

    async def _attempt(self, state: RequestState, parent: Context, deliver: Deliver) -> None:
        handoff_id = f"{state.request.request_id}-{state.attempts}"
        with tracing.span(self._tracer, "router.attempt", parent) as span:
            trace = tracing.context_of(span)
            attempt = Attempt(handoff_id, deliver)
            state.prompt_logprobs = attempt.prompt_logprobs
            pair, decode, reserved = await self._reserve(state, attempt, trace)
            attempt.on_decoding = partial(self._on_decoding, pair.decode.incarnation)
            state.route = common_pb2.Route(
                prefill="" if reserved.started else pair.prefill.incarnation,
                decode=pair.decode.incarnation if state.decodes else "",
            )
            describe_attempt(span, pair, reserved, state)
            streams_ns = time.time_ns() if reserved.started else 0
            prefill: Member | None = None
            try:
                if reserved.started:
                    if not pair.decode_prefills:
                        self._unassign(attempt)
                    attempt.first_token_seen()
                    state.record_cached(reserved.cached_tokens)
                else:
                    attempt.suspects = {pair.prefill.incarnation}  # it may have left
                    self._assign(attempt, pair.on_prefill, pair)
                    prefill = self._fleet.member(pair.prefill.incarnation)
                    self._prefill(state, pair, prefill, reserved, attempt, trace)
                await attempt.finished()
                state.pooled = attempt.pooled
            except BatonError as error:
                state.failed_workers |= self._fleet.breakers.failed_attempt(
                    pair.names, attempt.suspects, error
                )
                raise
            finally:
                # Recorded here, too, as the workers' spans are lost if they die.
                if streams_ns := streams_ns or attempt.first_output_ns:
                    attributes = {}
                    if attempt.first_output_ns and (last_at := state.last_at):
                        last_ns = time.time_ns() - int((time.monotonic() - last_at) * 1e9)
                        attributes["baton.last_token_ms"] = max(0, last_ns - streams_ns) / 1e6
                    tracing.record(
                        self._tracer, "router.stream", trace, streams_ns, None, attributes
                    )
                attempt.unassign()
                if decode is not None:
                    decode.unsubscribe(handoff_id)
                try:
                    await attempt.acknowledged()
                finally:
                    if prefill is not None:
                        prefill.unsubscribe(handoff_id)
                        if attempt.prefilling:
                            prefill.cancel(handoff_id)
                            attempt.prefill_ended()
                    if decode is not None and not attempt.finished_on_decode:
                        decode.cancel(handoff_id)
                    self._fleet.announce()  # the workers' reports may have come before its end

    async def _reserve(self, state: RequestState, attempt: Attempt, trace: Context) -> _Placed:
        """Reserves blocks on the best decode worker; waits for room until the deadline.

        It waits in the wait queue, as workers would be overloaded if all tried at each change, and
        for a missing role `recovery_s` at most. Raises ModelNotFound once its adapter is unloaded.
        """
        demand, missing = self.demand(state), ""
        loop = asyncio.get_running_loop()

        def reserve_workers(reserved: frozenset[str]) -> frozenset[str] | None:
            snapshot = self._fleet.snapshot().holding(state.request.adapter)
            return room.soonest_room(snapshot, demand, reserved)

        def pick(full: Set[str]) -> Pair:
            nonlocal missing
            began = time.perf_counter()
            full = full | self._wait_queue.reserved_for_others(demand.pending)
            try:
                snapshot = self._fleet.snapshot().holding(state.request.adapter)
                if state.request.workers:
                    return _pick_among(snapshot.only(state.request.workers), demand, full)
                missing = snapshot.why_unserved(state.decodes)
                if not missing:
                    if limit.when() is not None:
                        limit.reschedule(None)
                    return scoring.pick(snapshot, demand, state.failed_workers, full)
                self._fleet.snapshot().check_adapter(state.request.adapter, state.decodes)
            finally:
                self.stats.on_placed(time.perf_counter() - began)
            if limit.when() is None:
                limit.reschedule(loop.time() + self._limits.recovery_s)
            raise NoWorker(missing, room.RETRY_AFTER_S)

        async def place_once() -> _Placed:
            attempt.tries, refusals = attempt.tries + 1, attempt.refusals
            try:
                return await self._place_once(state, attempt, pick, trace)
            except Overloaded as error:
                if attempt.refusals == refusals:  # else the worker's own reason says more
                    attempt.last_refusal = str(error)
                raise

        with tracing.span(self._tracer, "router.place", trace) as span:
            depth = self._wait_queue.depth
            try:
                async with asyncio.timeout(None) as limit:
                    return await self._wait_queue.place(
                        demand,
                        place_once,
                        reserve_workers,
                        accepted=state.request.accepted or state.attempts > 1,  # has waited
                    )
            except DeadlineExceeded:  # a TimeoutError, too
                raise
            except TimeoutError:
                raise RoleMissing(missing, room.RETRY_AFTER_S) from None
            finally:
                describe_place(span, attempt, depth)

    async def _place_once(
        self,
        state: RequestState,
        attempt: Attempt,
        pick: Callable[[Set[str]], Pair],
        trace: Context,
    ) -> _Placed:
        """Tries the decode workers that seem to have room, best first; Overloaded if none has."""
        full: set[str] = set()
        while True:
            pair = pick(full)
            if not state.decodes:
                self._assign(attempt, pair.on_prefill, pair)
                state.placed_at = state.placed_at or time.monotonic()
                return pair, None, decode_pb2.ReserveResponse()
            decode = self._fleet.member(pair.decode.incarnation)
            self._assign(attempt, pair.on_decode if pair.decode_prefills else pair.on_prefill, pair)
            decode.subscribe(attempt.handoff_id, attempt.on_decode)
            try:
                reserved = await self._call_reserve(state, attempt, pair, decode, trace)
            except BaseException as error:
                attempt.unassign()
                decode.unsubscribe(attempt.handoff_id)
                if isinstance(error, Overloaded):  # a refusal is an answer
                    attempt.refusals, attempt.last_refusal = attempt.refusals + 1, str(error)
                    self._fleet.breakers.succeeded(pair.decode.incarnation)
                else:
                    decode.cancel(attempt.handoff_id)  # it may have reserved blocks
                    self._fleet.announce()  # others wait for what it counted against its workers
                    if isinstance(error, BatonError):
                        state.failed_workers |= self._fleet.breakers.failed_attempt(
                            pair.names, attempt.suspects, error
                        )
                    raise
                full.add(pair.decode.incarnation)
                continue
            state.placed_at = state.placed_at or time.monotonic()
            return pair, decode, reserved

    def _assign(self, attempt: Attempt, by: Estimate, pair: Pair) -> None:
        demand, member = pair.demand, self._fleet.member(by.worker.incarnation)
        finish = demand.pending.virtual_finish
        prompt = AssignedPrompt(by.uncached, finish, demand.token_ids, demand.cache_salt)
        attempt.assign(member, prompt)

    def _unassign(self, attempt: Attempt) -> None:
        """The prompt is computed: those that wait may have room, before a worker reports again."""
        attempt.unassign()
        self._fleet.announce()

    def _on_decoding(self, name: str) -> None:
        self._fleet.breakers.succeeded(name)
        self._fleet.announce()

    async def _call_reserve(
        self, state: RequestState, attempt: Attempt, pair: Pair, decode: Member, trace: Context
    ) -> decode_pb2.ReserveResponse:
        name = decode.record.incarnation
        timeout_s = min(RESERVE_TIMEOUT_S, state.request.time_left_s)
        self._fleet.breakers.sent(name)
        state.workers.add(name)
        attempt.spec = state.spec(attempt.handoff_id)
        decode.outgoing.reserve.add(
            sequence=attempt.spec,
            local_prefill_max_tokens=pair.local_prefill_max_tokens,
            trace=dict(propagation.inject(trace)),
            stream_interval=state.request.stream_interval,
        )
        try:
            return await attempt.reserved(timeout_s)
        except DeadlineExceeded:
            raise  # the worker's own error
        except TimeoutError as error:
            if timeout_s < RESERVE_TIMEOUT_S:  # the caller's own deadline
                raise DeadlineExceeded("the deadline passed during a reservation") from error
            raise Unavailable(f"decode worker {name} did not answer in {timeout_s} s") from error

    def _prefill(
        self,
        state: RequestState,
        pair: Pair,
        member: Member,
        reserved: decode_pb2.ReserveResponse,
        attempt: Attempt,
        trace: Context,
    ) -> None:
        """Sends the prompt to the prefill worker; its messages go to the attempt."""
        name, breakers = pair.prefill.incarnation, self._fleet.breakers

        def on_event(event: Event) -> None:
            if isinstance(event, prefill_pb2.PrefillResponse):
                if event.HasField("first_token"):
                    self._unassign(attempt)
                    if state.decodes:
                        attempt.suspects.add(pair.decode.incarnation)  # if the handoff fails
                    breakers.succeeded(name)
                elif event.HasField("committed"):
                    breakers.succeeded(pair.names)
                state.record_prefill(event)
            attempt.on_prefill(event)

        breakers.sent(name)
        state.workers.add(name)
        if attempt.spec is None:  # no decode worker was asked
            attempt.spec = state.spec(attempt.handoff_id)
        else:
            state.set_times(attempt.spec)
        target = None
        if state.decodes:
            breakers.sent(pair.names)
            target = prefill_pb2.HandoffTarget(
                incarnation=pair.decode.incarnation,
                reservation_token=reserved.reservation_token,
                cached_tokens=reserved.cached_tokens,
            )
        member.outgoing.prefill.add(
            sequence=attempt.spec,
            target=target,
            trace=dict(propagation.inject(trace)),
        )
        span = self._tracer.start_span("router.prefill", trace, SpanKind.CLIENT)
        attempt.prefill_sent(span)
        member.subscribe(attempt.handoff_id, on_event)


def _pick_among(snapshot: Snapshot, demand: Demand, full: Set[str]) -> Pair:
    """Picks among the workers that a request names. Raises Unavailable.

    It does not wait for them, as other requests would wait behind it.
    """
    try:
        return scoring.pick(snapshot, demand, full=full)
    except (Overloaded, Unavailable) as error:
        text = f"of the workers that the request names: {error}"
        raise Unavailable(text, room.RETRY_AFTER_S) from error
