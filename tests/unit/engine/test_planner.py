"""The planner: chunks, decode first, cache hits, priorities, preemption, resume, speculation."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton import prefix
from baton.engine.blocks import BlockPool
from baton.engine.planner import ChunkSize, Planner
from baton.engine.sequence import Sequence
from baton.engine.speculative.ngram import NgramProposer
from baton.sampling import SamplingParams

SIZE = 4


def make_planner(num_blocks=16, chunk_tokens=8, max_batch=4, proposer=None):
    blocks = BlockPool(num_blocks, SIZE, prefix_cache=proposer is None)
    return Planner(blocks, ChunkSize(chunk_tokens), max_batch, proposer)


def make_sequence(name, length, first=0, priority=0.0):
    tokens = list(range(first, first + length))
    return Sequence(name, tokens, length, SamplingParams(), priority=priority)


def run(planner, plan):
    """What a step does to the books: computes, and draws a token (7) where one is due."""
    planner.launched(plan)
    for work in plan.work:
        if work.samples:
            work.sequence.tokens[-1] = 7
        planner.landed(work)
    planner.blocks.check()


def shape(plan):
    return [(work.sequence.seq_id, work.start, work.count) for work in plan.work]


def rounds(planner, count):
    """What is planned and run in so many steps."""
    seen = []
    for _ in range(count):
        plan = planner.plan()
        seen += shape(plan)
        run(planner, plan)
    return seen


def finish(planner, sequence):
    planner.remove(sequence)
    planner.free(sequence)
    planner.blocks.check()


def test_a_long_prompt_catches_up_in_chunks_then_decodes():
    planner = make_planner()
    planner.add(make_sequence("a", 18))
    expected = [("a", 0, 8), ("a", 8, 8), ("a", 16, 2), ("a", 18, 1), ("a", 19, 1)]
    assert rounds(planner, 5) == expected


def test_a_chunk_takes_its_time_at_the_rate_of_the_last_steps():
    planner = Planner(BlockPool(4096, SIZE), ChunkSize(512, seconds=0.1), max_batch=4)

    def computed(tokens_per_s, steps):
        """Sizes of so many chunks at that rate."""
        sizes = []
        for _ in range(steps):
            sizes.append((plan := planner.plan()).num_chunk_tokens)
            planner.ran(plan, sizes[-1] / tokens_per_s)
            run(planner, plan)
        return sizes

    planner.add(make_sequence("a", 15_000))
    first, *others = computed(2048, 5)
    assert (first, {*others}) == (64, {204})  # nothing is known of the first
    slower = computed(1024, 12)  # as behind a long context
    assert slower == sorted(slower, reverse=True) and 102 <= slower[-1] < 110
    assert slower[2] < 150
    assert computed(10, 30)[-1] == 64
    assert computed(1e6, 30)[-1] == 512
    assert planner.chunk.rate > 5120


def test_only_steps_with_some_tokens_of_prompts_measure_their_rate():
    planner = Planner(BlockPool(64, SIZE), ChunkSize(64), max_batch=64)
    planner.add(make_sequence("short", 31))
    planner.ran(plan := planner.plan(), 1.0)
    run(planner, plan)
    assert planner.chunk.rate == 0
    planner.add(make_sequence("long", 32, first=100))
    planner.ran(planner.plan(), 1.0)
    assert planner.chunk.rate == 33  # rows: the other's is one


def test_a_batch_above_the_chunk_budget_starves_nobody():
    planner = make_planner(num_blocks=64, chunk_tokens=4, max_batch=9)
    streams = [make_sequence(f"s{i}", 3, first=100 * i) for i in range(8)]
    for sequence in streams[:6]:
        planner.add(sequence)
    while any(sequence.num_pending != 1 for sequence in streams[:6]):
        run(planner, planner.plan())
    for sequence in streams[6:]:  # their KV has come
        assert planner.reserve(sequence, extra_tokens=1)
        sequence.num_computed = 2
        planner.add(sequence)
    planner.add(make_sequence("prompt", 20, first=900, priority=-1.0))
    for step in range(5):
        plan = planner.plan()
        assert {name for name, _, count in shape(plan) if count == 1} == {f"s{i}" for i in range(8)}
        assert shape(plan)[-1] == ("prompt", 4 * step, 4)
        run(planner, plan)


@pytest.mark.parametrize(("prompt_s", "late_s"), [(2.0, [5, 10, 13, 13]), (0.0, [0, 0, 0, 0])])
def test_virtual_time_advances_with_prompts_that_are_done_by_what_they_count(prompt_s, late_s):
    planner, found = make_planner(), []
    sequence = make_sequence("a", 18)
    sequence.prompt_s = prompt_s
    planner.add(sequence)
    for step in range(4):
        plan = planner.plan()
        sequence.new_tokens = int(step > 2)  # decodes
        planner.ran(plan, 5.0)
        found.append(planner.late_s)
        run(planner, plan)
    assert found == late_s


def test_a_second_prompt_skips_what_the_first_left_in_the_cache():
    planner = make_planner(chunk_tokens=32)
    first, second = make_sequence("a", 10), make_sequence("b", 11)
    planner.add(first)
    run(planner, planner.plan())
    planner.add(second)
    plan = planner.plan()
    assert ("b", 8, 3) in shape(plan)
    assert second.num_cached == 8
    assert second.block_ids[:2] == first.block_ids[:2]


def test_blocks_are_not_shared_before_the_step_that_fills_them_has_run():
    planner = make_planner(chunk_tokens=64, max_batch=2)
    for name in "abc":  # the batch is bounded
        planner.add(make_sequence(name, 10))
    assert shape(planner.plan()) == [("a", 0, 10), ("b", 0, 10)]
    assert len(planner.waiting) == 1


def test_the_last_by_priority_is_preempted_and_starts_over_in_its_place():
    planner = make_planner(num_blocks=4, chunk_tokens=64)
    late = make_sequence("late", 7, 100, priority=9.0)
    early = make_sequence("early", 8, priority=5.0)
    planner.add(late)
    planner.add(early)  # younger, and yet it stays
    place = late.order
    rounds(planner, 1)
    assert rounds(planner, 1) == [("early", 8, 1)]
    assert (late.preemptions, early.preemptions, late.order) == (1, 0, place)
    assert (late.num_computed, late.block_ids) == (0, [])
    newcomer = make_sequence("newcomer", 2, 200, priority=20.0)
    planner.add(newcomer)
    assert list(planner.waiting) == [late, newcomer]
    planner.remove(newcomer)
    finish(planner, early)
    assert shape(planner.plan()) == [("late", 4, 4)]  # its first block was still cached
    assert late.num_tokens == 8


def test_a_reservation_has_room_for_the_first_token():
    planner = make_planner(num_blocks=3)
    sequence = make_sequence("a", 8)
    assert planner.reserve(sequence, extra_tokens=1)
    assert len(sequence.block_ids) == 3
    assert not planner.reserve(make_sequence("b", 1, first=50), extra_tokens=1)
    planner.blocks.check()


def test_one_that_holds_its_blocks_does_not_wait_behind_one_that_needs_them():
    planner = make_planner(num_blocks=4)
    reserved = make_sequence("reserved", 11)
    assert planner.reserve(reserved, extra_tokens=1)
    planner.add(make_sequence("needs", 8, first=100))
    assert shape(planner.plan()) == []
    planner.add(reserved)  # its KV has come
    assert shape(planner.plan()) == [("reserved", 0, 8)]
    assert planner.num_waiting == 1


def test_one_that_waits_for_blocks_is_hashed_once(monkeypatch):
    planner = make_planner(num_blocks=16, chunk_tokens=64)
    first = make_sequence("first", 40)
    planner.add(first)
    run(planner, planner.plan())
    hashed, hash64 = [], prefix._hash64

    def watched(data):
        hashed.append(len(data))
        return hash64(data)

    monkeypatch.setattr(prefix, "_hash64", watched)
    planner.add(make_sequence("waits", 64))  # 40 of its tokens are cached, and yet it has no room
    for _ in range(20):
        run(planner, planner.plan())
    assert planner.num_waiting == 1
    # The root of the empty salt has no bytes; two blocks belong to the first one's output.
    of_a_block = 8 + 4 * SIZE
    assert sum(hashed) <= (64 // SIZE + 20 // SIZE) * of_a_block


class Before:
    """Who was where when a step was planned."""

    def __init__(self, planner):
        self.running, self.waiting = list(planner.running), list(planner.waiting)
        self.behind = [s for s in self.running if s.num_pending > 1]
        self.holding = [*planner.ready, *planner.holding]
        everyone = (*self.running, *self.holding, *self.waiting)
        self.pending = {s.seq_id: s.num_pending for s in everyone}


def check_order(planner, before, plan):
    """A sequence that got less than it needs was not passed by one with a later finish time."""
    got = {work.sequence.seq_id: work.count for work in plan.work}
    in_reach = [*before.behind, *before.holding, *before.waiting]
    taken = [s for s in in_reach if got.get(s.seq_id, 0) > 0 and before.pending[s.seq_id] > 1]
    joined = [s for s in taken if s not in before.running]
    for sequence in in_reach:
        if got.get(sequence.seq_id, 0) >= sequence.num_pending:
            continue
        if sequence in planner.waiting:
            # It found no place or no blocks, or lost them: then no later one found any after
            # it. Those who hold theirs compete with it no more.
            assert all(s.order < sequence.order for s in joined if s in before.waiting)
        elif sequence not in before.running and sequence not in planner.running:
            assert all(s.order < sequence.order for s in joined)
        else:
            assert all(s.order <= sequence.order for s in taken)


@st.composite
def arrivals(draw):
    """For each step what comes: (length, how long until it is due, whether it is reserved)."""
    one = st.tuples(st.integers(1, 30), st.integers(0, 12), st.booleans())
    return draw(st.lists(st.lists(one, max_size=3), min_size=1, max_size=12))


@settings(max_examples=150, deadline=None)
@given(arrivals(), st.integers(9, 24), st.integers(1, 40), st.integers(1, 4))
def test_priorities_are_kept_and_every_sequence_finishes(coming, num_blocks, chunk, max_batch):
    planner = make_planner(num_blocks, chunk, max_batch)
    alive: dict[str, tuple[Sequence, int]] = {}
    for step in range(3000):
        for length, delay, reserved in coming[step] if step < len(coming) else ():
            first = 100 * (step % 3)
            sequence = make_sequence(f"s{len(alive)}-{step}", length, first, float(step + delay))
            if reserved and (planner.waiting or not planner.reserve(sequence, extra_tokens=1)):
                continue
            planner.add(sequence)
            alive[sequence.seq_id] = sequence, length + 4
        before = Before(planner)
        plan = planner.plan()
        assert planner.queue_tokens == sum(one.num_pending for one, _ in alive.values())
        assert plan.num_tokens <= chunk + max_batch
        planned = {work.sequence for work in plan.work}
        for sequence in before.running:
            if before.pending[sequence.seq_id] == 1:
                assert sequence in planned or sequence not in planner.running
        assert len(planner.running) <= max_batch
        check_order(planner, before, plan)
        run(planner, plan)
        for sequence, goal in list(alive.values()):
            if sequence.num_tokens >= goal:
                finish(planner, sequence)
                del alive[sequence.seq_id]
        if not alive and step >= len(coming):
            break
    assert not alive
    assert (planner.blocks.num_held, planner.num_waiting, planner.queue_tokens) == (0, 0, 0)


# Proposed tokens get what budget is left, and cost no sequence its blocks.

MAX_CONTEXT = 200
LOOP = [1, 2, 3, 4, 5]  # what every sequence of these tests repeats, wherever it begins


def speculating(num_blocks=32, chunk_tokens=64, proposer=None):
    proposer = proposer or NgramProposer(4, MAX_CONTEXT)
    return make_planner(num_blocks, chunk_tokens, proposer=proposer)


def looping(name, length=12, max_tokens=50, **fields):
    tokens = [LOOP[at % len(LOOP)] for at in range(length)]
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence(name, tokens, length, params, **fields)


def go_on(planner, plan):
    """Every sequence goes on with the loop."""
    sampled = [[LOOP[at % len(LOOP)] for at in _positions(work)] for work in plan.work]
    planner.launched(plan)
    for work, tokens in zip(plan.work, sampled, strict=True):
        if work.samples:
            work.sequence.tokens[-1:] = tokens
            work.sequence.new_tokens += len(tokens) - 1
        planner.landed(work, tokens)
    planner.blocks.check()


def started(planner, *sequences):
    """Brings sequences to where they decode."""
    for sequence in sequences:
        planner.add(sequence)
    while any(sequence.num_pending != 1 for sequence in sequences):
        go_on(planner, planner.plan())


def test_step_times_are_learned_by_rows_and_proposed_tokens():
    learned = []

    class Watched(NgramProposer):
        def took(self, *step):
            learned.append(step)

    planner = speculating(proposer=Watched(2, MAX_CONTEXT))
    started(planner, looping("a"), looping("b"))
    plan = planner.plan()
    planner.ran(plan, 0.5)
    assert learned == [(2, plan.num_proposed, 0.5)]
    assert plan.num_proposed > 0


def test_they_take_what_budget_is_left():
    planner = speculating(chunk_tokens=5)
    started(planner, looping("a"), looping("b"))
    counts = [work.count for work in planner.plan().work]
    assert sum(counts) <= 7 and max(counts) > 1
    planner.add(looping("prompt", 40))
    plan = planner.plan()
    assert plan.num_proposed == 0
    assert [work.count for work in plan.work] == [1, 1, 5]


def test_they_end_where_the_sequence_parks():
    planner, sequence = speculating(num_blocks=60), looping("parks", park_after=3)
    started(planner, sequence)
    assert planner.plan().num_proposed == 1
    go_on(planner, planner.plan())
    assert sequence.tokens_left(MAX_CONTEXT) == 0


def test_they_never_preempt_and_use_the_slots_there_are():
    planner = speculating(num_blocks=8)
    first, second = looping("a", 13), looping("b", 13)
    started(planner, first, second)  # four blocks each: none is left
    plan = planner.plan()
    assert {len(work.proposed) for work in plan.work} == {2}  # to the end of the fourth block
    assert planner.preemptions == 0
    assert (len(first.block_ids), len(second.block_ids)) == (4, 4)


def test_they_take_a_new_block_only_while_every_sequence_could_have_one():
    for spare, speculation in ((2, []), (3, ["a"]), (4, ["a", "b"])):
        planner = speculating(num_blocks=8 + spare)
        started(planner, looping("a", 15), looping("b", 15))
        plan = planner.plan()
        assert [work.sequence.seq_id for work in plan.work if work.proposed] == speculation
        assert planner.preemptions == 0


def _positions(work):
    """Of the tokens that a step draws."""
    known = work.sequence.num_tokens
    return range(known, known + len(work.proposed) + 1) if work.samples else range(0)
