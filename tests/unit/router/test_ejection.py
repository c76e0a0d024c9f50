"""Who is taken out of a snapshot, and that never everybody is."""

import pytest

from baton.v1 import common_pb2, worker_pb2
from router.fleet.circuit_breaker import FAILURES_IN_A_ROW, CircuitBreakers, without_ejected
from router.fleet.snapshot import READY, SILENT, Snapshot, WorkerView


@pytest.fixture
def now():
    return [0.0]


@pytest.fixture
def book(now):
    return CircuitBreakers(lambda: now[0])


def worker(name, state=READY, dtype="float32"):
    record = common_pb2.WorkerRecord(incarnation=name, kv=common_pb2.KvDescriptor(dtype=dtype))
    return WorkerView(record, worker_pb2.Load(), state, "" if state == READY else "still")


def fleet(prefill, decode, excluded_pairs=None):
    return Snapshot(tuple(prefill), tuple(decode), excluded_pairs or {})


def two_by_two():
    return fleet([worker("p0"), worker("p1")], [worker("d0"), worker("d1")])


def fail(book, now, *keys):
    """One after the other, the first one longest ago."""
    for key in keys:
        now[0] += 0.01
        for _ in range(FAILURES_IN_A_ROW):
            book.failed(key, "it broke")


def usable(snapshot):
    return {(p.incarnation, d.incarnation) for p, d in snapshot.usable_pairs()}


def states(snapshot):
    return {w.incarnation: w.state for w in (*snapshot.prefill, *snapshot.decode)}


def test_without_failures_nothing_is_touched(book):
    snapshot = two_by_two()
    assert without_ejected(snapshot, book) is snapshot


def test_a_worker_that_fails_is_ejected_and_says_why(book, now):
    fail(book, now, "d1")
    snapshot = without_ejected(two_by_two(), book)
    assert states(snapshot) == {"p0": "READY", "p1": "READY", "d0": "READY", "d1": "EJECTED"}
    assert "it broke" in snapshot.decode[1].reason
    assert usable(snapshot) == {("p0", "d0"), ("p1", "d0")}


def test_a_single_failure_of_the_others_brings_nobody_back(book, now):
    fail(book, now, "d0")
    now[0] += 0.1
    book.failed("d1", "it broke once")
    assert states(without_ejected(two_by_two(), book))["d0"] == "EJECTED"


def test_a_pair_that_fails_is_shut_and_its_workers_stay(book, now):
    fail(book, now, ("p0", "d1"))
    snapshot = without_ejected(two_by_two(), book)
    assert set(states(snapshot).values()) == {"READY"}
    assert "it broke" in snapshot.excluded_pairs["p0", "d1"]
    assert len(usable(snapshot)) == 3


def test_who_is_not_ready_keeps_its_own_state(book, now):
    fail(book, now, "d1")
    snapshot = fleet([worker("p0")], [worker("d0"), worker("d1", SILENT)])
    after = without_ejected(snapshot, book).decode[1]
    assert (after.state, after.reason) == (SILENT, "still")


def test_the_only_worker_of_a_role_is_never_ejected(book, now):
    fail(book, now, "p0", "d0", ("p0", "d0"))
    snapshot = without_ejected(fleet([worker("p0")], [worker("d0")]), book)
    assert usable(snapshot) == {("p0", "d0")}
    assert snapshot.decode[0].reason == ""


@pytest.mark.parametrize("first", ["d0", "d1"])
def test_of_many_that_fail_the_one_that_failed_longest_ago_is_used(book, now, first):
    fail(book, now, *sorted(("d0", "d1"), key=lambda name: name != first))
    snapshot = without_ejected(two_by_two(), book)
    assert {decode for _, decode in usable(snapshot)} == {first}


def test_a_worker_that_no_other_can_pair_with_is_no_reason_to_eject_the_last_pair(book, now):
    fail(book, now, "d0")
    snapshot = fleet([worker("p0")], [worker("d0"), worker("d1", dtype="bfloat16")])
    assert usable(without_ejected(snapshot, book)) == {("p0", "d0")}


def test_when_every_pair_is_shut_the_one_that_failed_longest_ago_is_used(book, now):
    fail(book, now, ("p0", "d1"), ("p0", "d0"))
    snapshot = fleet([worker("p0")], [worker("d0"), worker("d1")])
    assert usable(without_ejected(snapshot, book)) == {("p0", "d1")}


def test_a_pair_that_the_worker_itself_shuts_is_no_last_resort(book, now):
    fail(book, now, "p0", "d0")
    snapshot = fleet([worker("p0")], [worker("d0")], {("p0", "d0"): "quarantined"})
    after = without_ejected(snapshot, book)
    assert not after.ready
    assert after.excluded_pairs == {("p0", "d0"): "quarantined"}
