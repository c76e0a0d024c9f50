"""The router's view of all workers: follows the registry, keeps one `Member` for each incarnation.

During a registry outage the last known members are served on; whether a worker answers is seen on
its own connection, not in the registry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from baton.errors import Unavailable
from baton.registry import Membership
from baton.v1 import common_pb2, worker_pb2
from router.member import Member
from router.snapshot import Snapshot

_PREFILL = common_pb2.WORKER_ROLE_PREFILL


class Fleet:
    """Members by incarnation. Event-loop thread only."""

    def __init__(self, membership: Membership, router_id: str, text_fingerprint: str) -> None:
        self._membership = membership
        self._router_id = router_id
        self._text_fingerprint = text_fingerprint
        self._members: dict[str, Member] = {}
        self._news = asyncio.Event()

    @property
    def registry_connected(self) -> bool:
        """Whether the registry answers."""
        return self._membership.connected

    @property
    def pairs(self) -> list[worker_pb2.PairStatus]:
        """Links between workers, as their prefill ends tell."""
        return [pair for member in self._members.values() for pair in member.pairs]

    async def follow(self) -> None:
        """Runs until cancelled, or until the watch ends."""
        try:
            async for records in self._membership.changes():
                await self._apply(records)
        finally:
            closing = [member.close("the router is stopping") for member in self._members.values()]
            await asyncio.gather(*closing)

    def snapshot(self) -> Snapshot:
        """All workers now."""
        views = [member.view for member in self._members.values()]
        views.sort(key=lambda view: view.incarnation)
        return Snapshot(
            prefill=tuple(view for view in views if view.record.role == _PREFILL),
            decode=tuple(view for view in views if view.record.role != _PREFILL),
        )

    def member(self, incarnation: str) -> Member:
        """A member by name; raises Unavailable when it has just left."""
        if member := self._members.get(incarnation):
            return member
        raise Unavailable(f"worker {incarnation} has left")

    @property
    def news(self) -> asyncio.Event:
        """Set at the next change of members or of their load.

        Whoever takes it before a look at the snapshot misses no change that comes after the look.
        """
        return self._news

    async def _apply(self, records: Mapping[str, common_pb2.WorkerRecord]) -> None:
        gone = self._members.keys() - records.keys()
        leaving = [self._members.pop(incarnation) for incarnation in gone]
        for incarnation, record in records.items():
            if record.state == common_pb2.WORKER_STATE_STARTING:
                continue  # it has no server yet
            if member := self._members.get(incarnation):
                member.update(record)
            else:
                self._members[incarnation] = self._join(record)
        self._announce()
        closing = [member.close("the worker has left the cluster") for member in leaving]
        await asyncio.gather(*closing)

    def _join(self, record: common_pb2.WorkerRecord) -> Member:
        mismatch = ""
        if record.text_fingerprint != self._text_fingerprint:
            mismatch = (
                f"its tokenizer ({record.text_fingerprint[:12]}) is not the router's "
                f"({self._text_fingerprint[:12]}): start both with the same model"
            )
        return Member(record, self._router_id, mismatch, self._announce)

    def _announce(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
