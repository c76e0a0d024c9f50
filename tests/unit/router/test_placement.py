"""Who is left out, why, and who is picked, over snapshots made by hand."""

from dataclasses import replace

import pytest

from baton.errors import Overloaded, Unavailable
from baton.v1 import common_pb2, worker_pb2
from router.fleet.snapshot import SILENT, AssignedPrompt, Snapshot, WorkerView
from router.placement.placement import pick, predicted_ttft_s, rank_all, span_attributes

from .snapshots import BLOCK, PROMPT, fleet, needs, worker


def picked(prefill, decode, request=None, excluded=None, **avoid):
    return pick(fleet(prefill, decode, excluded), request or needs(), **avoid).names


def refusal(prefill, decode, request=None, **more):
    """What is said of the only pair there is."""
    (choice,) = rank_all(fleet([prefill], [decode], **more), request or needs())
    return choice.refused


# Workers that cannot be used.


def test_a_kv_mismatch_names_both_sides_even_when_decode_is_full():
    with pytest.raises(Unavailable, match="no prefill and decode worker have comp") as caught:
        picked([worker("p0", dtype="bf16")], [worker("d0", blocks_free=0)])
    assert all(said in str(caught.value) for said in ("p0", "d0", "bf16", "float32"))
    told = refusal(worker("p0", dtype="bf16"), worker("d0"))
    assert all(said in told for said in ("incompatible", "p0", "d0", "bf16", "float32"))


def test_a_record_without_kv_harms_nobody_else():
    bare = WorkerView(common_pb2.WorkerRecord(incarnation="d0"), worker_pb2.Load(), "READY")
    assert picked([worker("p0")], [bare, worker("d1")]) == ("p0", "d1")


def test_an_excluded_pair_is_passed_over_whatever_it_costs():
    prefill, decode = [worker("p0")], [worker("d0"), worker("d1", running=9)]
    assert picked(prefill, decode, excluded={("p0", "d0"): "transfers fail"}) == ("p0", "d1")
    assert picked(prefill, decode, excluded={("d0", "p0"): "other way round"}) == ("p0", "d0")


# Workers without room.


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
    full = worker("d0", blocks_free=free, blocks_cached=cached)
    assert (refusal(worker("p0"), full, needs(num_tokens)) == "") is fits


def test_blocks_shared_with_a_running_sequence_are_not_needed_again():
    """Two of four blocks match; those that the pool keeps unheld are counted as available."""
    prompt = tuple(range(12))
    shared = prompt[:8]
    for unheld, free, fits in ((0, 2, True), (0, 1, False), (1, 2, True), (2, 1, False)):
        decode = worker("d0", caches=shared, blocks_free=free, blocks_cached=unheld, blocks_held=8)
        assert (refusal(worker("p0"), decode, needs(prompt)) == "") is fits, (unheld, free)


@pytest.mark.parametrize(
    "load", [{"running": 9}, {"running": 4, "waiting": 5}, {"sequences": 9, "running": 2}]
)
def test_a_full_batch_takes_no_more(load):
    told = refusal(worker("p0"), worker("d0", max_batch=8, **load))
    assert told == "d0 has 9 sequences for a batch of 8"


def test_a_batch_is_given_a_little_more_than_it_holds_so_that_places_are_taken_at_once():
    assert refusal(worker("p0"), worker("d0", max_batch=8, running=8)) == ""
    assert refusal(worker("p0"), worker("d0", max_batch=64, running=71)) == ""
    assert refusal(worker("p0"), worker("d0", max_batch=64, running=72)) != ""
    assert refusal(worker("p0"), worker("d0", running=1000)) == "", "it told no limit"


def test_a_worker_that_refused_is_never_taken():
    decode = [worker("d0"), worker("d1", running=9)]
    assert picked([worker("p0")], decode, full={"d0"}) == ("p0", "d1")
    with pytest.raises(Overloaded, match=r"d0 refused just now; d1 refused just now"):
        picked([worker("p0")], decode, full={"d0", "d1"})


def test_a_prefill_worker_with_enough_to_do_is_given_no_more():
    busy = worker("p0", tokens=512, queue_tokens=512, chunk_tokens=256)
    told = refusal(busy, worker("d0"))
    assert told == "p0 has 512 tokens to compute first and is given no more than 512 ahead"
    assert refusal(worker("p0", tokens=511, chunk_tokens=256), worker("d0")) == ""
    assert refusal(worker("p0", tokens=1023), worker("d0")) == "", "chunks of 512, not told"


def test_a_fast_prefill_worker_with_short_chunks_is_given_a_moment_of_work():
    fast = {"chunk_tokens": 64, "prefill_tokens_per_s": 50_000}
    assert refusal(worker("p0", tokens=4999, **fast), worker("d0")) == ""
    assert refusal(worker("p0", tokens=5000, **fast), worker("d0")) != ""


def test_what_goes_later_does_not_fill_the_window():
    """A long prompt that may wait does not keep a short one waiting in the router."""
    late = replace(worker("p0", queue_tokens=9000), assigned=(AssignedPrompt(9000, 7.0),))
    assert refusal(late, worker("d0"), needs(virtual_finish=6.0)) == ""
    assert "9000 tokens to compute first" in refusal(late, worker("d0"), needs(virtual_finish=8.0))


def test_prompts_of_other_routers_are_all_ahead():
    others = replace(worker("p0", queue_tokens=3000), assigned=(AssignedPrompt(1000, 7.0),))
    assert "2000 tokens to compute first" in refusal(
        others, worker("d0"), needs(virtual_finish=6.0)
    )


def test_a_prefill_worker_whose_pool_is_held_takes_no_more():
    """Blocks of prompts whose handoff hangs: another worker has some."""
    stuck = worker("p0", blocks_free=1, blocks_held=9)
    assert refusal(stuck, worker("d0")) == "p0 has 1 KV blocks available and 3 are needed"
    assert picked([stuck, worker("p1", queue_tokens=500)], [worker("d0")]) == ("p1", "d0")
    assert refusal(worker("p0", blocks_free=0), worker("d0")) == "", "nothing is held there"


def test_no_room_anywhere_is_overloaded_with_what_is_missing():
    prefill = [worker("p0", tokens=5000)]
    with pytest.raises(Overloaded) as caught:
        picked(prefill, [worker("d0", blocks_free=1), worker("d1", running=9, max_batch=8)])
    told = str(caught.value)
    assert "no room for 8 tokens" in told and caught.value.retry_after_s > 0
    assert "d0 has 1 KV blocks" in told and "d1 has 9 sequences" in told
    assert told.count("p0 has 5000 tokens") == 1, "each reason once"


def test_a_large_fleet_is_not_told_in_full():
    decode = [worker(f"d{i}", blocks_free=0) for i in range(40)]
    with pytest.raises(Overloaded) as caught:
        picked([worker("p0")], decode)
    assert "and 32 more" in str(caught.value) and str(caught.value).count("KV blocks") == 8


def test_where_decode_prefills_nobody_waits_for_a_prefill_worker():
    """A prompt that decode caches does not wait behind long ones."""
    full, decode = worker("p0", tokens=5000), worker("d0", caches=PROMPT)
    assert pick(fleet([full], [decode]), needs(local_prefill_max_tokens=4)).decode_prefills
    with pytest.raises(Overloaded):
        pick(fleet([full], [worker("d0")]), needs(local_prefill_max_tokens=4))


# Workers that failed this request.


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


# What is told of a choice.


def test_all_pairs_are_judged_best_first_and_refused_ones_last():
    prefill = [worker("p0", "DRAINING"), worker("p1", queue_tokens=400), worker("p2")]
    choices = rank_all(fleet(prefill, [worker("d0", running=3), worker("d1")]), needs())
    assert len(choices) == 6
    assert [choice.names for choice in choices[:2]] == [("p2", "d1"), ("p2", "d0")]
    assert [bool(choice.refused) for choice in choices] == [False] * 4 + [True] * 2
    scores = [choice.score_ms for choice in choices[:4]]
    assert scores == sorted(scores)


def test_the_best_of_all_is_what_is_picked():
    prefill = [worker("p0", queue_tokens=700), worker("p1", caches=PROMPT)]
    snapshot = fleet(prefill, [worker("d0", running=3), worker("d1", "STALLED")])
    first = rank_all(snapshot, needs())[0]
    chosen = pick(snapshot, needs())
    assert replace(first, candidates=0) == replace(chosen, candidates=0)
    assert chosen.candidates == 2, "pairs that it was chosen from"


def test_a_choice_is_told_to_spans_in_plain_values():
    chosen = pick(fleet([worker("p0", caches=PROMPT)], [worker("d0", host_id="far")]), needs())
    told = span_attributes(chosen)
    assert told["prefill_cached_tokens"] == 4 and told["same_host"] is False
    assert told["candidates"] == 1 and told["decode_prefills"] is False
    assert told["predicted_ttft_ms"] == pytest.approx(chosen.ttft_s * 1e3, abs=0.001)
    assert all(isinstance(value, str | int | float) for value in told.values())


# Feasibility.


def test_the_prediction_is_of_the_pair_that_is_fastest_to_a_first_token():
    rate = {"prefill_tokens_per_s": 1000}
    prefill = [worker("p0", queue_tokens=500, **rate), worker("p1", queue_tokens=200, **rate)]
    told = predicted_ttft_s(fleet(prefill, [worker("d0")]), needs(100))
    assert told == pytest.approx(0.3, abs=0.01)


def test_pairs_that_are_full_now_count_and_unusable_ones_do_not():
    rate = {"prefill_tokens_per_s": 1000}
    full = worker("p0", queue_tokens=5000, **rate)
    assert predicted_ttft_s(fleet([full], [worker("d0")]), needs(100)) == pytest.approx(
        5.1, abs=0.1
    )
    down = [worker("p1", "SILENT", **rate), full]
    assert predicted_ttft_s(fleet(down, [worker("d0")]), needs(100)) > 5


def test_nothing_is_predicted_before_anything_is_measured():
    assert predicted_ttft_s(fleet([worker("p0", queue_tokens=999)], [worker("d0")]), needs()) == 0
    measured = worker("p1", "DRAINING", prefill_tokens_per_s=100)
    assert predicted_ttft_s(fleet([worker("p0"), measured], [worker("d0")]), needs()) == 0
    assert predicted_ttft_s(fleet([measured], [worker("d0")]), needs()) == 0


# Snapshots.


def test_the_context_is_what_every_ready_decode_worker_takes():
    decode = [
        worker("d0", max_context=64),
        worker("d1", max_context=32),
        worker("d2", "DRAINING", max_context=8),
    ]
    assert fleet([], decode).max_context == 32
    assert fleet([worker("p0")], [decode[2]]).max_context == 0


def test_a_prompt_is_hashed_once_and_only_where_somebody_caches(monkeypatch):
    hashed = []
    monkeypatch.setattr(
        "router.placement.cost_model.hash_chain", lambda *asked: hashed.append(asked) or []
    )
    request = needs()
    pick(fleet([worker("p0")], [worker("d0")]), request)
    assert not hashed
    caching = fleet([worker("p0", caches=PROMPT)], [worker("d0", caches=PROMPT)])
    pick(caching, request)
    pick(caching, request)
    assert hashed == [(PROMPT, BLOCK, "")]


def test_thousands_of_workers_that_are_not_ready_make_no_million_pairs():
    ghosts = [worker(f"ghost{i:04}", "UNREACHABLE", "nobody is there") for i in range(1500)]
    snapshot = fleet([*ghosts, worker("p0")], [*ghosts, worker("d0")])
    assert pick(snapshot, needs()).names == ("p0", "d0")
    assert len(rank_all(snapshot, needs())) < 500
    assert [(p.incarnation, d.incarnation) for p, d in snapshot.usable_pairs()] == [("p0", "d0")]


# Why requests cannot be served.


def test_one_usable_pair_is_enough():
    others = worker("p1", SILENT), worker("d1", dtype="bfloat16")
    snapshot = Snapshot((others[0], worker("p0")), (others[1], worker("d0")))
    assert snapshot.ready
    assert snapshot.why_not_ready == ""
    assert [(p.incarnation, d.incarnation) for p, d in snapshot.usable_pairs()] == [("p0", "d0")]


@pytest.mark.parametrize(
    ("prefill", "decode", "excluded", "why"),
    [
        ([], [worker("d0")], {}, "no prefill worker is ready (none is registered)"),
        ([worker("p0")], [], {}, "no decode worker is ready (none is registered)"),
        (
            [worker("p0")],
            [worker("d0", SILENT, "no heartbeat"), worker("d1", "DRAINING")],
            {},
            "no decode worker is ready (d0 is SILENT: no heartbeat; d1 is DRAINING)",
        ),
        (
            [worker("p0")],
            [worker("d0", dtype="bfloat16")],
            {},
            "no prefill and decode worker have compatible KV caches: "
            "prefill worker p0 has dtype=float32, decode worker d0 has dtype=bfloat16",
        ),
        (
            [worker("p0", quantization="int8")],
            [worker("d0")],
            {},
            "no prefill and decode worker have compatible KV caches: "
            "prefill worker p0 has quantization=int8, decode worker d0 has quantization=none",
        ),
        (
            [worker("p0")],
            [worker("d0")],
            {("p0", "d0"): "quarantined"},
            "no prefill worker that is ready can hand over to a decode worker"
            " (p0 to d0: quarantined)",
        ),
    ],
)
def test_what_is_missing_is_said(prefill, decode, excluded, why):
    snapshot = Snapshot(tuple(prefill), tuple(decode), excluded)
    assert not snapshot.ready
    assert snapshot.why_not_ready == why


def test_of_thousands_that_are_not_ready_a_few_are_told():
    many = tuple(worker(f"p{i:04}", SILENT, "it is not there") for i in range(2000))
    why = Snapshot(many, many).why_not_ready
    assert why.startswith("no prefill worker is ready (p0000 is SILENT: it is not there; p0001")
    assert why.endswith("; and 1992 more)") and len(why) < 1000
