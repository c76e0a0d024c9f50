"""Filter, score and pick, over snapshots made by hand."""

import pytest

from baton.errors import Overloaded, Unavailable
from baton.v1 import common_pb2, worker_pb2
from router.placement import has_room, pick, score
from router.snapshot import Assigned, Snapshot, WorkerView

BLOCK = 4


def worker(name, state="READY", reason="", tokens=0, sequences=0, dtype="f32", **load):
    kv = common_pb2.KvDescriptor(block_size=BLOCK, dtype=dtype)
    record = common_pb2.WorkerRecord(incarnation=name, kv=kv, max_context=load.pop("context", 64))
    load = {"blocks_total": 10, "blocks_free": 10, **load}
    assigned = (Assigned(tokens, 0.0),) if tokens else ()
    return WorkerView(record, worker_pb2.Load(**load), state, reason, assigned, sequences)


def fleet(prefill, decode):
    return Snapshot(tuple(prefill), tuple(decode))


def picked(prefill, decode, num_tokens=8, **avoid):
    pair = pick(fleet(prefill, decode), num_tokens, **avoid)
    return pair.prefill.incarnation, pair.decode.incarnation


@pytest.mark.parametrize("state", ["STARTING", "DRAINING", "UNREACHABLE", "MISMATCH"])
def test_only_ready_workers_are_picked(state):
    prefill = [worker("p0", state), worker("p1", queue_tokens=1000)]
    decode = [worker("d0", state), worker("d1", running=50)]
    assert picked(prefill, decode) == ("p1", "d1")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_role_without_a_ready_worker_says_what_is_there(role):
    workers = {"prefill": [worker("p0")], "decode": [worker("d0")]}
    workers[role] = [worker("w0", "UNREACHABLE", "connection refused"), worker("w1", "DRAINING")]
    told = f"no {role} worker is ready .*w0 is UNREACHABLE: connection refused.*w1 is DRAINING"
    with pytest.raises(Unavailable, match=told) as caught:
        picked(**workers)
    assert caught.value.retry_after_s > 0


def test_an_empty_role_says_so():
    with pytest.raises(Unavailable, match=r"no prefill worker is ready \(none registered\)"):
        picked([], [worker("d0")])


@pytest.mark.parametrize(
    ("num_tokens", "free", "cached", "fits"),
    [
        (7, 2, 0, True),  # two blocks, the second with room for the next token
        (8, 2, 0, False),  # full blocks: the next token needs a third
        (8, 3, 0, True),
        (8, 1, 2, True),  # cached blocks can be given up
        (1, 0, 0, False),
    ],
)
def test_room_is_for_the_sequence_and_its_next_token(num_tokens, free, cached, fits):
    assert has_room(worker("d", blocks_free=free, blocks_cached=cached), num_tokens) is fits


def test_a_decode_worker_without_room_is_passed_over():
    decode = [worker("d0", blocks_free=1), worker("d1", running=9)]
    assert picked([worker("p0")], decode) == ("p0", "d1")


def test_no_room_anywhere_is_overloaded_with_advice():
    with pytest.raises(Overloaded, match="8 tokens") as caught:
        picked([worker("p0")], [worker("d0", blocks_free=1), worker("d1", blocks_free=2)])
    assert caught.value.retry_after_s > 0


def test_workers_that_failed_are_avoided_while_there_are_others():
    prefill = [worker("p0"), worker("p1", queue_tokens=1000)]
    decode = [worker("d0"), worker("d1", running=50)]
    assert picked(prefill, decode, failed={"p0", "d0"}) == ("p1", "d1")
    assert picked(prefill, decode, failed={"p0"}) == ("p1", "d0")


def test_workers_that_failed_are_taken_when_there_are_no_others():
    assert picked([worker("p0")], [worker("d0")], failed={"p0", "d0"}) == ("p0", "d0")


def test_a_failed_worker_with_room_is_better_than_none():
    decode = [worker("d0", blocks_free=0), worker("d1")]
    assert picked([worker("p0")], decode, failed={"d1"}) == ("p0", "d1")
    decode = [worker("d0"), worker("d1")]
    assert picked([worker("p0")], decode, failed={"d1"}, full={"d0"}) == ("p0", "d1")


def test_a_worker_that_refused_is_never_taken():
    decode = [worker("d0"), worker("d1", running=9)]
    assert picked([worker("p0")], decode, full={"d0"}) == ("p0", "d1")
    with pytest.raises(Overloaded):
        picked([worker("p0")], decode, full={"d0", "d1"})


def test_pairs_have_the_same_kv():
    prefill = [worker("p0", dtype="bf16", queue_tokens=1000), worker("p1")]
    assert picked(prefill, [worker("d0", dtype="bf16")]) == ("p0", "d0")


def test_failed_workers_are_the_last_resort_of_their_kind_of_kv():
    prefill = [worker("p0", dtype="bf16"), worker("p1")]
    decode = [worker("d0", dtype="bf16"), worker("d1")]
    assert picked(prefill, decode, failed={"p0", "d1"}) in {("p0", "d0"), ("p1", "d1")}


def test_a_kv_mismatch_names_both_sides_even_when_decode_is_full():
    with pytest.raises(Unavailable, match="compatible") as caught:
        picked([worker("p0", dtype="bf16")], [worker("d0", blocks_free=0)])
    assert all(said in str(caught.value) for said in ("p0", "d0", "bf16", "f32"))


def test_a_record_without_kv_harms_nobody_else():
    bare = WorkerView(common_pb2.WorkerRecord(incarnation="d0"), worker_pb2.Load(), "READY")
    assert picked([worker("p0")], [bare, worker("d1")]) == ("p0", "d1")


def test_prefill_is_chosen_by_the_tokens_in_front():
    prefill = [
        worker("p0", queue_tokens=100),
        worker("p1", queue_tokens=20),
        worker("p2", tokens=50),
    ]
    assert picked(prefill, [worker("d0")]) == ("p1", "d0")


def test_what_was_just_assigned_counts_before_it_is_reported():
    assert (
        picked([worker("p0", tokens=30), worker("p1", queue_tokens=20)], [worker("d0")])[0] == "p1"
    )
    assert picked([worker("p0")], [worker("d0", sequences=3), worker("d1", running=2)])[1] == "d1"


def test_decode_is_chosen_by_sequences_then_by_blocks():
    decode = [worker("d0", running=1, waiting=2), worker("d1", running=2)]
    assert picked([worker("p0")], decode)[1] == "d1"
    decode = [worker("d0", running=2, blocks_held=5), worker("d1", running=2, blocks_held=2)]
    assert picked([worker("p0")], decode)[1] == "d1"


def test_equals_are_chosen_by_name_and_score_survives_an_empty_load():
    decode = [worker("d1", blocks_total=0), worker("d0", blocks_total=0)]
    assert picked([worker("p1"), worker("p0")], decode) == ("p0", "d0")
    pair = pick(fleet([worker("p0")], decode), 1)
    assert score(pair) == (0, 0, 0.0, "p0", "d0")


def test_a_snapshot_is_ready_with_a_worker_of_each_role():
    ready, down = worker("a"), worker("b", "UNREACHABLE")
    assert fleet([ready, down], [ready]).ready
    assert not fleet([ready], [down]).ready
    assert not fleet([down], [ready]).ready
    assert not fleet([], []).ready


def test_the_context_is_what_every_ready_decode_worker_takes():
    decode = [
        worker("d0", context=64),
        worker("d1", context=32),
        worker("d2", "DRAINING", context=8),
    ]
    assert fleet([], decode).max_context == 32
    assert fleet([worker("p0")], [decode[2]]).max_context == 0
