"""The data of `baton top`: polled routers, and the workers and pairs they report.

Counts become rates over the last seconds. If routers disagree about a worker, its worst state is
shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import NamedTuple

from baton.config import shown_name
from baton.errors import BatonError
from baton.net import rpc
from baton.net.tasks import cancelled
from baton.registry.membership import ROLES
from baton.v1 import fleet_pb2, fleet_pb2_grpc, worker_pb2

_WINDOW_S = 5.0  # shorter windows make rates jump, longer ones lag
_MIN_SAMPLES = 3  # fewest samples of a window, for long intervals
_MIN_TIMEOUT_S = 1.0

Status = fleet_pb2.GetStatusResponse


class PolledRouter:
    """A router with its answers of the last seconds, and the cause if it does not answer.

    If it has several processes, one answers and reports its siblings.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.siblings: dict[str, PolledRouter] = {}  # by incarnation
        self.failure = ""  # empty when it answers
        self.polls = 0
        self.samples: deque[tuple[float, Status]] = deque()  # (time.monotonic(), answer)

    @property
    def last(self) -> Status | None:
        return self.samples[-1][1] if self.samples else None

    @property
    def name(self) -> str:
        """Its address, with the process if it has several."""
        if self.last is None or not self.siblings:
            return self.address
        return f"{self.address} {self.last.router.incarnation}"

    def rate(self, read: Callable[[Status], float | None]) -> float | None:
        """Growth of a count per second; None if unknown.

        `read` returns the count in an answer, or None.
        """
        if self.failure or len(self.samples) < 2:
            return None
        (began, old), (ended, new) = self.samples[0], self.samples[-1]
        before, after = read(old), read(new)
        return None if before is None or after is None else (after - before) / (ended - began)

    async def poll(
        self, interval_s: float, api_key: str | None, on_answer: Callable[[], None]
    ) -> None:
        """Polls every interval until cancelled; calls `on_answer` after each answer and failure."""
        async with rpc.channel(self.address) as channel:
            stub = fleet_pb2_grpc.FleetServiceStub(channel)
            while True:
                began = time.monotonic()
                try:
                    with rpc.translated():
                        timeout_s = max(_MIN_TIMEOUT_S, interval_s)
                        request = fleet_pb2.GetStatusRequest()
                        more = {"timeout": timeout_s, "metadata": rpc.bearer(api_key)}
                        self.take(await stub.GetStatus(request, **more))
                except BatonError as error:
                    self.failure = str(error) or type(error).__name__
                self.polls += 1
                on_answer()
                await asyncio.sleep(began + interval_s - time.monotonic())

    def take(self, status: Status, at: float | None = None) -> None:
        """Adds an answer and drops those that are too old or from another process."""
        at = time.monotonic() if at is None else at
        self.failure = ""
        if self.last and self.last.router.incarnation != status.router.incarnation:
            self.samples.clear()
        self.samples.append((at, status))
        before, self.siblings = self.siblings, {}
        for other in status.siblings:
            name = f"{self.address} {other.incarnation}"
            sibling = self.siblings[name] = before.get(name) or PolledRouter(name)
            sibling.take(Status(router=other), at)
        while len(self.samples) > _MIN_SAMPLES and at - self.samples[1][0] >= _WINDOW_S:
            self.samples.popleft()


@contextlib.asynccontextmanager
async def polling(
    addresses: Sequence[str], interval_s: float, api_key: str | None, on_answer: Callable[[], None]
) -> AsyncIterator[Sequence[PolledRouter]]:
    """Polls routers while the block runs."""
    routers = [PolledRouter(address) for address in addresses]
    polls = [router.poll(interval_s, api_key, on_answer) for router in routers]
    tasks = [asyncio.create_task(poll) for poll in polls]
    try:
        yield routers
    finally:
        await cancelled(*tasks)


def good(status: Status) -> int:
    """Number of requests that succeeded and met their targets: goodput."""
    return int(status.router.counts.ended.get("OK", 0) - status.router.counts.late)


def ended(status: Status) -> int:
    """Number of requests that ended, successfully or not."""
    return sum(status.router.counts.ended.values())


def processes(routers: Sequence[PolledRouter]) -> Iterator[PolledRouter]:
    """Routers and their siblings, in an order that does not depend on which process answers."""
    for router in routers:
        others = () if router.failure else router.siblings.values()
        yield from sorted((router, *others), key=lambda one: one.name)


class WorkerLine(NamedTuple):
    """A worker, by the router with its newest report; its state is the worst of all routers'."""

    router: PolledRouter
    status: fleet_pb2.WorkerStatus
    state: str
    reason: str

    @property
    def name(self) -> str:
        return self.status.record.incarnation

    @property
    def model(self) -> str:
        return shown_name(self.status.record.model, self.status.record.version)

    @property
    def role(self) -> str:
        return ROLES.get(self.status.record.role, "decode")

    @property
    def load(self) -> worker_pb2.Load:
        return self.status.load

    @property
    def blocks_total(self) -> int:
        """Pool size as reported, or as registered before the first report."""
        return self.load.blocks_total or self.status.record.blocks_total

    def rate(self, count: str) -> float | None:
        """Growth of a count of its load per second."""

        def read(status: Status) -> float | None:
            mine = (w.load for w in status.workers if w.record.incarnation == self.name)
            return next((getattr(load, count) for load in mine), None)

        return self.router.rate(read)


class PairLine(NamedTuple):
    """A pair of workers."""

    router: PolledRouter
    status: worker_pb2.PairStatus

    def rate(self, count: str) -> float | None:
        """Growth of a count of its link per second; a new link starts at 0."""
        mine = (self.status.prefill, self.status.decode, self.status.epoch)

        def read(status: Status) -> float:
            links = (p for p in status.pairs if (p.prefill, p.decode, p.epoch) == mine)
            return next((getattr(pair, count) for pair in links), 0)

        return self.router.rate(read)

    @property
    def wire_gb_per_s(self) -> float | None:
        """Speed while sending; None if nothing was sent."""
        sent, ms = self.rate("sent_bytes"), self.rate("sent_ms")
        return sent / ms / 1e6 if sent is not None and ms else None


def answers(routers: Sequence[PolledRouter]) -> list[tuple[PolledRouter, Status]]:
    """The last answers of routers that answer now, or of all if none does."""
    known = [(router, router.last) for router in routers if router.last]
    return [(router, last) for router, last in known if not router.failure] or known


def workers(routers: Sequence[PolledRouter]) -> Iterator[WorkerLine]:
    """Each worker once, prefill workers first."""
    seen: dict[tuple[int, str], list[tuple[PolledRouter, fleet_pb2.WorkerStatus]]] = {}
    for router, status in answers(routers):
        for worker in status.workers:
            key = worker.record.role, worker.record.incarnation
            seen.setdefault(key, []).append((router, worker))
    for _, reports in sorted(seen.items()):
        router, worker = max(reports, key=lambda report: report[1].load.steps)
        state, reason = worker.state, worker.reason
        if not_ready := [report for report in reports if report[1].state != "READY"]:
            other, seen_as = not_ready[0]
            state, reason = seen_as.state, seen_as.reason
            if len(not_ready) < len(reports):
                reason += f" (says {other.address})"
        yield WorkerLine(router, worker, state, reason)


def pairs(routers: Sequence[PolledRouter]) -> list[PairLine]:
    """Each pair once; a router's state (EJECTED) has precedence over the workers'."""
    seen: dict[tuple[str, str], PairLine] = {}
    for router, status in answers(routers):
        for pair in status.pairs:
            key = pair.prefill, pair.decode
            if key not in seen or pair.state != "OPEN":
                seen[key] = PairLine(router, pair)
    return [line for _, line in sorted(seen.items())]


def events(routers: Sequence[PolledRouter]) -> list[tuple[str, fleet_pb2.RouterEvent]]:
    """(router's address, event), the newest first."""
    known = [(one.address, each) for one in routers if one.last for each in one.last.router.events]
    return sorted(known, key=lambda line: line[1].time_ms, reverse=True)
