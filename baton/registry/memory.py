"""Membership in memory: the etcd registry's twin for tests, with the same contract.

Everything happens at once and in the caller's task. Time is the store's own: leases end when
`advance` is called, never by themselves. Outages are played by `stop`, `start`, `wipe` and
`compact` on the store, and by `cut` and `reconnect` on one registry.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from baton.errors import Unavailable
from baton.registry import member_table
from baton.registry.etcd import GRACE_TTLS
from baton.registry.interface import Membership
from baton.registry.member_table import MemberTable
from baton.v1.common_pb2 import WorkerRecord

T = TypeVar("T")


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
            for registration in self.registrations:
                registration.renew()
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
            watch.forget_history()

    def put(self, record: WorkerRecord) -> None:
        """Writes a member's record under a fresh lease."""
        old = self.entries.get(record.incarnation)
        if old is None or old.record != record:
            self.revision += 1
            old = self.entries[record.incarnation] = _Entry(record, self.revision, 0.0)
        old.expires_s = self.now_s + self.ttl_s

    def delete(self, incarnation: str) -> None:
        """Removes a member."""
        if self.entries.pop(incarnation, None) is not None:
            self.revision += 1

    def settle(self) -> None:
        """Does at once what retries and streams do in time: everyone writes, everyone reads."""
        for registration in self.registrations:
            registration.renew()
        for watch in self.watches:
            watch.read()

    @contextmanager
    def following(self, members: list[T], member: T) -> Iterator[T]:
        """Includes a registration or a watch in `settle`."""
        members.append(member)
        self.settle()
        try:
            yield member
        finally:
            members.remove(member)
            self.settle()


class MemoryRegistry:
    """`baton.registry.interface.Registry` over a `MemoryStore`."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._linked = True

    @property
    def connected(self) -> bool:
        """Whether this registry reaches the store."""
        return self._linked and self._store.up

    def cut(self) -> None:
        """This registry alone loses the store."""
        self._linked = False
        self._store.settle()

    def reconnect(self) -> None:
        """Undoes `cut`."""
        self._linked = True
        self._store.settle()

    @asynccontextmanager
    async def register(self, record: WorkerRecord) -> AsyncIterator[MemoryRegistration]:
        """Enters `record` until exit; see `Registry`."""
        self._require_store()
        member_table.key_of("", record)
        registration = MemoryRegistration(self, self._store, record)
        with self._store.following(self._store.registrations, registration):
            try:
                yield registration
            finally:
                if self.connected:
                    self._store.delete(record.incarnation)

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[Membership]:
        """Follows the members until exit; see `Registry`."""
        self._require_store()
        watch = _MemoryWatch(self, self._store)
        try:
            with self._store.following(self._store.watches, watch):
                yield watch.membership
        finally:
            watch.membership.close()

    async def close(self) -> None:
        """Nothing to close."""

    def _require_store(self) -> None:
        if not self.connected:
            raise Unavailable("the memory store cannot be reached: it was stopped or cut off")


class MemoryRegistration:
    """`baton.registry.interface.Registration` over a `MemoryStore`."""

    def __init__(self, registry: MemoryRegistry, store: MemoryStore, record: WorkerRecord) -> None:
        self._registry = registry
        self._store = store
        self._record = member_table.copied(record)

    @property
    def connected(self) -> bool:
        """Whether the store can be reached."""
        return self._registry.connected

    async def update(self, record: WorkerRecord) -> None:
        """Replaces the record; see `Registration`."""
        self._record = member_table.copy_for_update(self._record, record)
        self._store.settle()

    def renew(self) -> None:
        """Writes the record again if the store can be reached."""
        if self.connected:
            self._store.put(self._record)


class _MemoryWatch:
    """One watcher: `read` takes over what the store has, as the etcd watch does after a break."""

    def __init__(self, registry: MemoryRegistry, store: MemoryStore) -> None:
        self.membership = Membership()
        self._registry = registry
        self._store = store
        self._table = MemberTable()
        self._history: int | None = store.history  # None: lost to compaction
        self._seen: set[str] = set()
        self._give_up_s: float | None = None

    def forget_history(self) -> None:
        """Compaction: harmless for a watch that is up to date."""
        if not self._registry.connected:
            self._history = None

    def read(self) -> None:
        """Publishes what the store has, or that it cannot be reached."""
        if not self._registry.connected:
            self._give_up_s = None
            self.membership.publish(self._table.records, connected=False)
            return
        self._take()
        if self._table.missing and self._give_up_s is None:
            self._give_up_s = self._store.now_s + GRACE_TTLS * self._store.ttl_s
        if self._give_up_s is not None and self._store.now_s >= self._give_up_s:
            self._table.drop_missing()
        if not self._table.missing:
            self._give_up_s = None
        self.membership.publish(self._table.records, connected=True)

    def _take(self) -> None:
        entries = self._store.entries
        if self._history != self._store.history:
            self._history, self._seen = self._store.history, set()
            self._table.listed({i: (e.record, e.revision) for i, e in entries.items()})
        for incarnation in self._seen - entries.keys():
            self._table.delete(incarnation, self._store.revision)
        for incarnation, entry in entries.items():
            self._table.put(incarnation, entry.record, entry.revision)
        self._seen = set(entries)
