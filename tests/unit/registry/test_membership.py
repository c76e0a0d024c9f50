"""Readers see the newest members, and the table agrees with the store whatever a watcher misses."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from baton.registry.membership import Membership, MemberTable
from baton.v1.common_pb2 import WorkerRecord, WorkerState

READY, DRAINING = WorkerState.WORKER_STATE_READY, WorkerState.WORKER_STATE_DRAINING


def record(name, pid=0, state=DRAINING):
    return WorkerRecord(incarnation=name, pid=pid, state=state)


async def test_a_slow_reader_gets_the_newest_snapshot_when_it_changed_until_the_watch_ends():
    membership = Membership()
    changes = membership.changes()
    assert dict(await anext(changes)) == {}
    for pid in range(100):
        membership.publish({"a": record("a", pid)}, connected=True)
    assert await anext(changes) == {"a": record("a", 99)}
    before = membership.records
    waiting = asyncio.create_task(anext(changes))
    membership.publish({"a": record("a", 99)}, connected=True)  # equal
    await asyncio.sleep(0)
    assert not waiting.done()
    assert membership.records is before
    membership.publish({"a": record("a", 99)}, connected=False)
    assert await waiting is before
    assert not membership.connected and not membership.missing
    membership.publish({"a": record("a", 99)}, connected=False, missing={"a"})
    assert await anext(changes) is before and membership.missing == {"a"}
    ending = asyncio.create_task(anext(changes, None))
    await asyncio.sleep(0)
    membership.close()
    assert await ending is None


async def test_a_member_is_found_also_one_that_comes_a_moment_later():
    membership = Membership()
    finding = asyncio.create_task(membership.find("d1", 10.0))
    await asyncio.sleep(0)
    found = record("d1", 5)
    starting = WorkerRecord(incarnation="d1", state="WORKER_STATE_STARTING")
    membership.publish({"d1": starting}, connected=True)
    assert await membership.find("d1", 0.01) == starting  # no newer record comes in time
    assert not finding.done()
    membership.publish({"d1": found}, connected=True)
    assert await finding == found
    membership.publish({"d1": found}, connected=False)  # the last known ones count in an outage
    assert await membership.find("d1", 0.0) == found
    assert await membership.find("d2", 0.01) is None
    membership.close()
    assert await membership.find("d2", 10.0) is None
    assert [snapshot async for snapshot in membership.changes()] == []


class Store:
    """Keys with revisions, and the whole history of events."""

    def __init__(self):
        self.revision = 1
        self.entries = {}
        self.events = []

    def put(self, name):
        self.revision += 1
        self.entries[name] = (record(name, self.revision), self.revision)
        self.events.append((self.revision, name, self.entries[name][0]))

    def delete(self, name):
        if self.entries.pop(name, None):
            self.revision += 1
            self.events.append((self.revision, name, None))

    def records(self):
        return {name: entry[0] for name, entry in self.entries.items()}


def replay(store, table, after):
    for revision, name, changed in store.events:
        if revision <= after:
            continue
        if changed is None:
            table.delete(name, revision, 0.0)
        else:
            table.put(name, changed, revision)
        assert table.missing.keys() <= table.records.keys() == table._revisions.keys()


changes = st.lists(st.tuples(st.sampled_from(["put", "delete"]), st.sampled_from("abcd")))


def apply(store, some):
    for verb, name in some:
        getattr(store, verb)(name)


@given(before=changes, meanwhile=changes, later=changes, compacted=st.booleans())
def test_a_listing_and_a_watch_leave_only_the_missing_to_drop(before, meanwhile, later, compacted):
    """A watch that resumes where it broke misses nothing; after compaction it begins later."""
    store, table = Store(), MemberTable()
    apply(store, before)
    table.listed(store.entries, 0.0)
    seen = store.revision
    apply(store, meanwhile)
    table.listed(dict(store.entries), 0.0)
    seen = store.revision if compacted else seen
    apply(store, later)
    replay(store, table, after=seen)
    assert compacted or not table.missing
    assert {n: r for n, r in table.records.items() if n not in table.missing} == store.records()
    assert table.drop_missing(0.0, ()).isdisjoint(store.entries)
    assert table.records == store.records()


def test_a_ready_member_whose_key_vanishes_is_missing_until_its_time_is_over_or_it_is_back():
    """It may serve on: its lease ended while it or the store was late."""
    table = MemberTable()
    for name in ("a", "b", "c"):
        table.put(name, record(name, state=READY), 1)
    table.put("leaving", record("leaving"), 1)
    for at, name in enumerate(("a", "b", "c", "leaving"), 2):
        table.delete(name, at, float(at))
    table.delete("a", 5, 9.0)
    assert table.missing == {"a": 2.0, "b": 3.0, "c": 4.0}
    assert table.records.keys() == {"a", "b", "c"}
    table.put("b", record("b", state=READY), 2)  # older than its end
    table.put("c", record("c", state=READY), 6)
    assert table.missing.keys() == {"a", "b"}
    assert table.drop_missing(2.9, ["b"]) == {"a"}
    assert table.drop_missing(3.0, ["b"]) == set(), "the store has it: its event is on its way"
    assert table.drop_missing(3.0, []) == {"b"}
    assert table.records.keys() == {"c"} and not table.missing
