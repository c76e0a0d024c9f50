"""The planner: chunks, decode first, cache hits, preemption and resume, all from two numbers."""

from baton import prefix
from baton.engine.blocks import BlockPool
from baton.engine.planner import Planner
from baton.engine.sequence import Sequence
from baton.sampling import SamplingParams

SIZE = 4


def make_planner(num_blocks=16, chunk_tokens=8, max_batch=4):
    return Planner(BlockPool(num_blocks, SIZE), chunk_tokens, max_batch)


def make_sequence(name, length, first=0, priority=0.0):
    tokens = list(range(first, first + length))
    return Sequence(name, tokens, length, SamplingParams(), priority=priority)


def run(planner, plan):
    """What a step does to the books: computes, and draws a token (7) where one is due."""
    for work in plan.work:
        samples = work.samples
        planner.advance(work)
        if samples:
            work.sequence.tokens.append(7)
    planner.blocks.check()


def shape(plan):
    return [(work.sequence.seq_id, work.start, work.count) for work in plan.work]


def test_a_long_prompt_catches_up_in_chunks_then_decodes():
    planner = make_planner()
    planner.add(make_sequence("a", 18))
    seen = []
    for _ in range(5):
        plan = planner.plan()
        seen += shape(plan)
        run(planner, plan)
    assert seen == [("a", 0, 8), ("a", 8, 8), ("a", 16, 2), ("a", 18, 1), ("a", 19, 1)]


def test_decoding_sequences_go_before_prompts():
    planner = make_planner()
    planner.add(make_sequence("short", 2))
    run(planner, planner.plan())
    planner.add(make_sequence("long", 30, first=100))
    assert shape(planner.plan()) == [("short", 2, 1), ("long", 0, 8)]


def test_an_older_prompt_does_not_starve_a_decoding_sequence():
    planner = make_planner(chunk_tokens=8)
    planner.add(make_sequence("long", 40))
    run(planner, planner.plan())
    late = make_sequence("late", 1, first=100, priority=9.0)
    assert planner.reserve(late)
    planner.add(late)
    for start in (0, 1):  # not in the batch yet, then in it
        plan = planner.plan()
        assert shape(plan) == [("late", start, 1), ("long", 8 + 8 * start, 8)]
        run(planner, plan)


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
    planner = make_planner(chunk_tokens=64)
    planner.add(make_sequence("a", 10))
    planner.add(make_sequence("b", 10))
    assert shape(planner.plan()) == [("a", 0, 10), ("b", 0, 10)]


def test_the_youngest_is_preempted_and_starts_over_with_its_tokens():
    planner = make_planner(num_blocks=4, chunk_tokens=64)
    old, young = make_sequence("old", 8), make_sequence("young", 7, first=100)
    planner.add(old)
    planner.add(young)
    run(planner, planner.plan())
    plan = planner.plan()
    assert shape(plan) == [("old", 8, 1)]
    assert (young.preemptions, young.num_computed, young.block_ids) == (1, 0, [])
    assert list(planner.waiting) == [young]
    run(planner, plan)
    planner.remove(old)
    planner.free(old)
    assert shape(planner.plan()) == [("young", 4, 4)]  # its first block was still cached
    assert young.num_tokens == 8


def test_the_batch_is_bounded():
    planner = make_planner(max_batch=2, chunk_tokens=64)
    for name in "abc":
        planner.add(make_sequence(name, 2))
    assert len(planner.plan().work) == 2
    assert len(planner.waiting) == 1


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
