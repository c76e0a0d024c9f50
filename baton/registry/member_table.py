"""Members as a registry stores them, and the table of them kept from listings and events.

A member's key is `<prefix><role>/<incarnation>`, its value JSON for people too. Pure: no clock, no
network.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

from google.protobuf import json_format

from baton.errors import InvalidRequest
from baton.v1.common_pb2 import WorkerRecord, WorkerRole

_ROLES = {WorkerRole.WORKER_ROLE_PREFILL: "prefill", WorkerRole.WORKER_ROLE_DECODE: "decode"}


def key_of(prefix: str, record: WorkerRecord) -> str:
    """The key of `record`; raises InvalidRequest unless it has a role and an incarnation."""
    if record.role not in _ROLES:
        raise InvalidRequest(f"a worker cannot register in role {record.role}", "role")
    if not record.incarnation or "/" in record.incarnation:
        raise InvalidRequest(f"{record.incarnation!r} is no incarnation", "incarnation")
    return f"{prefix}{_ROLES[record.role]}/{record.incarnation}"


def copy_for_update(old: WorkerRecord, new: WorkerRecord) -> WorkerRecord:
    """A copy of `new`; raises InvalidRequest unless it is about the same worker as `old`."""
    if (new.incarnation, new.role) != (old.incarnation, old.role):
        raise InvalidRequest(
            f"an update of {old.incarnation} cannot name {new.incarnation or 'no worker'} "
            "or another role",
            "incarnation",
        )
    return copy.deepcopy(new)


def incarnation_of(key: bytes) -> str:
    """The last part of a key."""
    return key.decode(errors="replace").rpartition("/")[2]


def decode(key: bytes, value: bytes) -> WorkerRecord:
    """The record stored at `key`. Fields of a newer version are passed over.

    Raises InvalidRequest for a value that is no record, has a role that is not known here, or
    belongs under another key.
    """
    record = WorkerRecord()
    try:
        json_format.Parse(value, record, ignore_unknown_fields=True)
    except (json_format.ParseError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{key!r} does not hold a worker record: {error}") from error
    if record.incarnation != incarnation_of(key):
        raise InvalidRequest(f"{key!r} holds the record of {record.incarnation!r}")
    if record.role not in _ROLES:
        raise InvalidRequest(f"{key!r} holds a worker of role {record.role}, not known here")
    return record


class MemberTable:
    """Members by incarnation, each with the store revision that last changed it.

    A key that a DELETE event names is gone at once. A member that a later listing merely lacks is
    only `missing`: a store that lost its data shows an empty list until the members, which are
    alive, have registered again. The caller decides when to drop them.

        known before        listing after a break         table
        A  B  C             B  D                          A? B C? D     ? = missing
    """

    def __init__(self) -> None:
        self.records: dict[str, WorkerRecord] = {}
        self.missing: set[str] = set()
        self._revisions: dict[str, int] = {}

    def listed(self, listing: Mapping[str, tuple[WorkerRecord, int]]) -> None:
        """Takes over a full listing of (record, revision); members not in it become missing."""
        self.missing = self.records.keys() - listing.keys()
        # A store that started over counts from 1: any event of a missing member must count.
        self._revisions = dict.fromkeys(self.missing, 0)
        for incarnation, (record, revision) in listing.items():
            self.records[incarnation] = record
            self._revisions[incarnation] = revision

    def put(self, incarnation: str, record: WorkerRecord, revision: int) -> None:
        """A member came or changed; an event older than the listing is ignored."""
        if revision < self._revisions.get(incarnation, 0):
            return
        self.records[incarnation] = record
        self._revisions[incarnation] = revision
        self.missing.discard(incarnation)

    def delete(self, incarnation: str, revision: int) -> None:
        """A member left or its lease ended."""
        if revision < self._revisions.get(incarnation, 0):
            return
        self.records.pop(incarnation, None)
        self._revisions.pop(incarnation, None)
        self.missing.discard(incarnation)

    def drop_missing(self) -> set[str]:
        """Removes the missing members; returns their incarnations."""
        dropped, self.missing = self.missing, set()
        for incarnation in dropped:
            del self.records[incarnation]
            del self._revisions[incarnation]
        return dropped

    def check(self) -> None:
        """Asserts that the three collections agree."""
        assert self.records.keys() == self._revisions.keys()
        assert self.missing <= self.records.keys()
