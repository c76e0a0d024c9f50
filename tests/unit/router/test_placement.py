"""Which workers are left out and why, what pairs cost, and which is picked, over made-up fleets."""

import itertools
from dataclasses import replace

import pytest

from baton.block_hash import block_hash
from baton.errors import Overloaded, Unavailable
from baton.v1 import common_pb2, worker_pb2
from router.fleet.kv_index import AssignedPrompt
from router.fleet.snapshot import SILENT, WorkerView
from router.placement.cost_model import Costs
from router.placement.room import soonest_room
from router.placement.scoring import pick, predict, rank_all

from .snapshots import INDEX, PROMPT, fleet, needs, prefill_views, usable_pairs, worker

RATE = {"prefill_tokens_per_s": 1000}
POOL = {"blocks_total": 10_000, "blocks_free": 10_000}
HANDOFF_S = 0.003
LONG = tuple(range(100))


def picked(prefill, decode, request=None, **avoid):
    return pick(fleet(prefill, decode), request or needs(), **avoid).names


def only(prefill, decode, request=None):
    """The pair of these two; before it comes the prefill worker alone where it keeps sequences."""
    return rank_all(fleet([prefill], [decode]), request or needs(100))[-1]


def refusal(prefill=None, decode=None, request=None):
    """What keeps the only pair there is from being picked."""
    return only(prefill or worker("p0"), decode or worker("d0"), request or needs()).refused


def assigned(view, tokens, virtual_finish):
    return replace(view, assigned=(AssignedPrompt(tokens, virtual_finish),))


# Workers that cannot be used.


@pytest.mark.parametrize(
    ("prefill", "decode", "excluded", "why"),
    [
        ([], [], {}, "no worker is ready (none is registered)"),
        ([], [worker("d0")], {}, "no prefill worker is ready (none is registered)"),
        (
            [worker("p0")],
            [
                replace(worker("d0", SILENT, "no heartbeat"), suspected=True),
                worker("d1", "DRAINING"),
            ],
            {},
            "no decode worker is ready (d0 is SILENT: no heartbeat; d1 is DRAINING)",
        ),
        (
            [worker("p0", dtype="bf16")],
            [worker("d0", blocks_free=0)],  # said even when decode is full
            {},
            "no prefill and decode worker have compatible KV caches: "
            "prefill worker p0 and decode worker d0 differ in dtype: 'bf16' != 'float32'",
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
def test_without_a_usable_pair_the_router_says_what_is_missing(prefill, decode, excluded, why):
    snapshot = fleet(prefill, decode, excluded)
    assert snapshot.why_not_ready == why
    with pytest.raises(Unavailable) as caught:
        pick(snapshot, needs())
    assert str(caught.value) == why
    assert all(pair.refused for pair in rank_all(snapshot, needs()))


def test_without_prefill_workers_decode_workers_compute_any_prompt():
    """The least busy one with room; each way of asking gives the same."""
    busy = {"running": 4, "step_ms": 10, **POOL, **RATE}
    decode = [worker("d0", **busy), worker("d1", **busy | {"running": 1})]
    snapshot = fleet([worker("p0", SILENT)], [*decode, worker("d2", blocks_free=1)], None, True)
    request = needs(5000, local_prefill_max_tokens=4)
    assert snapshot.why_not_ready == "" and snapshot.prefill_rate > 0
    (prefill,) = prefill_views(snapshot)
    suspected = replace(prefill, suspected=True)
    assert snapshot.replaced([suspected]).why_not_ready, "it may be back at once"
    assert snapshot.replaced([suspected]).replaced([prefill]).alone.any()
    pair = pick(snapshot, request)
    assert (pair.decode.incarnation, pair.decode_prefills, pair.alone) == ("d1", True, True)
    assert pair.local_prefill_max_tokens == 5000 and pair.candidates == 3
    assert predict(snapshot, request) == (pair.ttft_s, True) and 5 < pair.ttft_s < 6
    assert pick(snapshot, request, failed={"d1"}).decode.incarnation == "d0"
    ranked = rank_all(snapshot, request)
    assert [one.decode.incarnation for one in ranked if not one.refused] == ["d1", "d0"]
    assert "KV blocks available" in ranked[2].refused
    with pytest.raises(Overloaded, match="no room for 5000 tokens"):
        pick(snapshot, request, full={"d0", "d1"})
    full = fleet([], [worker("d0", **{**POOL, "blocks_free": 5}), worker("d1")], None, True)
    assert soonest_room(full, request) == {"d0"}, "the pool of the other one is too small"
    assert soonest_room(fleet([], [worker("d1")], None, True), request) is None
    prompt_alone = pick(snapshot, replace(request, decodes=False))
    assert prompt_alone.alone and not prompt_alone.decode_prefills


def test_without_decode_workers_prefill_workers_serve_alone():
    snapshot = fleet([worker("p0", tokens=400, **RATE), worker("p1", **RATE)], [])
    assert snapshot.why_not_ready == ""
    for request, generates in ((needs(decodes=False), False), (needs(), True)):
        pair = pick(snapshot, request)
        assert (pair.prefill.incarnation, pair.alone, pair.decode_prefills) == (
            "p1", True, generates,
        )  # fmt: skip


def test_sequences_are_kept_on_prefill_workers_while_decode_workers_are_full():
    full = worker("d0", running=9, max_batch=8)
    pair = pick(fleet([worker("p0", **RATE)], [full]), needs())
    assert (pair.names, pair.alone, pair.decode_prefills) == (("p0", "p0"), True, True)
    assert picked([worker("p0", **RATE)], [worker("d0", **RATE)]) == ("p0", "d0")
    slow = worker("p0", running=1, step_ms=100.0, **RATE)
    with pytest.raises(Overloaded):
        pick(fleet([slow], [full]), needs(max_itl_s=0.05))


def test_one_usable_pair_is_enough():
    bare = WorkerView(common_pb2.WorkerRecord(incarnation="d1"), worker_pb2.Load(), "READY")
    decode = [bare, worker("d2", dtype="bfloat16", max_context=8), worker("d0", max_context=32)]
    snapshot = fleet([worker("p1", SILENT), worker("p0")], decode)
    assert snapshot.why_not_ready == ""
    assert usable_pairs(snapshot) == {("p0", "d0")} and snapshot.num_usable == 1
    assert pick(snapshot, needs()).names == ("p0", "d0")
    ready = fleet([], [worker("d0", max_context=32), worker("d1", "DRAINING", max_context=8)])
    assert ready.max_context == 32, "what every ready worker takes"
    ready = fleet([worker("p0", max_context=24), worker("p1", SILENT, max_context=8)], decode[2:])
    assert ready.max_context == 24, "also to go on behind the tokens of one that died"


def test_thousands_of_workers_that_are_not_ready_cost_little():
    ghosts, others = (
        [worker(f"{name}{i:04}", "UNREACHABLE", "gone") for i in range(1500)]
        for name in ("ghost", "other")
    )
    snapshot = fleet([*ghosts, worker("p0")], [*others, worker("d0")])
    assert pick(snapshot, needs()).names == ("p0", "d0")
    assert len(rank_all(snapshot, needs())) < 500
    why = fleet(ghosts, others).why_not_ready
    assert why.startswith("no prefill worker is ready (ghost0000 is UNREACHABLE: gone; ghost0001")
    assert why.endswith("; and 1492 more)") and len(why) < 1000


@pytest.mark.parametrize(
    ("prefill", "decode", "excluded"),
    [
        ({}, {}, 0),
        ({"tokens": 5000}, {"caches": PROMPT}, 0),  # full, and decode may prefill
        ({}, {"caches": PROMPT}, 40),
    ],
)
def test_few_of_many_pairs_are_looked_at(monkeypatch, prefill, decode, excluded):
    """Walking all pairs of 64 and 64 workers took a router's loop 130 ms for each request."""
    looks, pair_costs = [], Costs.pair_costs
    monkeypatch.setattr(Costs, "pair_costs", lambda *args: looks.append(args) or pair_costs(*args))
    size = range(100, 200)
    p = [worker(f"p{i}", host_id=f"h{i % 30}", **RATE, **prefill) for i in size]
    d = [worker(f"d{i}", host_id=f"h{i % 40}", step_ms=i, **decode) for i in size]
    pairs = {(f"p{100 + i}", f"d{100 + i % 7}"): "quarantined" for i in range(excluded)}
    request = needs(local_prefill_max_tokens=1)
    try:
        assert pick(fleet(p, d, pairs), request).candidates == 10_000 - excluded
    except Overloaded:
        assert prefill
    assert len(looks) <= 3 + excluded


# Workers without room.


def missing(available, needed, name="d0"):
    return f"{name} has {available} KV blocks available and {needed} are needed"


def ahead(tokens, most):
    return f"p0 has {tokens} tokens to compute first and is given at most {most} ahead"


FAST = {"chunk_tokens": 64, "prefill_tokens_per_s": 50_000}
STATE = {"state_blocks": 3}
SHARED = {"caches": LONG[:8], "blocks_held": 8}  # two of four blocks match


@pytest.mark.parametrize(
    ("prefill", "decode", "request_", "said"),
    [
        # Blocks for the sequence and its next token; cached ones can be given up.
        ({}, {"blocks_free": 2}, needs(7), ""),
        ({}, {"blocks_free": 2}, needs(8), missing(2, 3)),
        ({}, {"blocks_free": 3}, needs(8), ""),
        ({}, {"blocks_free": 1, "blocks_cached": 2}, needs(8), ""),
        ({}, {"blocks_free": 0}, needs(1), missing(0, 1)),
        # And blocks for the state, in models that have one.
        (STATE, {"blocks_free": 5, **STATE}, needs(8), missing(5, 6)),
        (STATE, {"blocks_free": 6, **STATE}, needs(8), ""),
        # Blocks shared with a running sequence are not needed again; those that the pool keeps
        # unheld are counted as available.
        ({}, {"blocks_free": 2, **SHARED}, needs(LONG[:12]), ""),
        ({}, {"blocks_free": 1, **SHARED}, needs(LONG[:12]), missing(1, 2)),
        ({}, {"blocks_free": 2, "blocks_cached": 1, **SHARED}, needs(LONG[:12]), ""),
        ({}, {"blocks_free": 1, "blocks_cached": 2, **SHARED}, needs(LONG[:12]), missing(3, 4)),
        # A batch, and a little more, so that places are taken at once.
        ({}, {"max_batch": 8, "running": 8}, needs(), ""),
        ({}, {"max_batch": 8, "running": 9}, needs(), "d0 has 9 sequences for a batch of 8"),
        ({}, {"max_batch": 8, "running": 4, "waiting": 5}, needs(), "d0 has 9 sequences for "),
        ({}, {"max_batch": 8, "sequences": 9, "running": 2}, needs(), "d0 has 9 sequences for "),
        ({}, {"max_batch": 64, "running": 71}, needs(), ""),
        ({}, {"max_batch": 64, "running": 72}, needs(), "d0 has 72 sequences for a batch of 64"),
        ({}, {"running": 1000}, needs(), ""),  # no limit is known
        # Two chunks on a prefill worker, or a tenth of a second of work where they are short.
        ({"tokens": 512, "chunk_tokens": 256}, {}, needs(), ahead(512, 512)),
        ({"tokens": 511, "chunk_tokens": 256}, {}, needs(), ""),
        ({"tokens": 4999, **FAST}, {}, needs(), ""),
        ({"tokens": 5000, **FAST}, {}, needs(), ahead(5000, 5000)),
        # A prefill pool that is held, by handoffs that hang; one that is not held is just small.
        ({"blocks_free": 1, "blocks_held": 9}, {}, needs(), missing(1, 3, "p0")),
        ({"blocks_free": 0}, {}, needs(), ""),
    ],
)
def test_a_pair_without_room_says_why(prefill, decode, request_, said):
    refused = refusal(worker("p0", **prefill), worker("d0", **decode), request_)
    assert refused.startswith(said) and bool(refused) is bool(said)


def test_what_finishes_later_does_not_fill_the_window():
    """A long prompt that may wait does not keep a short one in the router; other routers' may."""
    late = assigned(worker("p0", queue_tokens=9000), 9000, 7.0)
    assert refusal(late, request=needs(virtual_finish=6.0)) == ""
    assert "9000 tokens to compute first" in refusal(late, request=needs(virtual_finish=8.0))
    others = assigned(worker("p0", queue_tokens=3000), 1000, 7.0)
    assert "2000 tokens to compute first" in refusal(others, request=needs(virtual_finish=6.0))


def test_no_room_anywhere_is_overloaded_with_each_reason_once():
    full = [worker("d0", blocks_free=1), worker("d1", running=9, max_batch=8), worker("d2")]
    with pytest.raises(Overloaded) as caught:
        picked([worker("p0", tokens=5000)], full, full={"d2"})
    said = str(caught.value)
    assert "no room for 8 tokens" in said and caught.value.retry_after_s > 0
    for reason in ("d0 has 1 KV blocks", "d1 has 9 seq", "d2 refused just now", "p0 has 5000 tok"):
        assert said.count(reason) == 1
    with pytest.raises(Overloaded) as caught:
        picked([worker("p0", tokens=5000)], [worker(f"d{i}", blocks_free=0) for i in range(40)])
    assert "and 33 more" in str(caught.value) and str(caught.value).count("KV blocks") == 8


def test_the_workers_kept_for_a_request_are_those_of_the_pair_that_has_room_first():
    """It needs 8 blocks of 10; of most workers one more block has to become free than of `sooner`.

    Workers with few sequences, slow steps or no pair are no better.
    """

    def decode(name, available, **fields):
        fields = {"running": 1, "step_ms": 10.0, **fields}
        return worker(name, blocks_free=available, blocks_held=10 - available, **fields)

    small = decode("small", 0, blocks_total=7)  # never
    others = [decode(f"d{at}", 6) for at in range(2)]
    sooner, slow = decode("sooner", 7), decode("slow", 7, step_ms=1000.0)
    other_kv = decode("other", 7, dtype="bf16", step_ms=0.1)
    prefill, request = worker("p0"), needs(28)

    def kept(*decodes, prefill=prefill, before=()):
        return soonest_room(fleet([prefill], decodes), request, frozenset(before))

    assert kept(*others, sooner, slow, small, other_kv) == {"sooner"}
    assert kept(*others, sooner, before={"d1"}) == {"d1"}, "room gathers there already"
    gone = replace(others[0], state=SILENT)
    assert kept(gone, sooner, before={"d0"}) == {"sooner"}
    assert kept(small, other_kv) is None
    busy = decode("busy", 10, max_batch=8, running=9)
    assert kept(busy, small) == {"busy"}
    full = worker("p0", blocks_free=2, blocks_held=8)
    assert kept(*others, sooner, prefill=full) == {"sooner", "p0"}
    in_order = worker("p0", queue_tokens=5000)
    assert kept(decode("d0", 10), prefill=in_order) == frozenset(), "what goes first is in its way"
    with pytest.raises(Overloaded, match="reserved for another request"):
        picked([prefill], [decode("sooner", 9)], full={"p0"})


def test_where_decode_prefills_a_full_prefill_worker_does_not_matter():
    """A prompt that decode caches does not wait behind long ones; it may need the emptiest."""
    full, decode = worker("p0", tokens=5000), worker("d0", caches=PROMPT)
    assert pick(fleet([full], [decode]), needs(local_prefill_max_tokens=4)).decode_prefills
    assert refusal(full), "where it may not"
    prefill = [worker("p0", queue_tokens=50), worker("p1", queue_tokens=5)]
    pair = pick(fleet(prefill, [worker("d0")]), needs(8, local_prefill_max_tokens=16))
    assert pair.decode_prefills and pair.names == ("p1", "d0")


def test_workers_that_failed_this_request_are_avoided_while_there_are_others():
    prefill = [worker("p0"), worker("p1", queue_tokens=1000)]
    decode = [worker("d0"), worker("d1", running=50)]
    assert picked(prefill, decode, failed={"p0", "d0"}) == ("p1", "d1")
    assert picked(prefill, decode, failed={"p0"}) == ("p1", "d0")
    assert picked(prefill[:1], decode[:1], failed={"p0", "d0"}) == ("p0", "d0")
    assert picked(prefill, [worker("d0", blocks_free=0), decode[1]], failed={"d1"})[1] == "d1"
    assert picked(prefill, decode, failed={"d1"}, full={"d0"})[1] == "d1"


# Time to first token.


@pytest.mark.parametrize(
    ("prefill", "request_", "ttft_s"),
    [
        (worker("p0", queue_tokens=300, **RATE), needs(100), 0.4),
        (worker("p0", queue_tokens=300, prefill_tokens_per_s=4000), needs(100), 0.1),
        (worker("p0", caches=LONG[:81], **RATE), needs(LONG), 0.02),  # whole blocks
        (worker("p0", caches=LONG, salt="other", **RATE), needs(LONG, cache_salt="own"), 0.1),
        (worker("p0", caches=LONG, salt="own", **RATE), needs(LONG, cache_salt="own"), 0.004),
        # Half a chunk of what goes later may be running.
        (assigned(worker("p0", queue_tokens=900, chunk_tokens=200, **RATE), 900, 7.0),
         needs(100), 0.2),
        (assigned(worker("p0", queue_tokens=60, chunk_tokens=200, **RATE), 60, 7.0),
         needs(100), 0.16),
        (assigned(worker("p0", queue_tokens=900, **RATE), 900, 7.0), needs(100), 0.356),
    ],
)  # fmt: skip
def test_ttft_is_what_is_computed_first_and_the_uncached_rest(prefill, request_, ttft_s):
    pair = only(prefill, worker("d0", caches=LONG[:80], **POOL), request_)
    assert pair.ttft_s == pytest.approx(ttft_s + HANDOFF_S), "what decode caches saves nothing"
    snapshot = fleet([prefill, worker("p1", "SILENT", **RATE)], [worker("d0", **POOL)])
    assert predict(snapshot, request_) == (pytest.approx(ttft_s + HANDOFF_S), True)


def test_the_prediction_is_of_the_fastest_pair_also_where_all_are_full():
    prefill = [worker("p0", queue_tokens=500, **RATE), worker("p1", queue_tokens=200, **RATE)]
    assert predict(fleet(prefill, [worker("d0")]), needs(100))[0] == pytest.approx(0.3, abs=0.01)
    full = fleet([worker("p0", queue_tokens=5000, **RATE)], [worker("d0")])
    assert predict(full, needs(100)) == (pytest.approx(5.1, abs=0.1), False)
    unmeasured = [worker("p0", queue_tokens=9), worker("p1", "DRAINING", **RATE)]
    for prefill in (unmeasured[:1], unmeasured, unmeasured[1:]):
        assert predict(fleet(prefill, [worker("d0")]), needs())[0] == 0


def test_rates_that_are_missing_or_differ_by_noise_are_the_usual_one():
    prefill = [worker("p0", queue_tokens=9), worker("p1", queue_tokens=9, prefill_tokens_per_s=500)]
    first, second = rank_all(fleet(prefill, [worker("d0", **POOL)]), needs(100))
    assert first.ttft_s == second.ttft_s == pytest.approx(0.218 + HANDOFF_S)

    def two(rate, queue):
        prefill = [
            worker("p0", queue_tokens=queue, **RATE),
            worker("p1", prefill_tokens_per_s=rate),
        ]
        return picked(prefill, [worker("d0", **POOL)], needs(100))[0]

    assert two(rate=850, queue=0) == "p0"
    assert two(rate=850, queue=1) == "p1", "not kept busy for its noise"
    assert two(rate=300, queue=100) == "p0", "a slow worker has to be much emptier"
    assert two(rate=300, queue=400) == "p1"


@pytest.mark.parametrize(("ahead", "taken"), [(79, "cached"), (81, "idle")])
def test_affinity_is_bounded_by_load(ahead, taken):
    """A cached prefix is worth the tokens that it saves: 80 here, and not one more."""
    cached = worker("cached", caches=LONG[:80], queue_tokens=ahead, **RATE)
    prefill = [cached, worker("idle", **RATE)]
    assert picked(prefill, [worker("d0", **POOL)], needs(LONG))[0] == taken


@pytest.mark.parametrize(
    ("ahead", "common", "salt", "taken"),
    [
        (0, 4000, "", "busy"),
        (0, 1600, "", "idle"),  # computed in two steps or three
        (6000, 4000, "", "idle"),  # of a worker with much more to compute first
        (0, 4000, "other", "idle"),
    ],
)
def test_a_prompt_goes_where_its_first_tokens_are_in_work(ahead, common, salt, taken):
    tokens = tuple(range(4100))
    first = AssignedPrompt(common + 2, 0.0, (*tokens[:common], 7, 7), salt)
    prompts = first, AssignedPrompt(ahead, 0.0)
    busy = replace(worker("busy", **RATE, **POOL), assigned=prompts, slot=INDEX.join())
    snapshot = fleet([busy, worker("idle", **RATE, **POOL)], [worker("d0", **POOL)])
    INDEX.begin("first", busy.slot, first)
    try:
        pair = pick(snapshot, needs(tokens))
    finally:
        INDEX.end("first", first)
        INDEX.leave(busy.slot)
    assert pair.prefill.incarnation == taken
    assert pair.on_prefill.cached == (4000 if taken == "busy" else 0)
    assert pair.on_prefill.uncached == (100 if taken == "busy" else 4100)


def test_a_burst_of_one_prefix_does_not_pile_up_where_it_is_cached():
    """100 tokens of which 80 are cached: after five or so it is quicker to compute them anew."""
    queues = {"cached": (), "p1": (), "p2": ()}
    for _ in range(24):
        prefill = [
            replace(
                worker(name, caches=LONG[:80] if name == "cached" else (), **RATE), assigned=own
            )
            for name, own in queues.items()
        ]
        pair = pick(fleet(prefill, [worker("d0", **POOL)]), needs(LONG))
        queues[pair.prefill.incarnation] += (AssignedPrompt(pair.on_prefill.uncached, 0.0),)
    waits = {name: sum(item.num_tokens for item in queue) for name, queue in queues.items()}
    assert len(queues["cached"]) > len(queues["p1"]), "it does get more"
    assert max(waits.values()) - min(waits.values()) <= 100, waits


def test_a_prompt_is_hashed_once_and_as_far_as_a_worker_caches_it(monkeypatch):
    hashed = []

    def counted(parent, tokens):
        hashed.append(tokens)
        return block_hash(parent, tokens)

    monkeypatch.setattr("router.request.block_hash", counted)
    prompt, other = tuple(range(1000, 1100)), tuple(range(2000, 2100))
    requests = needs(prompt), needs(other)
    for caching in (worker("d0", caches=prompt[:9]), worker("d0", caches=prompt[:4])):
        for request in requests:
            rank_all(fleet([worker("p0")], [caching]), request)
    assert hashed == [prompt[:4], prompt[4:8], prompt[8:12], other[:4]]


# Time per output token, memory and distance.


@pytest.mark.parametrize(
    ("load", "tpot_s"),
    [
        ({"step_ms": 9}, 0.009),
        ({"step_ms": 18, "running": 10}, 0.019),  # as if eight were there before the first
        ({"step_ms": 18, "running": 10, "sequences": 15}, 0.024),
    ],
)
def test_tpot_is_the_step_with_one_more_sequence(load, tpot_s):
    pair = only(worker("p0"), worker("d0", **load, **POOL))
    assert pair.on_decode.tpot_s == pytest.approx(tpot_s)


def test_slow_decode_workers_get_fewer_sequences_but_not_none():
    def two(slow_runs, fast_runs):
        slow = worker("slow", step_ms=30 * (8 + slow_runs) / 9, running=slow_runs, **POOL)
        fast = worker("fast", step_ms=10 * (8 + fast_runs) / 9, running=fast_runs, **POOL)
        return picked([worker("p0")], [slow, fast])[1]

    assert two(slow_runs=1, fast_runs=5) == "fast"
    assert two(slow_runs=1, fast_runs=25) == "slow"
    # What an idle worker measured with a batch long gone does not keep it idle.
    decode = [worker("idle", step_ms=60, **POOL), worker("busy", step_ms=10, running=2, **POOL)]
    assert picked([worker("p0")], decode)[1] == "idle"


def test_expected_tokens_weigh_tpot_up_to_a_limit():
    decode = worker("d0", step_ms=10, **POOL)
    scores = {
        n: only(worker("p0", **RATE), decode, needs(100, max_new_tokens=n)).score_ms
        for n in (1, 10, 64, 256, 4000, 0)
    }
    assert scores[10] - scores[1] == pytest.approx(90)
    assert scores[4000] == scores[256] and scores[0] == scores[64]


def test_a_pool_that_runs_full_costs_more_the_fuller_it_is():
    def decode(name, free):
        return worker(name, blocks_total=100, blocks_free=free, blocks_held=100 - free)

    scores = [only(worker("p0"), decode("d0", n), needs(8)).score_ms for n in (100, 70, 40, 10)]
    steps = [after - before for before, after in itertools.pairwise(scores)]
    assert 0 < steps[0] < steps[1] < steps[2]
    assert picked([worker("p0")], [decode("d0", 10), decode("d1", 60)], needs(8))[1] == "d1"


@pytest.mark.parametrize(
    ("dtype", "cached", "bytes_"),
    [
        ("float32", 0, 100 * 40_000),
        ("float32", 80, 20 * 40_000),  # only what decode does not cache is sent
        ("bfloat16", 0, 100 * 20_000),
        ("int8", 0, 100 * 10_000 * 129 / 125),  # heads of 125 elements of a byte, and their scale
    ],
)
def test_what_is_sent_takes_its_time_on_the_link(dtype, cached, bytes_):
    def cost_ms(host, handoff_s, bytes_per_s):
        prefill = worker("p0", dtype=dtype, host_id=host, **RATE)
        decode = worker("d0", dtype=dtype, caches=LONG[:cached], host_id="a", **POOL)
        pair = only(prefill, decode, needs(LONG, max_new_tokens=1))
        rest_s = 0.1 + handoff_s + bytes_ / bytes_per_s + pair.on_decode.tpot_s
        assert pair.score_ms == pytest.approx(1e3 * rest_s, abs=0.01)
        assert pair.same_host == (host == "a")
        return pair.score_ms

    assert cost_ms("a", 0.003, 4e9) < cost_ms("b", 0.005, 1e9)


def test_a_state_is_sent_whatever_decode_caches():
    def cost_ms(cached, **kv):
        decode = worker("d0", caches=LONG[:cached], host_id="a", **POOL, **kv)
        prefill = worker("p0", host_id="b", **RATE, **kv)
        return only(prefill, decode, needs(LONG, max_new_tokens=1)).score_ms

    sent_ms = 80 * 40_000 / 1e9 * 1e3
    assert cost_ms(0) - cost_ms(80) == pytest.approx(sent_ms, abs=0.01)
    assert cost_ms(80, **STATE) - cost_ms(80) == pytest.approx(12 / 80 * sent_ms, abs=0.01)


def test_ties_go_to_what_was_given_less_then_by_name():
    decode = [worker("d1", **POOL), worker("d0", **POOL)]
    assert picked([worker("p1"), worker("p0")], decode) == ("p0", "d0")
    used = [worker("p0", steps=9), worker("p1", steps=8)]
    assert picked(used, decode) == ("p1", "d0"), "its cache has room"
    assert picked([assigned(worker("p1"), 0, 9.0), used[0]], decode) == ("p0", "d0")


# Decode computes the prompt itself.


def pair_of(*, left=40, ahead=0, running=0, most=16, prefill_caches=0, chunk=512):
    """A prompt of 1000 tokens of which decode caches all but `left`."""
    prompt = tuple(range(1000))
    caches, cached = prompt[:prefill_caches], prompt[: 1000 - left]
    prefill = worker("p0", queue_tokens=ahead, caches=caches, **RATE, **POOL)
    load = {"running": running, "chunk_tokens": chunk, "step_ms": 1}
    decode = worker("d0", caches=cached, **load, **RATE, **POOL)
    return only(prefill, decode, needs(prompt, local_prefill_max_tokens=most))


@pytest.mark.parametrize(
    ("case", "local_tokens"),
    [
        ({}, 40),
        # 40 tokens of 1000 are left: worth it while twice that, for all there, costs less.
        ({"running": 10}, 40),
        ({"running": 15}, None),
        ({"running": 15, "ahead": 500}, 40),  # the prefill worker is busy too
        ({"prefill_caches": 936}, None),  # it has not much more to compute
        ({"chunk": 40}, 40),
        ({"chunk": 36}, None),  # never more than a chunk
        ({"most": 0}, None),  # switched off
        ({"left": 16, "running": 90}, 16),  # so little that it always is
        ({"left": 20, "running": 90}, None),
    ],
)
def test_decode_computes_what_costs_less_there_than_elsewhere(case, local_tokens):
    pair = pair_of(**case)
    assert pair.decode_prefills is (local_tokens is not None)
    # For Reserve: if less is cached than it seemed, the prompt is handed over after all.
    assert pair.local_prefill_max_tokens == (local_tokens or case.get("most", 16))
    if case == {}:
        assert pair.ttft_s == pytest.approx(0.04, abs=0.002)


def short(*, tokens=40, ahead=500, running=2, queued=0, chunk=512, most=16, **more):
    """Nothing of it is cached; 1000 tokens a second, and a step with one sequence takes 1 ms."""
    prefill = worker("p0", queue_tokens=ahead, **RATE, **POOL)
    load = {"step_ms": (8 + running) / 9, "chunk_tokens": chunk, "queue_tokens": queued}
    decode = worker("d0", running=running, **load, **RATE, **POOL)
    return only(prefill, decode, needs(tokens, local_prefill_max_tokens=most, **more))


@pytest.mark.parametrize(
    ("case", "local"),
    [
        ({}, True),
        ({"ahead": 0}, False),
        ({"ahead": 190}, False),  # three sequences wait 40 ms each, and that counts double
        ({"ahead": 210}, True),
        ({"running": 12}, False),
        # No token of a stream comes more than 50 ms after the one before: 48 and a step of 1.2 ms.
        ({"tokens": 48}, True),
        ({"tokens": 49}, False),
        ({"queued": 8}, True),
        ({"queued": 9}, False),
        ({"tokens": 130, "ahead": 1000}, False),
        ({"tokens": 130, "ahead": 1000, "max_itl_s": 0.14}, True),
        ({"tokens": 130, "ahead": 1000, "max_itl_s": 0.14, "chunk": 128}, False),
        ({"most": 0}, False),
    ],
)
def test_a_short_prompt_is_computed_on_decode_while_prefill_is_busy(case, local):
    pair = short(**case)
    assert pair.decode_prefills is local
    assert (
        pair.ttft_s < pair.handed_over_ttft_s if local else pair.ttft_s == pair.handed_over_ttft_s
    )


def test_what_the_other_streams_wait_is_part_of_the_cost():
    quiet, busy = pair_of(running=0), pair_of(running=10)
    tpot_s = busy.on_decode.tpot_s - quiet.on_decode.tpot_s
    own_ms = (2 * (busy.ttft_s - quiet.ttft_s) + 64 * tpot_s) * 1e3
    assert busy.score_ms - quiet.score_ms - own_ms == pytest.approx(2 * 10 * 40, rel=0.01)


def test_decode_does_not_compute_while_an_idle_prefill_worker_is_sooner():
    """40 tokens on decode count as 80; an idle worker that caches the rest needs 67 ms."""
    prompt = tuple(range(1000))
    idle = worker("p1", caches=prompt[:936], **RATE, **POOL)
    decode = worker("d0", caches=prompt[:960], step_ms=1, **RATE, **POOL)
    snapshot = fleet([worker("p0", queue_tokens=500, **RATE, **POOL), idle], [decode])
    pair = pick(snapshot, needs(prompt, local_prefill_max_tokens=16))
    assert pair.names == ("p1", "d0") and not pair.decode_prefills
    # Or an idle cluster would compute prompts on decode, where the next stream meets them.
    uncached = only(worker("p0", **RATE), worker("d0", **RATE, **POOL),
                    needs(100, local_prefill_max_tokens=16))  # fmt: skip
    assert not uncached.decode_prefills


def test_a_request_with_an_adapter_is_placed_on_workers_that_have_it():
    held = [common_pb2.Adapter(name=name, identity=name) for name in ("1f", "2")]
    snapshot = fleet(
        [worker("p0"), worker("p1", adapters=held)],
        [worker("d0", adapters=held[1:]), worker("d1", adapters=held), worker("d2")],
    )
    assert snapshot.holding("") is snapshot
    assert pick(snapshot.holding("1f"), needs()).names == ("p1", "d1")
    with pytest.raises(Overloaded):
        pick(snapshot.holding("1f"), needs(), full={"p1", "d1"})
    assert {pick(snapshot, needs()).names for _ in range(3)} == {("p0", "d0")}
    with pytest.raises(Unavailable, match="p1 is NO_ADAPTER: it does not have the adapter 3"):
        pick(snapshot.holding("3"), needs())
    everywhere = fleet([worker("p0", adapters=held)], [worker("d0", adapters=held)])
    assert everywhere.holding("1f") is everywhere
    changed = snapshot.workers[snapshot.rows["p0"]]
    changed.record.adapters.extend(held)
    later = snapshot.replaced([changed]).holding("1f")
    assert {view.incarnation for view in later.workers if view.ready} == {"p0", "p1", "d1"}


# Mixed workers.


MIXED = {"prefill_tokens_per_s": 1000, "step_ms": 10.0, "chunk_tokens": 100, **POOL}


def test_of_mixed_workers_one_serves_the_whole_request_and_the_next_goes_to_the_other():
    """Also one that seems to cache it: it may have less, and cannot hand over to itself."""
    first, other = worker("m0", **MIXED), worker("m1", **MIXED)
    caches = worker("m0", caches=tuple(range(100, 480)), **MIXED)
    for mixed, local, uncached in (([first], 0, 400), ([first, other], 0, 400), ([caches], 32, 20)):
        pair = pick(fleet([], [], mixed=mixed), needs(400, local_prefill_max_tokens=local))
        assert (pair.decode.incarnation, pair.decode_prefills) == ("m0", True)
        assert (pair.on_decode.uncached, pair.local_prefill_max_tokens) == (uncached, 400)
        assert pair.prefill is pair.decode or len(mixed) > 1
    busy = worker("m0", running=4, sequences=4, **MIXED)
    assert pick(fleet([], [], mixed=[busy, other]), needs(400)).decode.incarnation == "m1"


def test_prompts_go_where_few_streams_wait_and_streams_where_few_prompts_come():
    """It is the 1P1D of two mixed workers, by what each reports."""
    prompts = worker("m0", prefill_share=0.6, **MIXED)
    streams = worker("m1", running=8, sequences=8, prefill_share=0.1, **MIXED)
    pair = pick(fleet([], [], mixed=[prompts, streams]), needs(400, max_new_tokens=100))
    assert (pair.names, pair.decode_prefills) == (("m0", "m1"), False)
    full = worker("m0", prefill_share=0.6, tokens=5000, **MIXED)
    with pytest.raises(Overloaded, match="leaves prompts that would delay its streams"):
        pick(fleet([], [], mixed=[full, streams]), needs(400))
    assert pick(fleet([], [], mixed=[full, streams]), needs(400, max_itl_s=10.0)).decode_prefills


def test_roles_only_decide_what_is_preferred():
    """Prefill, decode and mixed workers in one fleet."""
    snapshot = fleet([worker("p0", **RATE)], [worker("d0", **RATE)], mixed=[worker("m0", **MIXED)])
    assert usable_pairs(snapshot) == {("p0", "d0"), ("p0", "m0"), ("m0", "d0"), ("m0", "m0")}
