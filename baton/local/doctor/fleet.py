"""Looks at a cluster through what a router tells: its workers, and every pair they make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from baton.local.doctor.finding import Finding, fail, ok, warn
from baton.local.doctor.links import Judgement, Trouble, judge
from baton.v1 import common_pb2
from baton.v1.common_pb2 import WorkerRecord
from baton.v1.fleet_pb2 import GetStatusResponse, WorkerStatus
from kvtransfer import pairing
from kvtransfer.pairing import Kind

_MOST_PAIRS_NAMED = 4


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode worker, what they would do, and what their open link does."""

    prefill: WorkerRecord
    decode: WorkerRecord
    judgement: Judgement
    in_use: Kind | None  # None: they have no open link now

    @property
    def name(self) -> str:
        """Which two."""
        return f"{self.prefill.incarnation} → {self.decode.incarnation}"


def pairs_of(status: GetStatusResponse) -> list[Pair]:
    """Every prefill worker with every decode worker, in the router's order."""
    used = {
        (pair.prefill, pair.decode): pair.transport
        for pair in status.pairs
        if pair.state == "OPEN" and pair.transport
    }
    return [
        Pair(one, other, judge(one, other), used.get((one.incarnation, other.incarnation)))
        for one in _of(status, common_pb2.WORKER_ROLE_PREFILL)
        for other in _of(status, common_pb2.WORKER_ROLE_DECODE)
    ]


def examine(status: GetStatusResponse, pairs: list[Pair]) -> Iterator[Finding]:
    """What is wrong in the cluster, and one line that says so where nothing is."""
    found = [*_roles(status), *_states(status), *_links(pairs)]
    yield from found or [ok("cluster", "every worker is READY, every pair does its best")]


def _of(status: GetStatusResponse, role: common_pb2.WorkerRole) -> list[WorkerRecord]:
    return [worker.record for worker in status.workers if worker.record.role == role]


def _roles(status: GetStatusResponse) -> Iterator[Finding]:
    for role, name in (
        (common_pb2.WORKER_ROLE_PREFILL, "prefill"),
        (common_pb2.WORKER_ROLE_DECODE, "decode"),
    ):
        if not _of(status, role):
            yield fail("cluster", f"has no {name} worker", f"start one: baton {name}-worker")
    if not status.router.registry_connected:
        yield warn("registry", "the router does not reach etcd: nobody joins or leaves", "")


def _states(status: GetStatusResponse) -> Iterator[Finding]:
    for worker in status.workers:
        if worker.state != "READY":
            why = f": {worker.reason}" if worker.reason else ""
            yield warn(_name(worker), f"{worker.state}{why}", "")


def _links(pairs: list[Pair]) -> Iterator[Finding]:
    """Troubles of pairs, those of the same kind together."""
    if pairs and all(pair.judgement.transport is None for pair in pairs):
        yield fail("pairs", "none can hand a prompt's KV over", "what is told of each below")
    grouped: dict[Trouble, list[str]] = {}
    for pair in pairs:
        for trouble in (*pair.judgement.troubles, *_drift(pair)):
            grouped.setdefault(trouble, []).append(pair.name)
    for trouble, names in grouped.items():
        more = len(names) - _MOST_PAIRS_NAMED
        listed = ", ".join(names[:_MOST_PAIRS_NAMED]) + (f" and {more} more" if more > 0 else "")
        yield warn(listed, trouble.text, trouble.mend)


def _drift(pair: Pair) -> Iterator[Trouble]:
    """An open link that is not what the two would agree on now."""
    best, used = pair.judgement.transport, pair.in_use
    if best is not None and used is not None and used != best:
        text = f"the open link uses {pairing.name_of(used)}, and {pairing.name_of(best)} is faster"
        yield Trouble(text, "restart the workers of this pair if it stays so")


def _name(worker: WorkerStatus) -> str:
    role = "prefill" if worker.record.role == common_pb2.WORKER_ROLE_PREFILL else "decode"
    return f"{role} {worker.record.incarnation}"
