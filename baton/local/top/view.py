"""What `baton top` shows: the routers' answers joined, and rates between an older and the newest.

Pure: answers in, plain values out. Routers may disagree about a worker: the worst word counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from baton.local.top.poll import Sample, Watched
from baton.v1 import common_pb2, fleet_pb2, worker_pb2

_READY = "READY"


@dataclass(frozen=True)
class RouterLine:
    """One router."""

    address: str
    failure: str  # why it does not answer; the rest is what was known last
    silent_s: float  # since it answered
    status: fleet_pb2.RouterStatus | None
    requests_per_s: float | None = None  # that ended; None until there are two answers
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
    generated_per_s: float | None = None

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


@dataclass(frozen=True)
class EventLine:
    """Something that went wrong, at one router."""

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
    def answering(self) -> bool:
        """Whether one does now: then what is shown is not old."""
        return any(not router.failure for router in self.routers)


def view_of(watched: Sequence[Watched], now: float, unix_s: float) -> View:
    """The view at `now` (time.monotonic), which is `unix_s` (time.time)."""
    known = [router for router in watched if router.last is not None]
    # Of a router that does not answer, workers are shown only if none does.
    asked = [router for router in known if not router.failure] or known
    events = [
        EventLine(router.address, event)
        for router in known
        for event in _status(router).router.events
    ]
    events.sort(key=lambda line: line.event.time_ms, reverse=True)
    return View(
        routers=tuple(_router(router, now) for router in watched),
        workers=tuple(_workers(asked)),
        pairs=tuple(_pairs(asked)),
        events=tuple(events),
        unix_s=unix_s,
    )


def _status(router: Watched) -> fleet_pb2.GetStatusResponse:
    assert router.last is not None
    return router.last.status


def _router(router: Watched, now: float) -> RouterLine:
    last, first = router.last, router.first
    if last is None:
        return RouterLine(router.address, router.failure, 0.0, None)
    status = last.status.router
    line = RouterLine(router.address, router.failure, now - last.at, status)
    if first is None or router.failure or (seconds := _seconds(first, last)) is None:
        return line
    new, old = status.counts, first.status.router.counts
    return RouterLine(
        router.address,
        router.failure,
        now - last.at,
        status,
        requests_per_s=(sum(new.ended.values()) - sum(old.ended.values())) / seconds,
        good_per_s=(_good(new) - _good(old)) / seconds,
        prompt_tokens_per_s=(new.prompt_tokens - old.prompt_tokens) / seconds,
        output_tokens_per_s=(new.output_tokens - old.output_tokens) / seconds,
    )


def _workers(asked: Sequence[Watched]) -> Iterator[WorkerLine]:
    """Each worker once, prefill before decode."""
    seen: dict[str, list[tuple[Watched, fleet_pb2.WorkerStatus]]] = {}
    for router in asked:
        for worker in _status(router).workers:
            seen.setdefault(worker.record.incarnation, []).append((router, worker))
    lines = [_worker(views) for views in seen.values()]
    yield from sorted(lines, key=lambda line: (line.record.role, line.record.incarnation))


def _worker(views: Sequence[tuple[Watched, fleet_pb2.WorkerStatus]]) -> WorkerLine:
    # The router that heard of it last has the newest load.
    router, worker = max(views, key=lambda seen: seen[1].load.steps)
    unhappy = [(where, seen) for where, seen in views if seen.state != _READY]
    state, reason = worker.state, worker.reason
    if unhappy:
        where, seen = unhappy[0]
        state, reason = seen.state, seen.reason
        if len(unhappy) < len(views):
            reason += f" (says {where.address})"
    old = _older(router, worker.record.incarnation)
    seconds = _seconds(router.first, router.last)
    if old is None or seconds is None or router.failure:
        return WorkerLine(worker.record, worker.load, state, reason)
    computed = worker.load.tokens_computed - old.tokens_computed
    generated = worker.load.tokens_generated - old.tokens_generated
    return WorkerLine(
        worker.record, worker.load, state, reason, computed / seconds, generated / seconds
    )


def _older(router: Watched, incarnation: str) -> worker_pb2.Load | None:
    if router.first is None:
        return None
    workers = router.first.status.workers
    return next((w.load for w in workers if w.record.incarnation == incarnation), None)


def _pairs(asked: Iterable[Watched]) -> Iterator[PairLine]:
    """Each pair once; a router's own word (EJECTED) before the workers' own."""
    seen: dict[tuple[str, str], tuple[Watched, worker_pb2.PairStatus]] = {}
    for router in asked:
        for pair in _status(router).pairs:
            key = (pair.prefill, pair.decode)
            if key not in seen or pair.state != "OPEN":
                seen[key] = (router, pair)
    for _, (router, pair) in sorted(seen.items()):
        yield _pair(router, pair)


def _pair(router: Watched, pair: worker_pb2.PairStatus) -> PairLine:
    seconds = _seconds(router.first, router.last)
    if router.first is None or seconds is None or router.failure:
        return PairLine(pair)
    before = _same_link(router.first.status.pairs, pair)
    sent_bytes, sent_ms = pair.sent_bytes - before.sent_bytes, pair.sent_ms - before.sent_ms
    wire = sent_bytes / (sent_ms / 1e3) if sent_ms > 0 else None
    return PairLine(pair, sent_bytes / seconds, wire)


def _same_link(
    pairs: Iterable[worker_pb2.PairStatus], pair: worker_pb2.PairStatus
) -> worker_pb2.PairStatus:
    """The link as it was; a new one began at 0."""
    key = (pair.prefill, pair.decode, pair.epoch)
    found = (old for old in pairs if (old.prefill, old.decode, old.epoch) == key)
    return next(found, worker_pb2.PairStatus())


def _seconds(first: Sample | None, last: Sample | None) -> float | None:
    """Between them; None when that is no time."""
    if first is None or last is None or last.at <= first.at:
        return None
    return last.at - first.at


def _good(counts: fleet_pb2.RouterCounts) -> int:
    ended: Mapping[str, int] = counts.ended
    return ended.get("OK", 0) - counts.late
