"""Membership in etcd: records under leases, followed by a list and a watch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from google.protobuf import json_format

from baton.config import RegistryConfig
from baton.errors import BatonError, Unavailable
from baton.net.backoff import Backoff
from baton.net.tasks import running
from baton.registry.election import Election, LedKey
from baton.registry.etcd_client import EtcdClient
from baton.registry.lease import LeasedKey
from baton.registry.membership import (
    Membership,
    MemberTable,
    decode,
    incarnation_of,
    key_of,
)
from baton.registry.routes import RouteTable
from baton.v1 import etcd_pb2, planner_pb2
from baton.v1.common_pb2 import RankHost, WorkerRecord

log = logging.getLogger(__name__)

TICKET_KEY_BYTES = 32
_PLAN = "plan"  # the key of the leader's plan, behind its prefix
GRACE_TTLS = 2  # lease TTLs that a missing member has to register again


class EtcdRegistry:
    """Where members are kept. Construction reads files and may raise ConfigError."""

    def __init__(self, config: RegistryConfig) -> None:
        self._config = config
        self._client = EtcdClient(config)

    @asynccontextmanager
    async def register(self, record: WorkerRecord) -> AsyncIterator[LeasedKey]:
        """Enters `record` under a lease that is kept alive until exit; exit removes it at once.

        Entering raises Unavailable when etcd cannot be reached, ConfigError when it refuses.
        """
        key = key_of(self._config.workers_prefix, record)
        registration = LeasedKey(self._client, self._config.lease_ttl_s, key, record)
        async with self._kept(registration):
            yield registration

    @asynccontextmanager
    async def announce(self, host: RankHost) -> AsyncIterator[None]:
        """Enters the ranks of a host, as `register` enters a worker."""
        key = f"{self._config.ranks_prefix}{host.worker}/{host.node_rank}"
        async with self._kept(LeasedKey(self._client, self._config.lease_ttl_s, key, host)):
            yield

    async def rank_hosts(self, worker: str) -> dict[int, RankHost]:
        """By node rank, those that are announced now; none while etcd does not answer."""
        hosts = dict[int, RankHost]()
        try:
            found = await self._client.range(f"{self._config.ranks_prefix}{worker}/")
        except Unavailable as error:
            log.warning("no ranks of other hosts are found: %s", error)
            return hosts
        for kv in found.kvs:
            try:
                host = json_format.Parse(kv.value, RankHost(), ignore_unknown_fields=True)
                hosts[host.node_rank] = host
            except (json_format.ParseError, UnicodeDecodeError) as error:
                log.warning("%r does not hold a host with ranks: %s", kv.key, error)
        return hosts

    @asynccontextmanager
    async def _kept(self, registration: LeasedKey) -> AsyncIterator[None]:
        await self._client.connect(registration.key)
        try:
            await registration.write()
            async with running(registration.keep(), f"keep {registration.key}"):
                yield
        finally:  # also of a failure behind which the key may be written
            await registration.revoke()

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[Membership]:
        """Lists the members, then follows them until exit. Entering raises as `register` does."""
        watch = _Watch(self._client, self._config)
        watch.take(await self._client.connect(self._config.workers_prefix))
        watch.publish(connected=True)
        try:
            async with running(watch.follow(), "watch members"):
                yield watch.membership
        finally:
            watch.close()

    @asynccontextmanager
    async def routes(self) -> AsyncIterator[RouteTable]:
        """Lists the routes of model names, then follows them until exit. Raises as `watch`."""
        table = RouteTable(self._client, self._config.routes_prefix)
        await table.load()
        async with running(table.follow(), "watch routes"):
            yield table

    @asynccontextmanager
    async def stand(self, name: str) -> AsyncIterator[tuple[Election, LedKey]]:
        """Stands for planner until exit, which resigns; with the leader's plan. Raises as
        `register` does."""
        prefix = self._config.planner_prefix
        await self._client.connect(prefix)
        election = Election(self._client, prefix + "leader", self._config.lease_ttl_s, name)
        try:
            async with running(election.run(), "election"):
                yield election, LedKey(self._client, prefix + _PLAN, election)
        finally:
            await election.resign()

    async def plan(self) -> planner_pb2.Plan:
        """The newest plan of a planner; an empty one if there is none. Raises BatonError."""
        found, _ = await self._client.get(self._config.planner_prefix + _PLAN)
        return plan_of(found.value) if found else planner_pb2.Plan()

    async def ticket_key(self) -> bytes:
        """Random bytes that all routers of the cluster share. Raises as entering `watch` does.

        Several may be written at once by routers that start together: the oldest one counts.
        """
        prefix = self._config.ticket_keys_prefix
        found = (await self._client.connect(prefix)).kvs
        if not found:
            new = secrets.token_bytes(TICKET_KEY_BYTES)
            await self._client.put(prefix + secrets.token_hex(8), new, lease=0)
            found = (await self._client.range(prefix)).kvs
        oldest: etcd_pb2.KeyValue = min(found, key=lambda kv: kv.create_revision)
        return oldest.value

    async def close(self) -> None:
        """Closes the connections; registrations and watches must have been left before."""
        await self._client.close()


def plan_of(value: bytes) -> planner_pb2.Plan:
    """A published plan; an empty one for what is none."""
    try:
        return json_format.Parse(value, planner_pb2.Plan(), ignore_unknown_fields=True)
    except (json_format.ParseError, UnicodeDecodeError) as error:
        log.warning("etcd holds no plan but %r: %s", value[:100], error)
        return planner_pb2.Plan()


class _Watch:
    """One watcher of all workers: lists at revision R, watches from R + 1, again after every break.

    After a break the watch resumes at the last revision seen, so that departures meanwhile come as
    events and count at once. The new listing beside it catches what no event will bring: history
    that was compacted, and a store that lost its data and counts revisions from the start. A member
    that such a listing lacks, or whose lease has ended without its saying that it leaves, may only
    not have come back yet, so it stays for GRACE_TTLS.
    """

    def __init__(self, client: EtcdClient, config: RegistryConfig) -> None:
        self.membership = Membership()
        self._client = client
        self._prefix = config.workers_prefix
        self._grace_s = GRACE_TTLS * config.lease_ttl_s
        self._table = MemberTable()
        self._revision: int | None = None  # everything up to it is known; None: unknown
        self._grace: asyncio.Task[None] | None = None  # runs while any is missing
        self._backoff = Backoff()

    async def follow(self) -> None:
        try:
            while True:
                try:
                    self.take(await self._client.range(self._prefix))
                    await self._listen()
                except BatonError as error:
                    self._lost(error)
                await self._backoff.wait()
        except Exception:
            log.exception("the watch of %s failed", self._prefix)
            raise
        finally:
            grace = self._grace
            self.close()
            if grace is not None:
                await asyncio.wait([grace])

    def close(self) -> None:
        self._hold_grace()
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
            incarnation, revision = incarnation_of(event.kv.key), event.kv.mod_revision
            if event.type == etcd_pb2.Event.DELETE:
                self._table.delete(incarnation, revision, _now())
            elif (record := decode(event.kv.key, event.kv.value)) is not None:
                self._table.put(incarnation, record, revision)
            self._revision = revision
        if not response.events and not response.created:  # a progress report
            self._revision = response.header.revision
        self._await_missing()
        self.publish(connected=True)

    def take(self, listing: etcd_pb2.RangeResponse) -> None:
        """Takes over a listing. The watch goes on where it was, unless the store started over."""
        self._table.listed(
            {
                record.incarnation: (record, kv.mod_revision)
                for kv in listing.kvs
                if (record := decode(kv.key, kv.value)) is not None
            },
            _now(),
        )
        newest = listing.header.revision
        self._revision = newest if self._revision is None else min(self._revision, newest)

    def _resumed(self) -> None:
        self._backoff.reset()
        self._hold_grace()

    def _await_missing(self) -> None:
        if self._table.missing and (self._grace is None or self._grace.done()):
            log.info("%d members are missing; waiting for them", len(self._table.missing))
            self._grace = asyncio.create_task(self._give_up(), name="wait for missing members")

    async def _give_up(self) -> None:
        """Drops each missing member at the end of its time, if a new listing lacks it, too.

        Without that, a watcher that was itself stopped would not see who has come back meanwhile.
        """
        backoff = Backoff()
        while missing := self._table.missing:
            await asyncio.sleep(min(missing.values()) + self._grace_s - _now())
            with contextlib.suppress(BatonError):  # then the watch breaks as well
                listing = await self._client.range(self._prefix)
                stored = {incarnation_of(kv.key) for kv in listing.kvs}
                for name in sorted(self._table.drop_missing(_now() - self._grace_s, stored)):
                    log.warning("member %s did not come back", name)
                self.publish(connected=True)
            await backoff.wait()

    def _lost(self, error: BatonError) -> None:
        if self.membership.connected:
            log.warning("serving on the last known members: %s", error)
        # While no worker can register, none is dropped.
        self._hold_grace()
        self.publish(connected=False)

    def _hold_grace(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def publish(self, *, connected: bool) -> None:
        table = self._table
        self.membership.publish(table.records, connected=connected, missing=table.missing.keys())


def _now() -> float:
    return asyncio.get_running_loop().time()
