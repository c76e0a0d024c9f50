"""Membership in memory: the etcd registry's twin for tests, with the same contract.

Everything happens at once and in the caller's task. Time is the store's own: leases end when
`advance` is called, never by themselves. Outages are played by `stop`, `start`, `wipe` and
`compact` on the store, and by `cut` and `mend` on one registry.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from baton.errors import Unavailable
from baton.registry import records
from baton.registry.member_table import Roll
from baton.registry.membership import Membership
from baton.v1.common_pb2 import WorkerRecord

GRACE_TTLS = 2


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
        self._revision = 0
        self._registrations: list[MemoryRegistration] = []
        self._watches: list[_MemoryWatch] = []

    def advance(self, seconds: float) -> None:
        """Lets time pass: leases of those who can reach the store live on, the others' end."""
        self.now_s += seconds
        if self.up:
            for registration in self._registrations:
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
        self._revision = 0

    def compact(self) -> None:
        """Whoever is not watching now will not be told what happened meanwhile."""
        for watch in self._watches:
            watch.forget_history()

    def put(self, record: WorkerRecord) -> None:
        """Writes a member's record under a fresh lease."""
        old = self.entries.get(record.incarnation)
        if old is None or old.record != record:
            self._revision += 1
            old = self.entries[record.incarnation] = _Entry(record, self._revision, 0.0)
        old.expires_s = self.now_s + self.ttl_s

    def delete(self, incarnation: str) -> None:
        """Removes a member."""
        if self.entries.pop(incarnation, None) is not None:
            self._revision += 1

    @property
    def revision(self) -> int:
        """Changes since the store was made or wiped."""
        return self._revision

    def settle(self) -> None:
        """Does at once what retries and streams do in time: everyone writes, everyone reads."""
        for registration in self._registrations:
            registration.renew()
        for watch in self._watches:
            watch.read()

    def enrol(self, member: MemoryRegistration | _MemoryWatch) -> None:
        """Includes a registration or a watch in `settle`."""
        if isinstance(member, MemoryRegistration):
            self._registrations.append(member)
        else:
            self._watches.append(member)
        self.settle()

    def dismiss(self, member: MemoryRegistration | _MemoryWatch) -> None:
        """Ends `enrol`."""
        if isinstance(member, MemoryRegistration):
            self._registrations.remove(member)
        else:
            self._watches.remove(member)
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

    def mend(self) -> None:
        """Undoes `cut`."""
        self._linked = True
        self._store.settle()

    @asynccontextmanager
    async def register(self, record: WorkerRecord) -> AsyncIterator[MemoryRegistration]:
        """Enters `record` until exit; see the seam."""
        self._require_store()
        records.key_of("", record)
        registration = MemoryRegistration(self, self._store, record)
        self._store.enrol(registration)
        try:
            yield registration
        finally:
            if self.connected:
                self._store.delete(record.incarnation)
            self._store.dismiss(registration)

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[Membership]:
        """Follows the members until exit; see the seam."""
        self._require_store()
        watch = _MemoryWatch(self, self._store)
        self._store.enrol(watch)
        try:
            yield watch.membership
        finally:
            self._store.dismiss(watch)
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
        self._record = records.copied(record)

    @property
    def connected(self) -> bool:
        """Whether the store can be reached."""
        return self._registry.connected

    async def update(self, record: WorkerRecord) -> None:
        """Replaces the record; see the seam."""
        self._record = records.copy_for_update(self._record, record)
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
        self._roll = Roll()
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
            self.membership.publish(self._roll.records, connected=False)
            return
        self._take()
        if self._roll.missing and self._give_up_s is None:
            self._give_up_s = self._store.now_s + GRACE_TTLS * self._store.ttl_s
        if self._give_up_s is not None and self._store.now_s >= self._give_up_s:
            self._roll.drop_missing()
        if not self._roll.missing:
            self._give_up_s = None
        self.membership.publish(self._roll.records, connected=True)

    def _take(self) -> None:
        entries = self._store.entries
        if self._history != self._store.history:
            self._history, self._seen = self._store.history, set()
            self._roll.listed({i: (e.record, e.revision) for i, e in entries.items()})
        for incarnation in self._seen - entries.keys():
            self._roll.delete(incarnation, self._store.revision)
        for incarnation, entry in entries.items():
            self._roll.put(incarnation, entry.record, entry.revision)
        self._seen = set(entries)
