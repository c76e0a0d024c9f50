"""The members of a cluster: as a store keeps them, as a watcher tracks them, as readers see them.

A member's key is `<prefix><incarnation>`, its value JSON for people too. No network here.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import AsyncGenerator, Collection, Mapping, Set
from contextlib import aclosing
from types import MappingProxyType

from google.protobuf import json_format
from google.protobuf.message import Message

from baton.errors import InvalidRequest
from baton.v1.common_pb2 import WorkerRecord, WorkerRole, WorkerState

log = logging.getLogger(__name__)

# Their names, for people.
ROLES = {
    WorkerRole.WORKER_ROLE_PREFILL: "prefill",
    WorkerRole.WORKER_ROLE_DECODE: "decode",
    WorkerRole.WORKER_ROLE_MIXED: "mixed",
}


class Membership:
    """What a watcher sees: the newest snapshot of all members, by incarnation, for any reader.

    A slow reader misses intermediate snapshots, never the newest one, so nothing queues up. One
    writer calls `publish`; readers use the rest.
    """

    def __init__(self) -> None:
        # A snapshot never changes. During an outage it is the last one known.
        self.records: Mapping[str, WorkerRecord] = MappingProxyType({})
        # Those of `records` that the store has lost and that may come back.
        self.missing: Set[str] = frozenset()
        self.connected = False  # to the store; if not, `records` may be out of date
        self._closed = False
        self._changed = asyncio.Event()  # one for each snapshot

    async def find(self, incarnation: str, timeout_s: float) -> WorkerRecord | None:
        """A member's record, or None; one that is not known yet, or only as STARTING, which says
        little of it, has `timeout_s` to come."""
        try:
            async with asyncio.timeout(timeout_s), aclosing(self.changes()) as changes:
                async for records in changes:
                    found = records.get(incarnation)
                    if found is not None and found.state != WorkerState.WORKER_STATE_STARTING:
                        return found
        except TimeoutError:
            pass
        return self.records.get(incarnation)

    async def changes(self) -> AsyncGenerator[Mapping[str, WorkerRecord], None]:
        """Yields `records` now and whenever they, `missing` or `connected` change; ends with the
        watch."""
        while not self._closed:
            changed = self._changed
            yield self.records
            await changed.wait()

    def publish(
        self,
        records: Mapping[str, WorkerRecord],
        *,
        connected: bool,
        missing: Set[str] = frozenset(),
    ) -> None:
        """Makes a copy of `records` the newest snapshot; readers wake only if something changed."""
        if (connected, missing, records) == (self.connected, self.missing, self.records):
            return
        if records != self.records:
            self.records = MappingProxyType(dict(records))
        self.connected, self.missing = connected, frozenset(missing)
        self._wake()

    def close(self) -> None:
        """Ends every reader's `changes`."""
        self._closed = True
        self.connected = False
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class MemberTable:
    """Members by incarnation, each with the store revision that last changed it.

    A member that has said that it leaves (its record is not READY) is gone with its key. Another
    one is only `missing`: a store that was paused for longer than leases live ends all of them when
    it goes on, and one that lost its data shows an empty list, until the members, which are alive,
    have registered again. The caller decides when to drop them.

        known before        listing after a break         table
        A  B  C             B  D                          A? B C? D     ? = missing
    """

    def __init__(self) -> None:
        self.records: dict[str, WorkerRecord] = {}
        self.missing: dict[str, float] = {}  # and since when, by the caller's clock
        self._revisions: dict[str, int] = {}

    def listed(self, listing: Mapping[str, tuple[WorkerRecord, int]], now: float) -> None:
        """Takes over a full listing of (record, revision); members not in it become missing."""
        self.missing = dict.fromkeys(self.records.keys() - listing.keys(), now)
        # A store that started over counts from 1: any event of a missing member must count.
        self._revisions = dict.fromkeys(self.missing, 0)
        for incarnation, (record, revision) in listing.items():
            self.records[incarnation] = record
            self._revisions[incarnation] = revision

    def put(self, incarnation: str, record: WorkerRecord, revision: int) -> None:
        """A member came or changed; an event older than the listing is ignored."""
        if revision >= self._revisions.get(incarnation, 0):
            self.records[incarnation] = record
            self._revisions[incarnation] = revision
            self.missing.pop(incarnation, None)

    def delete(self, incarnation: str, revision: int, now: float) -> None:
        """A member left, or its lease ended and it is missing."""
        record = self.records.get(incarnation)
        if record is None or revision < self._revisions[incarnation]:
            return
        if record.state == WorkerState.WORKER_STATE_READY:
            self._revisions[incarnation] = revision
            self.missing.setdefault(incarnation, now)
        else:
            self._drop(incarnation)

    def drop_missing(self, since: float, stored: Collection[str]) -> set[str]:
        """Removes members that have been missing since then or longer and are not `stored` now;
        returns their incarnations."""
        dropped = {name for name, at in self.missing.items() if at <= since} - set(stored)
        for incarnation in dropped:
            self._drop(incarnation)
        return dropped

    def _drop(self, incarnation: str) -> None:
        self.missing.pop(incarnation, None)
        del self.records[incarnation], self._revisions[incarnation]


def key_of(prefix: str, record: WorkerRecord) -> str:
    """The key of `record`; raises InvalidRequest unless it has a role and an incarnation."""
    if record.role not in ROLES:
        raise InvalidRequest(f"a worker cannot register in role {record.role}", "role")
    if not record.incarnation or "/" in record.incarnation:
        raise InvalidRequest(f"{record.incarnation!r} is no incarnation", "incarnation")
    return f"{prefix}{record.incarnation}"


def copy_for_update(old: WorkerRecord, new: WorkerRecord) -> WorkerRecord:
    """A copy of `new`; raises InvalidRequest unless it is about the same worker as `old`."""
    if new.incarnation != old.incarnation:
        text = f"an update of {old.incarnation} cannot name {new.incarnation or 'no worker'}"
        raise InvalidRequest(text, "incarnation")
    return copy.deepcopy(new)


def incarnation_of(key: bytes) -> str:
    """The last part of a key."""
    return key.decode(errors="replace").rpartition("/")[2]


def encode(record: Message) -> bytes:
    """The value that the store has for a record."""
    return json_format.MessageToJson(record, indent=None).encode()


def decode(key: bytes, value: bytes) -> WorkerRecord | None:
    """The record stored at `key`. Fields of a newer version are passed over.

    None, and a warning, for a value that is no record, has a role that is not known here, or
    belongs under another key.
    """
    record = WorkerRecord()
    try:
        json_format.Parse(value, record, ignore_unknown_fields=True)
    except (json_format.ParseError, UnicodeDecodeError) as error:
        log.warning("%r does not hold a worker record: %s", key, error)
        return None
    if record.incarnation != incarnation_of(key):
        log.warning("%r holds the record of %r", key, record.incarnation)
        return None
    if record.role not in ROLES:
        log.warning("%r holds a worker of role %s, not known here", key, record.role)
        return None
    return record
