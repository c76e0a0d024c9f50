"""Membership in memory: the etcd registry's twin for tests, with the same contract.

Everything happens at once and in the caller's task. Time is the store's own: leases end when
`advance` is called, never by themselves. Outages are played by `stop`, `start`, `wipe` and
`compact` on the store, and by `cut` and `reconnect` on one registry.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from baton.errors import Unavailable
from baton.registry import member_table
from baton.registry.etcd import GRACE_TTLS
from baton.registry.interface import Membership
from baton.registry.member_table import MemberTable
from baton.v1.common_pb2 import WorkerRecord


@dataclass
class _Entry:
    record: WorkerRecord
    revision: int
    expires_s: float


class MemoryStore:
    """What several `MemoryRegistry` share. `ttl_s` is every lease's time to live."""

    def __init__(self, ttl_s: float = 5.0) -> None:
        self.ttl_s = ttl_s
        self.now_s = 0.0
        self.up = True
        self.history = 0  # changes when events are lost: by a wipe, or by compaction in an outage
        self.entries: dict[str, _Entry] = {}
        self.revision = 0  # changes since the store was made or wiped
        self.registrations: list[MemoryRegistration] = []
        self.watches: list[_MemoryWatch] = []

    def advance(self, seconds: float) -> None:
        """Lets time pass: leases of registrations that reach the store live on, others end."""
        self.now_s += seconds
        if self.up:
            self._renew()
            for incarnation, entry in list(self.entries.items()):
                if entry.expires_s <= self.now_s:
                    del self.entries[incarnation]
        self.settle()

    def stop(self) -> None:
        """The store is gone, its data stay."""
        self.up = False
        self.settle()

    def start(self) -> None:
        """The store is back, and as etcd does, gives every lease its full time again."""
        self.up = True
        for entry in self.entries.values():
            entry.expires_s = self.now_s + self.ttl_s
        self.settle()

    def wipe(self) -> None:
        """A stopped store loses its data."""
        assert not self.up, "stop the store before wiping it"
        self.entries.clear()
        self.history += 1
        self.revision = 0

    def compact(self) -> None:
        """Watches that are cut off now will not get the events of meanwhile."""
        for watch in self.watches:
            if not watch.registry.connected:
                watch.history = None

    def settle(self) -> None:
        """Does at once what retries and streams do in time: everyone writes, everyone reads."""
        self._renew()
        for watch in self.watches:
            watch.read()

    def put(self, record: WorkerRecord) -> None:
        """Writes a member's record under a fresh lease."""
        entry = self.entries.get(record.incarnation)
        if entry is None or entry.record != record:
            self.revision += 1
            entry = self.entries[record.incarnation] = _Entry(record, self.revision, 0.0)
        entry.expires_s = self.now_s + self.ttl_s

    def _renew(self) -> None:
        for registration in self.registrations:
            if registration.connected:
                self.put(registration.record)


class MemoryRegistry:
    """`baton.registry.interface.Registry` over a `MemoryStore`."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self._linked = True

    @property
    def connected(self) -> bool:
        """Whether this registry reaches the store."""
        return self._linked and self.store.up

    def cut(self) -> None:
        """This registry alone loses the store."""
        self._linked = False
        self.store.settle()

    def reconnect(self) -> None:
        """Undoes `cut`."""
        self._linked = True
        self.store.settle()

    @asynccontextmanager
    async def register(self, record: WorkerRecord) -> AsyncIterator[MemoryRegistration]:
        """Enters `record` until exit; see `Registry`."""
        self._require_store()
        member_table.key_of("", record)
        registration = MemoryRegistration(self, copy.deepcopy(record))
        self.store.registrations.append(registration)
        self.store.settle()
        try:
            yield registration
        finally:
            self.store.registrations.remove(registration)
            if self.connected and record.incarnation in self.store.entries:
                del self.store.entries[record.incarnation]
                self.store.revision += 1
            self.store.settle()

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[Membership]:
        """Follows the members until exit; see `Registry`."""
        self._require_store()
        watch = _MemoryWatch(self)
        self.store.watches.append(watch)
        watch.read()
        try:
            yield watch.membership
        finally:
            self.store.watches.remove(watch)
            watch.membership.close()

    async def close(self) -> None:
        """Nothing to close."""

    def _require_store(self) -> None:
        if not self.connected:
            raise Unavailable("the memory store cannot be reached: it was stopped or cut off")


@dataclass(eq=False)
class MemoryRegistration:
    """`baton.registry.interface.Registration` over a `MemoryStore`."""

    registry: MemoryRegistry
    record: WorkerRecord

    @property
    def connected(self) -> bool:
        """Whether the store can be reached."""
        return self.registry.connected

    async def update(self, record: WorkerRecord) -> None:
        """Replaces the record; see `Registration`."""
        self.record = member_table.copy_for_update(self.record, record)
        self.registry.store.settle()


class _MemoryWatch:
    """One watcher: `read` takes over what the store has, as the etcd watch does after a break."""

    def __init__(self, registry: MemoryRegistry) -> None:
        self.membership = Membership()
        self.registry = registry
        self.history: int | None = registry.store.history  # None: lost to compaction
        self._table = MemberTable()
        self._seen: set[str] = set()
        self._give_up_s: float | None = None

    def read(self) -> None:
        """Publishes what the store has, or that it cannot be reached."""
        store, table = self.registry.store, self._table
        if not self.registry.connected:
            self._give_up_s = None
            self.membership.publish(table.records, connected=False)
            return
        if self.history != store.history:
            self.history, self._seen = store.history, set()
            table.listed({name: (e.record, e.revision) for name, e in store.entries.items()})
        for incarnation in self._seen - store.entries.keys():
            table.delete(incarnation, store.revision)
        for incarnation, entry in store.entries.items():
            table.put(incarnation, entry.record, entry.revision)
        self._seen = set(store.entries)
        if table.missing and self._give_up_s is None:
            self._give_up_s = store.now_s + GRACE_TTLS * store.ttl_s
        if self._give_up_s is not None and store.now_s >= self._give_up_s:
            table.drop_missing()
        if not table.missing:
            self._give_up_s = None
        self.membership.publish(table.records, connected=True)
