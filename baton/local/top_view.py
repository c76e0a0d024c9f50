"""What `baton top` shows: routers polled for their status, joined, with rates over a window.

`view_of` is pure. Routers may disagree about a worker: the worst state counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from baton import rpc
from baton.errors import BatonError
from baton.v1 import common_pb2, fleet_pb2, fleet_pb2_grpc, worker_pb2

_WINDOW_S = 5.0  # rates over less jump, over more lag behind
_MIN_SAMPLES = 3  # that a window holds, however long the interval
_MIN_TIMEOUT_S = 1.0
_READY = "READY"


class Sample(NamedTuple):
    """A router's answer, and when it came (time.monotonic)."""

    at: float
    status: fleet_pb2.GetStatusResponse


class PolledRouter:
    """One router: its answers of the last seconds, and why it does not answer now."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.failure = ""  # empty when it answers
        self.polls = 0
        self._samples: deque[Sample] = deque()

    @property
    def first(self) -> Sample | None:
        """The oldest answer, from which rates are computed."""
        return self._samples[0] if self._samples else None

    @property
    def last(self) -> Sample | None:
        """The newest answer."""
        return self._samples[-1] if self._samples else None

    @property
    def window_s(self) -> float | None:
        """Between the two; None when that is no time, or the router does not answer."""
        if self.failure or len(self._samples) < 2:
            return None
        return (self._samples[-1].at - self._samples[0].at) or None

    async def poll(self, interval_s: float, on_answer: Callable[[], None]) -> None:
        """Polls every interval until cancelled; `on_answer` follows each answer and failure."""
        timeout_s = max(_MIN_TIMEOUT_S, interval_s)
        async with rpc.channel(self.address) as channel:
            stub = fleet_pb2_grpc.FleetServiceStub(channel)
            while True:
                began = time.monotonic()
                try:
                    with rpc.translated():
                        request = fleet_pb2.GetStatusRequest()
                        status = await stub.GetStatus(request, timeout=timeout_s)
                    self.take(Sample(time.monotonic(), status))
                except BatonError as error:
                    self.failure = str(error) or type(error).__name__
                self.polls += 1
                on_answer()
                await asyncio.sleep(began + interval_s - time.monotonic())

    def take(self, sample: Sample) -> None:
        """Adds an answer and forgets those that are too old, or of another process."""
        self.failure = ""
        samples, process = self._samples, sample.status.router.incarnation
        if samples and samples[-1].status.router.incarnation != process:
            samples.clear()
        samples.append(sample)
        while len(samples) > _MIN_SAMPLES and sample.at - samples[1].at >= _WINDOW_S:
            samples.popleft()


@contextlib.asynccontextmanager
async def polling(
    addresses: Sequence[str], interval_s: float, on_answer: Callable[[], None]
) -> AsyncIterator[Sequence[PolledRouter]]:
    """Routers that are polled until the block is left."""
    routers = [PolledRouter(address) for address in addresses]
    tasks = [asyncio.create_task(router.poll(interval_s, on_answer)) for router in routers]
    try:
        yield routers
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True)
class RouterLine:
    """One router. Rates are None until there are two answers."""

    address: str
    failure: str  # why it does not answer; the rest is what was known last
    silent_s: float = 0.0  # since it answered
    status: fleet_pb2.RouterStatus | None = None
    requests_per_s: float | None = None  # that ended
    good_per_s: float | None = None  # that ended well and in time: goodput
    prompt_tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None

    @property
    def good_share(self) -> float | None:
        """Of all requests since it started, those that are goodput; None when there were none."""
        if self.status is None or not (total := sum(self.status.counts.ended.values())):
            return None
        return _good(self.status.counts) / total


@dataclass(frozen=True)
class WorkerLine:
    """One worker."""

    record: common_pb2.WorkerRecord
    load: worker_pb2.Load
    state: str
    reason: str
    computed_per_s: float | None = None  # tokens, of prompts and outputs
    sampled_per_s: float | None = None

    @property
    def role(self) -> str:
        """ "prefill" or "decode"."""
        is_prefill = self.record.role == common_pb2.WORKER_ROLE_PREFILL
        return "prefill" if is_prefill else "decode"

    @property
    def blocks_total(self) -> int:
        """A worker that has not reported its load yet has registered its pool's size."""
        return self.load.blocks_total or self.record.blocks_total


@dataclass(frozen=True)
class PairLine:
    """One pair of workers."""

    status: worker_pb2.PairStatus
    bytes_per_s: float | None = None  # over all the time
    wire_bytes_per_s: float | None = None  # while something was sent; None when nothing was


class EventLine(NamedTuple):
    """A failure at one router."""

    address: str
    event: fleet_pb2.RouterEvent


@dataclass(frozen=True)
class View:
    """One moment."""

    routers: tuple[RouterLine, ...]
    workers: tuple[WorkerLine, ...]
    pairs: tuple[PairLine, ...]
    events: tuple[EventLine, ...]  # the newest first
    unix_s: float  # when it was

    @property
    def answered(self) -> bool:
        """Whether any router ever did."""
        return any(router.status is not None for router in self.routers)

    @property
    def is_old(self) -> bool:
        """Whether no router answers now."""
        return all(router.failure for router in self.routers)


def view_of(routers: Sequence[PolledRouter], now: float, unix_s: float) -> View:
    """The view at `now` (time.monotonic), which is `unix_s` (time.time)."""
    known = [(router, router.last.status) for router in routers if router.last is not None]
    events = [
        EventLine(router.address, event) for router, seen in known for event in seen.router.events
    ]
    events.sort(key=lambda line: line.event.time_ms, reverse=True)
    # Workers that a silent router knew are shown only if none answers.
    answering = [(router, seen) for router, seen in known if not router.failure] or known
    return View(
        routers=tuple(_router(router, now) for router in routers),
        workers=tuple(_workers(answering)),
        pairs=tuple(_pairs(answering)),
        events=tuple(events),
        unix_s=unix_s,
    )


_Answers = Iterable[tuple[PolledRouter, fleet_pb2.GetStatusResponse]]


def _router(router: PolledRouter, now: float) -> RouterLine:
    first, last = router.first, router.last
    if first is None or last is None:
        return RouterLine(router.address, router.failure)
    line = RouterLine(router.address, router.failure, now - last.at, last.status.router)
    if (seconds := router.window_s) is None:
        return line
    new, old = last.status.router.counts, first.status.router.counts
    return replace(
        line,
        requests_per_s=(sum(new.ended.values()) - sum(old.ended.values())) / seconds,
        good_per_s=(_good(new) - _good(old)) / seconds,
        prompt_tokens_per_s=(new.prompt_tokens - old.prompt_tokens) / seconds,
        output_tokens_per_s=(new.output_tokens - old.output_tokens) / seconds,
    )


def _workers(answers: _Answers) -> list[WorkerLine]:
    """Each worker once, prefill before decode."""
    seen: dict[str, list[tuple[PolledRouter, fleet_pb2.WorkerStatus]]] = {}
    for router, status in answers:
        for worker in status.workers:
            seen.setdefault(worker.record.incarnation, []).append((router, worker))
    lines = [_worker(reports) for reports in seen.values()]
    return sorted(lines, key=lambda line: (line.record.role, line.record.incarnation))


def _worker(reports: Sequence[tuple[PolledRouter, fleet_pb2.WorkerStatus]]) -> WorkerLine:
    # The router that has its newest report has the newest load.
    router, worker = max(reports, key=lambda report: report[1].load.steps)
    state, reason = worker.state, worker.reason
    not_ready = [(other, status) for other, status in reports if status.state != _READY]
    if not_ready:
        other, status = not_ready[0]
        state, reason = status.state, status.reason
        if len(not_ready) < len(reports):
            reason += f" (says {other.address})"
    line = WorkerLine(worker.record, worker.load, state, reason)
    known = router.first.status.workers if router.first else ()
    old = [w.load for w in known if w.record.incarnation == worker.record.incarnation]
    if not old or (seconds := router.window_s) is None:
        return line
    return replace(
        line,
        computed_per_s=(worker.load.tokens_computed - old[0].tokens_computed) / seconds,
        sampled_per_s=(worker.load.tokens_generated - old[0].tokens_generated) / seconds,
    )


def _pairs(answers: _Answers) -> Iterator[PairLine]:
    """Each pair once; a router's own state (EJECTED) before the workers' own."""
    seen: dict[tuple[str, str], tuple[PolledRouter, worker_pb2.PairStatus]] = {}
    for router, status in answers:
        for pair in status.pairs:
            key = (pair.prefill, pair.decode)
            if key not in seen or pair.state != "OPEN":
                seen[key] = (router, pair)
    for _, (router, pair) in sorted(seen.items()):
        if router.first is None or (seconds := router.window_s) is None:
            yield PairLine(pair)
            continue
        link = (pair.prefill, pair.decode, pair.epoch)
        known = (
            old for old in router.first.status.pairs if (old.prefill, old.decode, old.epoch) == link
        )
        before = next(known, worker_pb2.PairStatus())  # a new link began at 0
        sent_bytes, sent_ms = pair.sent_bytes - before.sent_bytes, pair.sent_ms - before.sent_ms
        wire = sent_bytes / (sent_ms / 1e3) if sent_ms > 0 else None
        yield PairLine(pair, sent_bytes / seconds, wire)


def _good(counts: fleet_pb2.RouterCounts) -> int:
    ended: int = counts.ended.get("OK", 0)
    return ended - counts.late
