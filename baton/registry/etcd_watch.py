"""Follows the members in etcd: list at revision R, watch from R + 1, and again after every break.

After a break the watch resumes at the last revision seen, so that departures meanwhile are told as
events and count at once. The new listing beside it catches what no event will tell: history that
was compacted, and a store that lost its data and counts revisions from the start. A member that
such a listing lacks may only not have come back yet, so it stays for a grace of two lease TTLs.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

from baton.config import RegistryConfig
from baton.errors import BatonError, InvalidRequest
from baton.registry import records
from baton.registry.backoff import Backoff
from baton.registry.etcd_client import EtcdClient
from baton.registry.member_table import Roll
from baton.registry.membership import Membership
from baton.v1 import etcd_pb2
from baton.v1.common_pb2 import WorkerRecord

log = logging.getLogger(__name__)

GRACE_TTLS = 2


class EtcdWatch:
    """One watcher of all workers; `membership` is what it knows."""

    def __init__(self, client: EtcdClient, config: RegistryConfig) -> None:
        self.membership = Membership()
        self._client = client
        self._prefix = config.workers_prefix
        self._grace_s = GRACE_TTLS * config.lease_ttl_s
        self._roll = Roll()
        self._revision: int | None = None  # everything up to it is known; None: unknown
        self._grace: asyncio.TimerHandle | None = None
        self._backoff = Backoff()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Lists the members and begins to follow; Unavailable or ConfigError if it cannot."""
        self._take(await self._client.connect(self._prefix))
        self._publish(connected=True)
        self._task = asyncio.create_task(self._follow(), name=f"watch {self._prefix}")

    async def stop(self) -> None:
        """Ends the watch and all readers of `membership`."""
        self._hold_grace()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self.membership.close()

    async def _follow(self) -> None:
        listed = True
        try:
            while True:
                try:
                    if not listed:
                        self._take(await self._client.range(self._prefix))
                    listed = False
                    await self._listen()
                except BatonError as error:
                    self._lost(error)
                await self._backoff.wait()
        except Exception:
            log.exception("the watch of %s failed", self._prefix)
            raise
        finally:
            self.membership.close()

    async def _listen(self) -> None:
        """Applies events until the stream breaks (raises) or history is compacted (returns)."""
        assert self._revision is not None, "listed before"
        stream = self._client.watch(self._prefix, self._revision + 1)
        async with aclosing(stream) as responses:  # type: ignore[type-var]
            async for response in responses:
                if response.canceled:
                    log.info("history of %s is compacted; listing again", self._prefix)
                    self._revision = None
                    return
                if response.created:
                    self._resumed()
                self._apply(response)

    def _apply(self, response: etcd_pb2.WatchResponse) -> None:
        for event in response.events:
            incarnation, revision = records.incarnation_of(event.kv.key), event.kv.mod_revision
            if event.type == etcd_pb2.Event.DELETE:
                self._roll.delete(incarnation, revision)
            elif (record := _decoded(event.kv)) is not None:
                self._roll.put(incarnation, record, revision)
            self._revision = revision
        if not response.events and not response.created:  # a progress report
            self._revision = response.header.revision
        self._publish(connected=True)

    def _take(self, listing: etcd_pb2.RangeResponse) -> None:
        """Takes over a listing. The watch goes on where it was, unless the store started over."""
        self._roll.listed(
            {
                record.incarnation: (record, kv.mod_revision)
                for kv in listing.kvs
                if (record := _decoded(kv)) is not None
            }
        )
        newest = listing.header.revision
        self._revision = newest if self._revision is None else min(self._revision, newest)

    def _resumed(self) -> None:
        self._backoff.reset()
        self._hold_grace()
        if self._roll.missing:
            log.info("%d members are missing; waiting for them", len(self._roll.missing))
            loop = asyncio.get_running_loop()
            self._grace = loop.call_later(self._grace_s, self._give_up)

    def _give_up(self) -> None:
        for incarnation in sorted(self._roll.drop_missing()):
            log.warning("member %s did not come back", incarnation)
        self._publish(connected=True)

    def _lost(self, error: BatonError) -> None:
        if self.membership.connected:
            log.warning("serving on the last known members: %s", error)
        # While nobody can register, nobody is given up.
        self._hold_grace()
        self._publish(connected=False)

    def _hold_grace(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def _publish(self, *, connected: bool) -> None:
        self.membership.publish(self._roll.records, connected=connected)


def _decoded(kv: etcd_pb2.KeyValue) -> WorkerRecord | None:
    """The record at a key; None, and a word in the log, when somebody else wrote there."""
    try:
        return records.decode(kv.key, kv.value)
    except InvalidRequest as error:
        log.warning("%s", error)
        return None
