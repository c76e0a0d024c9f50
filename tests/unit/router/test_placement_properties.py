"""What holds for every fleet: who is picked may be picked, and load never attracts."""

import random
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from baton.v1 import worker_pb2
from router.fleet.snapshot import AssignedPrompt, Snapshot
from router.placement.placement import pick

from .snapshots import BLOCK, cached, fleet, needs, worker

PROMPT = tuple(range(96))
STATES = st.sampled_from(["READY"] * 5 + ["DRAINING", "SILENT", "EJECTED"])
HOSTS = st.sampled_from(["a", "b"])
DTYPES = st.sampled_from(["float32"] * 4 + ["bfloat16"])
CACHED = st.sampled_from([0, 0, 4, 32, 64, 96])
RATES = st.sampled_from([0, 0, 500, 900, 1000, 1100, 5000])
STEPS = st.sampled_from([0, 0, 9, 10, 11, 30])
FINISH = 10.0


def lone_step_to_reported(lone_ms, running):
    """What a worker measures with so many sequences, by placement's own idea of a step."""
    return lone_ms * (8 + max(1, running)) / 9


@st.composite
def prefill_workers(draw, name):
    dues = draw(st.lists(st.sampled_from([5.0, 10.0, 15.0]), max_size=3))
    assigned = tuple(AssignedPrompt(draw(st.integers(1, 600)), due) for due in dues)
    ours = sum(prompt.num_tokens for prompt in assigned)
    view = worker(
        name, draw(STATES), host_id=draw(HOSTS), dtype=draw(DTYPES),
        caches=PROMPT[: draw(CACHED)], prefill_tokens_per_s=draw(RATES),
        queue_tokens=draw(st.sampled_from([0, ours // 2, ours, ours + 300])),
        chunk_tokens=draw(st.sampled_from([0, 64, 512])),
        blocks_total=100, blocks_free=draw(st.sampled_from([0, 20, 100])),
        blocks_held=draw(st.sampled_from([0, 80])),
    )  # fmt: skip
    return replace(view, assigned=assigned)


@st.composite
def decode_workers(draw, name):
    running = draw(st.integers(0, 12))
    lone_ms = draw(STEPS)
    return worker(
        name, draw(STATES), host_id=draw(HOSTS), dtype=draw(DTYPES), running=running,
        waiting=draw(st.integers(0, 2)), sequences=draw(st.integers(0, 14)),
        caches=PROMPT[: draw(CACHED)], step_ms=lone_step_to_reported(lone_ms, running),
        prefill_tokens_per_s=draw(RATES), max_batch=draw(st.sampled_from([0, 8, 16])),
        queue_tokens=draw(st.sampled_from([0, 5, 200])),
        blocks_total=100, blocks_free=draw(st.integers(0, 100)),
        blocks_cached=draw(st.sampled_from([0, 0, 24])),
    )  # fmt: skip


@st.composite
def fleets(draw):
    """One pair at least has room; it may be the slowest of all."""
    pool = {"blocks_total": 100, "blocks_free": 100, "prefill_tokens_per_s": draw(RATES)}
    prefill = [worker("p9", queue_tokens=draw(st.integers(0, 900)), **pool)]
    decode = [worker("d9", sequences=draw(st.integers(0, 14)), step_ms=draw(STEPS), **pool)]
    prefill += [draw(prefill_workers(f"p{i}")) for i in range(draw(st.integers(0, 2)))]
    decode += [draw(decode_workers(f"d{i}")) for i in range(draw(st.integers(0, 2)))]
    names = [(p.incarnation, d.incarnation) for p in prefill for d in decode][1:]
    excluded = dict.fromkeys(
        draw(st.lists(st.sampled_from(names), max_size=2)) if names else (), "so"
    )
    return fleet(prefill, decode, excluded)


requests = st.builds(
    needs,
    st.sampled_from([PROMPT, PROMPT[:10], tuple(range(500, 620))]),
    virtual_finish=st.just(FINISH),
    new_tokens=st.sampled_from([0, 1, 100]),
    local_prefill_max_tokens=st.sampled_from([0, 16]),
)


@settings(deadline=None)
@given(fleets(), requests, st.sets(st.sampled_from(["d0", "d1", "d2"]), max_size=2))
def test_who_is_picked_may_be_picked(snapshot, request_, full):
    """Each filter again, in the plainest words."""

    def allowed(choice):
        p, d = choice.prefill, choice.decode
        busy = max(d.load.running + d.load.waiting, d.assigned_sequences)
        batch = d.record.max_batch
        needed = request_.num_tokens // BLOCK + 1 - choice.on_decode.cached // BLOCK
        available = d.load.blocks_free + d.load.blocks_cached
        usable = p.ready and d.ready and p.record.kv == d.record.kv
        usable = usable and choice.names not in snapshot.excluded_pairs
        room = (
            d.incarnation not in full
            and needed <= available
            and (not batch or busy < batch * 9 / 8)
        )
        window = max(2 * (p.record.chunk_tokens or 512), 500)
        idle = p.tokens_ahead(FINISH) < window
        return usable and room and (idle or choice.decode_prefills)

    choice = pick(snapshot, request_, full=full)
    assert allowed(choice) and not choice.refused


def loaded(view, draw):
    """The same worker with more to do."""
    load = worker_pb2.Load()
    load.CopyFrom(view.load)
    sequences = view.assigned_sequences + draw(st.integers(0, 3))
    assigned = view.assigned
    if draw(st.booleans()):
        assigned += (AssignedPrompt(draw(st.integers(1, 800)), draw(st.sampled_from([5.0, 15.0]))),)
        load.queue_tokens += assigned[-1].num_tokens
    load.queue_tokens += draw(st.sampled_from([0, 1, 100]))
    load.waiting += draw(st.integers(0, 2))
    taken = draw(st.integers(0, load.blocks_free))
    load.blocks_free -= taken
    load.blocks_held += taken
    before, more = load.running, draw(st.integers(0, 4))
    load.running += more
    load.step_ms *= lone_step_to_reported(1, before + more) / lone_step_to_reported(1, before)
    return replace(view, load=load, assigned=assigned, assigned_sequences=sequences)


@settings(deadline=None, max_examples=150)
@given(fleets(), requests, st.data())
def test_more_load_never_makes_a_worker_more_attractive(snapshot, request_, data):
    before = pick(snapshot, request_)
    others = [w for w in (*snapshot.prefill, *snapshot.decode) if w.incarnation not in before.names]
    assume(others)
    victim = data.draw(st.sampled_from(others))
    busier = loaded(victim, data.draw)

    def swapped(workers):
        return tuple(busier if w is victim else w for w in workers)

    after = pick(
        Snapshot(swapped(snapshot.prefill), swapped(snapshot.decode), snapshot.excluded_pairs),
        request_,
    )
    if not (after.decode_prefills and victim in snapshot.prefill):  # then it is not used
        assert victim.incarnation not in after.names


@settings(deadline=None)
@given(fleets(), requests, st.data())
def test_what_a_picked_worker_caches_makes_it_no_less_attractive(snapshot, request_, data):
    """Where costs decide. That decode computes the little that is left is a rule of its own."""
    request_ = replace(request_, local_prefill_max_tokens=0)
    before = pick(snapshot, request_)
    lucky = data.draw(st.sampled_from(before.names))

    def warmed(workers):
        return tuple(
            replace(w, cached=cached(request_.token_ids)) if w.incarnation == lucky else w
            for w in workers
        )

    after = pick(
        Snapshot(warmed(snapshot.prefill), warmed(snapshot.decode), snapshot.excluded_pairs),
        request_,
    )
    assert lucky in after.names


@settings(deadline=None)
@given(fleets(), requests, st.randoms())
def test_the_order_of_workers_does_not_matter(snapshot, request_, shuffler):
    prefill, decode = list(snapshot.prefill), list(snapshot.decode)
    shuffler.shuffle(prefill)
    shuffler.shuffle(decode)
    one = pick(snapshot, request_)
    other = pick(fleet(prefill, decode, snapshot.excluded_pairs), request_)
    assert one.names == other.names


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 40))
def test_a_burst_is_spread_before_any_load_is_reported(num_prefill, num_decode, burst):
    assigned = {f"p{i}": () for i in range(num_prefill)}
    sequences = {f"d{i}": 0 for i in range(num_decode)}
    for number in range(burst):
        prefill = [
            replace(worker(name, chunk_tokens=1000), assigned=prompts)
            for name, prompts in assigned.items()
        ]
        decode = [worker(name, sequences=count) for name, count in sequences.items()]
        choice = pick(fleet(prefill, decode), needs(8, virtual_finish=float(number)))
        assigned[choice.prefill.incarnation] += (AssignedPrompt(8, float(number)),)
        sequences[choice.decode.incarnation] += 1
    for counts in ([len(prompts) for prompts in assigned.values()], sequences.values()):
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("seed", range(5))
def test_tokens_in_front_are_a_better_guide_than_taking_turns(seed):
    """Four prefill workers at 80 % of what they can do, prompts of very unlike lengths."""
    rng = random.Random(seed)
    now, arrivals = 0.0, []
    for _ in range(400):
        length = rng.choice([50] * 9 + [3000])
        now += rng.expovariate(1.0) * (50 * 0.9 + 3000 * 0.1) / (0.8 * 4 * 1000)
        arrivals.append((now, length))

    def waits(choose):
        """Waiting time of each prompt, when workers compute 1000 tokens a second in order."""
        free_at = [0.0] * 4
        told = []
        for number, (when, length) in enumerate(arrivals):
            ahead = [max(0.0, end - when) for end in free_at]
            index = choose(number, ahead, length)
            told.append(ahead[index])
            free_at[index] = max(when, free_at[index]) + length / 1000
        return sorted(told)

    def placed(number, ahead, length):
        prefill = [
            worker(
                f"p{i}", tokens=int(s * 1000), prefill_tokens_per_s=1000, chunk_tokens=1 << 20,
                blocks_free=1000,
            )
            for i, s in enumerate(ahead)
        ]  # fmt: skip
        decode = [worker("d0", blocks_total=1000, blocks_free=1000)]
        return int(pick(fleet(prefill, decode), needs(length)).prefill.incarnation[1:])

    ours, fair_queue = waits(placed), waits(lambda number, ahead, length: number % 4)
    assert sum(ours) < 0.7 * sum(fair_queue)
    assert ours[-4] < fair_queue[-4], "p99"
