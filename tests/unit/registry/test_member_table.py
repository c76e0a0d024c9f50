"""The table agrees with the store, whatever a watcher misses and however it learns of it later."""

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.registry.membership import MemberTable

from .conftest import record


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
            table.delete(name, revision)
        else:
            table.put(name, changed, revision)
        assert table.missing <= table.records.keys() == table._revisions.keys()


changes = st.lists(st.tuples(st.sampled_from(["put", "delete"]), st.sampled_from("abcd")))


def apply(store, some):
    for verb, name in some:
        getattr(store, verb)(name)


@settings(deadline=None)
@given(before=changes, meanwhile=changes, later=changes, compacted=st.booleans())
def test_a_listing_and_a_watch_leave_only_the_missing_to_drop(before, meanwhile, later, compacted):
    """A watch that resumes where it broke misses nothing; after compaction it begins later."""
    store, table = Store(), MemberTable()
    apply(store, before)
    table.listed(store.entries)
    seen = store.revision
    apply(store, meanwhile)
    table.listed(dict(store.entries))
    seen = store.revision if compacted else seen
    apply(store, later)
    replay(store, table, after=seen)
    assert compacted or not table.missing
    assert {n: r for n, r in table.records.items() if n not in table.missing} == store.records()
    assert table.drop_missing().isdisjoint(store.entries)
    assert table.records == store.records()


@settings(deadline=None)
@given(before=changes, after=changes)
def test_a_store_that_starts_over_keeps_everyone_until_dropped(before, after):
    old, table = Store(), MemberTable()
    apply(old, before)
    table.listed(old.entries)
    new = Store()
    table.listed(new.entries)
    assert table.records == old.records()
    assert table.missing == set(old.entries)
    apply(new, after)
    replay(new, table, after=1)
    changed = {name for _, name, _ in new.events}
    assert table.missing == set(old.entries) - changed
    table.drop_missing()
    assert table.records == new.records()
