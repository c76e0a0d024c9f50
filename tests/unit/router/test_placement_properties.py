"""What holds for every fleet: the picked pair may be picked, and load never attracts."""

from dataclasses import replace

import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st

from baton.errors import Overloaded
from baton.v1 import worker_pb2
from router.fleet.kv_index import AssignedPrompt
from router.placement.room import has_room
from router.placement.scoring import pick, rank_all

from .snapshots import BLOCK, caching, decode_views, fleet, needs, prefill_views, worker

PROMPT = tuple(range(96))
STATES = st.sampled_from(["READY"] * 5 + ["DRAINING", "SILENT", "EJECTED"])
HOSTS = st.sampled_from(["a", "b"])
DTYPES = st.sampled_from(["float32"] * 4 + ["bfloat16"])
CACHED = st.sampled_from([0, 0, 4, 32, 64, 96])
RATES = st.sampled_from([0, 0, 500, 900, 1000, 1100, 5000])
STEPS = st.sampled_from([0, 0, 9, 10, 11, 30])
NAMES = st.sampled_from([f"{role}{i}" for role in "pd" for i in (0, 1, 2, 3, 9)])
FINISH = 10.0


def step_ms(lone_ms, running):
    """What a worker measures with so many sequences, by placement's own idea of a step."""
    return lone_ms * (8 + max(1, running)) / 9


@st.composite
def workers(draw, name):
    finishes = draw(st.lists(st.sampled_from([5.0, 10.0, 15.0]), max_size=3))
    assigned = tuple(AssignedPrompt(draw(st.integers(1, 600)), finish) for finish in finishes)
    ours, running = sum(prompt.num_tokens for prompt in assigned), draw(st.integers(0, 12))
    view = worker(
        name, draw(STATES), host_id=draw(HOSTS), dtype=draw(DTYPES), running=running,
        waiting=draw(st.integers(0, 2)), sequences=draw(st.integers(0, 14)),
        caches=PROMPT[: draw(CACHED)], step_ms=step_ms(draw(STEPS), running),
        prefill_tokens_per_s=draw(RATES), max_batch=draw(st.sampled_from([0, 8, 16])),
        queue_tokens=draw(st.sampled_from([0, ours // 2, ours, ours + 300])),
        chunk_tokens=draw(st.sampled_from([0, 64, 512])), blocks_total=100,
        blocks_free=draw(st.integers(0, 100)), blocks_cached=draw(st.sampled_from([0, 0, 24])),
        blocks_held=draw(st.sampled_from([0, 80])),
    )  # fmt: skip
    return replace(view, assigned=assigned)


@st.composite
def fleets(draw):
    """One pair at least has room; it may be the slowest of all."""
    pool = {"blocks_total": 100, "blocks_free": 100, "prefill_tokens_per_s": draw(RATES)}
    prefill = [worker("p9", queue_tokens=draw(st.integers(0, 900)), **pool)]
    decode = [worker("d9", sequences=draw(st.integers(0, 14)), step_ms=draw(STEPS), **pool)]
    prefill += [draw(workers(f"p{i}")) for i in range(draw(st.integers(0, 3)))]
    decode += [draw(workers(f"d{i}")) for i in range(draw(st.integers(0, 3)))]
    names = [(p.incarnation, d.incarnation) for p in prefill for d in decode][1:]
    excluded = draw(st.lists(st.sampled_from(names), max_size=2)) if names else ()
    return fleet(prefill, decode, dict.fromkeys(excluded, "so"))


REQUESTS = st.builds(
    needs,
    st.sampled_from([PROMPT, PROMPT[:10], tuple(range(500, 620))]),
    virtual_finish=st.just(FINISH),
    max_new_tokens=st.sampled_from([0, 1, 100]),
    local_prefill_max_tokens=st.sampled_from([0, 16]),
)


@given(fleets(), REQUESTS, st.sets(NAMES, max_size=12))
def test_where_the_cheap_test_finds_no_room_none_is_picked(snapshot, request_, full):
    room = has_room(snapshot, request_, full)
    event("room" if room else "no room")
    if not room:
        with pytest.raises(Overloaded, match="no room for"):
            pick(snapshot, request_, full=full)


def swapped(snapshot, old, new):
    """The snapshot with another view of a worker."""
    prefill, decode = (
        tuple(new if view is old else view for view in views)
        for views in (prefill_views(snapshot), decode_views(snapshot))
    )
    return fleet(prefill, decode, snapshot.excluded_pairs)


@given(fleets(), REQUESTS, st.sets(NAMES, max_size=3), st.sets(NAMES, max_size=3))
def test_a_picked_pair_may_be_picked_and_none_is_better(snapshot, request_, full, failed):
    """Each filter again, in the plainest words; all pairs are scored to compare."""
    full -= {"p9", "d9"}
    pair = pick(snapshot, request_, failed, full)
    p, d = pair.prefill, pair.decode
    assert p.ready and d.ready and p.record.kv == d.record.kv and not pair.refused
    assert pair.names not in snapshot.excluded_pairs and d.incarnation not in full
    needed = request_.num_tokens // BLOCK + 1 - pair.on_decode.cached // BLOCK
    assert needed <= d.load.blocks_free + d.load.blocks_cached
    busy = max(d.load.running + d.load.waiting, d.assigned_sequences)
    assert not d.record.max_batch or busy < d.record.max_batch * 9 / 8
    window = max(2 * p.load.chunk_tokens, 500)
    ours = sum(one.num_tokens for one in p.assigned if one.virtual_finish <= FINISH)
    ahead = ours + max(0, p.load.queue_tokens - p.assigned_tokens)
    assert pair.decode_prefills or (ahead < window and p.incarnation not in full)
    pairs = rank_all(snapshot, request_, full)
    ranked = [one for one in pairs if not one.refused]
    costs = [(len({*one.names} & failed), one.score_ms) for one in ranked]
    assert (len({*pair.names} & failed), pair.score_ms) == min(costs)
    assert ranked == pairs[: len(ranked)], "refused ones are the last"
    assert [one.score_ms for one in ranked] == sorted(one.score_ms for one in ranked)
    best = pick(snapshot, request_, full=full)
    assert (best.names, best.score_ms) == (pairs[0].names, pairs[0].score_ms), "also of ties"
    assert best.candidates == snapshot.num_usable


@given(fleets(), fleets(), REQUESTS, st.data())
def test_a_snapshot_with_workers_replaced_is_one_made_of_them(snapshot, other, request_, data):
    views = snapshot.workers
    names = {view.incarnation for view in views}
    same = [view for view in other.workers if view.incarnation in names]
    changed = data.draw(st.lists(st.sampled_from(same), unique_by=id))
    assert snapshot.prefill_rate >= 0  # known before, and not after
    replaced = snapshot.replaced(changed)
    fresh = snapshot
    for view in changed:
        (old,) = (one for one in views if one.incarnation == view.incarnation)
        fresh = swapped(fresh, old, view)
    assert replaced.workers == fresh.workers
    assert rank_all(replaced, request_) == rank_all(fresh, request_)
    assert (replaced.num_usable, replaced.max_context) == (fresh.num_usable, fresh.max_context)
    assert replaced.prefill_rate == fresh.prefill_rate


@given(fleets(), REQUESTS, st.data())
def test_more_load_never_makes_a_worker_more_attractive(snapshot, request_, data):
    draw, before = data.draw, pick(snapshot, request_)
    others = [w for w in snapshot.workers if w.incarnation not in before.names]
    assume(others)
    victim = draw(st.sampled_from(others))
    load, assigned = worker_pb2.Load(), victim.assigned
    load.CopyFrom(victim.load)
    if draw(st.booleans()):
        assigned += (AssignedPrompt(draw(st.integers(1, 800)), draw(st.sampled_from([5.0, 15.0]))),)
        load.queue_tokens += assigned[-1].num_tokens
    load.queue_tokens += draw(st.sampled_from([0, 1, 100]))
    load.waiting += draw(st.integers(0, 2))
    taken, more = draw(st.integers(0, load.blocks_free)), draw(st.integers(0, 4))
    load.blocks_free -= taken
    load.blocks_held += taken
    load.step_ms *= step_ms(1, load.running + more) / step_ms(1, load.running)
    load.running += more
    sequences = victim.assigned_sequences + draw(st.integers(0, 3))
    busier = replace(victim, load=load, assigned=assigned, assigned_sequences=sequences)
    after = pick(swapped(snapshot, victim, busier), request_)
    if not (after.decode_prefills and victim in prefill_views(snapshot)):  # then it is not used
        assert victim.incarnation not in after.names


@given(fleets(), REQUESTS, st.data())
def test_what_a_picked_worker_caches_makes_it_no_less_attractive(snapshot, request_, data):
    """Where costs decide. That decode computes the little that is left is a rule of its own."""
    request_ = replace(request_, local_prefill_max_tokens=0)
    before = pick(snapshot, request_)
    lucky = data.draw(st.sampled_from([before.prefill, before.decode]))
    warmed = swapped(snapshot, lucky, replace(lucky, slot=caching(request_.token_ids)))
    assert lucky.incarnation in pick(warmed, request_).names
