"""The roll agrees with the store, whatever a watcher misses and however it learns of it later."""

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.registry.member_table import Roll
from baton.v1.common_pb2 import WorkerRecord


def record(name, pid=0):
    return WorkerRecord(incarnation=name, pid=pid)


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


def replay(store, roll, after):
    for revision, name, changed in store.events:
        if revision <= after:
            continue
        if changed is None:
            roll.delete(name, revision)
        else:
            roll.put(name, changed, revision)
        roll.check()


changes = st.lists(st.tuples(st.sampled_from(["put", "delete"]), st.sampled_from("abcd")))


def apply(store, some):
    for verb, name in some:
        getattr(store, verb)(name)


@settings(deadline=None)
@given(before=changes, meanwhile=changes, later=changes)
def test_a_resumed_watch_leaves_nobody_missing(before, meanwhile, later):
    store, roll = Store(), Roll()
    apply(store, before)
    roll.listed(store.entries)
    seen = store.revision
    apply(store, meanwhile)
    roll.listed(dict(store.entries))
    apply(store, later)
    replay(store, roll, after=seen)
    assert not roll.missing
    assert roll.records == store.records()


@settings(deadline=None)
@given(before=changes, meanwhile=changes, later=changes)
def test_after_compaction_only_the_missing_differ_and_they_can_be_dropped(before, meanwhile, later):
    store, roll = Store(), Roll()
    apply(store, before)
    roll.listed(store.entries)
    apply(store, meanwhile)
    roll.listed(dict(store.entries))
    seen = store.revision
    apply(store, later)
    replay(store, roll, after=seen)
    assert {n: r for n, r in roll.records.items() if n not in roll.missing} == store.records()
    assert roll.drop_missing().isdisjoint(store.entries)
    assert roll.records == store.records()


@settings(deadline=None)
@given(before=changes, after=changes)
def test_a_store_that_starts_over_keeps_everyone_until_dropped(before, after):
    old, roll = Store(), Roll()
    apply(old, before)
    roll.listed(old.entries)
    new = Store()
    roll.listed(new.entries)
    assert roll.records == old.records()
    assert roll.missing == set(old.entries)
    apply(new, after)
    replay(new, roll, after=1)
    told = {name for _, name, _ in new.events}
    assert roll.missing == set(old.entries) - told
    roll.drop_missing()
    assert roll.records == new.records()


def test_old_news_do_not_undo_a_listing():
    roll = Roll()
    roll.listed({"a": (record("a", 9), 9)})
    roll.put("a", record("a", 5), 5)
    roll.delete("a", 7)
    assert roll.records == {"a": record("a", 9)}
    roll.delete("a", 10)
    assert roll.records == {}
