"""The roll of members, kept from listings and events. Pure: no clock, no network.

A key that a DELETE event names is gone at once. A member that a later listing merely lacks is only
`missing`: a store that lost its data shows an empty list until the members, who are alive and well,
have registered again. Whoever keeps the roll decides when to give up on them.

        known before        listing after a break         roll
        A  B  C             B  D                          A? B C? D     ? = missing
"""

from __future__ import annotations

from collections.abc import Mapping

from baton.v1.common_pb2 import WorkerRecord


class Roll:
    """Members by incarnation, each with the store revision that last changed it."""

    def __init__(self) -> None:
        self.records: dict[str, WorkerRecord] = {}
        self.missing: set[str] = set()
        self._revisions: dict[str, int] = {}

    def listed(self, listing: Mapping[str, tuple[WorkerRecord, int]]) -> None:
        """Takes over a full listing of (record, revision); who is not in it becomes missing."""
        self.missing = self.records.keys() - listing.keys()
        # Revisions of a store that started over are lower: any news of the missing must count.
        self._revisions = dict.fromkeys(self.missing, 0)
        for incarnation, (record, revision) in listing.items():
            self.records[incarnation] = record
            self._revisions[incarnation] = revision

    def put(self, incarnation: str, record: WorkerRecord, revision: int) -> None:
        """A member came or changed; news older than what a listing told is passed over."""
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
        """Gives up on those who are missing and says who they were."""
        dropped, self.missing = self.missing, set()
        for incarnation in dropped:
            del self.records[incarnation]
            del self._revisions[incarnation]
        return dropped

    def check(self) -> None:
        """Asserts that the three collections agree."""
        assert self.records.keys() == self._revisions.keys()
        assert self.missing <= self.records.keys()
