"""The scheduler: chunks, decode first, cache hits, priorities, preemption, resume, speculation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton import block_hash
from baton.engine.block_manager import BlockManager
from baton.engine.chunk_budget import ChunkBudget
from baton.engine.scheduler import SCORED_ROWS, Scheduler
from baton.engine.sequence import Sequence
from baton.engine.speculative.ngram import NgramProposer
from baton.generation.sampling_params import SamplingParams

SIZE = 4


def make_scheduler(num_blocks=16, chunk_tokens=8, max_batch=4, proposer=None):
    blocks = BlockManager(num_blocks, SIZE, prefix_cache=proposer is None)
    return Scheduler(blocks, ChunkBudget(chunk_tokens), max_batch, proposer)


def make_sequence(name, length, first=0, priority=0.0):
    tokens = list(range(first, first + length))
    return Sequence(name, tokens, length, SamplingParams(), priority=priority)


def run(scheduler, step, text=(7,)):
    """What a step does to the books: computes, and draws tokens of a text that repeats itself."""
    drawn = [[text[at % len(text)] for at in _positions(one)] for one in step.sequences]
    scheduler.update_after_launch(step)
    for scheduled, tokens in zip(step.sequences, drawn, strict=True):
        if scheduled.samples:
            scheduled.sequence.tokens[-1:] = tokens
            scheduled.sequence.new_tokens += len(tokens) - 1
        scheduler.update_after_landing(scheduled, tokens)
    scheduler.blocks.check()


def _positions(scheduled):
    """Of the tokens that a step draws."""
    known = scheduled.sequence.num_tokens
    return range(known, known + len(scheduled.proposed) + 1) if scheduled.samples else range(0)


def shape(step):
    return [
        (scheduled.sequence.seq_id, scheduled.start, scheduled.count)
        for scheduled in step.sequences
    ]


def rounds(scheduler, count):
    """What is planned and run in so many steps."""
    seen = []
    for _ in range(count):
        step = scheduler.schedule()
        seen += shape(step)
        run(scheduler, step)
    return seen


def finish(scheduler, sequence):
    scheduler.remove(sequence)
    scheduler.free(sequence)
    scheduler.blocks.check()


def test_a_long_prompt_catches_up_in_chunks_then_decodes():
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", 18))
    expected = [("a", 0, 8), ("a", 8, 8), ("a", 16, 2), ("a", 18, 1), ("a", 19, 1)]
    assert rounds(scheduler, 5) == expected


def test_sequences_of_prompts_are_told_from_those_that_decode():
    """Also where several prompts end in a step, or one row of a prompt is left to compute."""
    scheduler = make_scheduler(chunk_tokens=16)
    for name, length, first in (("a", 5, 0), ("b", 7, 50), ("c", 5, 100)):
        scheduler.add(make_sequence(name, length, first))
    step = scheduler.schedule()
    assert (shape(step)[:2], step.num_chunks) == ([("a", 0, 5), ("b", 0, 7)], 3)
    run(scheduler, step)
    step = scheduler.schedule()
    rows = [("a", 5, 1), ("b", 7, 1), ("c", 4, 1)]
    assert (sorted(shape(step)), step.num_chunks) == (rows, 1)
    run(scheduler, step)
    step = scheduler.schedule()
    assert (len(step.sequences), step.num_chunks) == (3, 0)
    run(scheduler, step)
    scheduler._preempt(next(one for one in scheduler.running if one.seq_id == "b"))
    step = scheduler.schedule()
    assert ("b", 8, 2) in shape(step)
    assert step.num_chunks == 1, "what is computed again delays streams as a prompt does"


def test_prompts_pass_one_that_lacks_rows_to_score():
    chunk = ChunkBudget(2 * SCORED_ROWS, min_tokens=2 * SCORED_ROWS)
    scheduler = Scheduler(BlockManager(256, SIZE), chunk, max_batch=4)
    for name in ("first", "second"):
        scheduler.add(make_sequence(name, SCORED_ROWS + 1))
        scheduler.waiting.last.num_scored = 0
    scheduler.add(make_sequence("other", 8))
    assert rounds(scheduler, 1) == [("first", 0, SCORED_ROWS), ("other", 0, 8)]
    assert len(scheduler.waiting) == 1
    assert ("second", 0, SCORED_ROWS) in shape(scheduler.schedule())


def test_a_chunk_takes_its_time_at_the_rate_of_the_last_steps():
    scheduler = Scheduler(BlockManager(4096, SIZE), ChunkBudget(512, seconds=0.1), max_batch=4)

    def computed(tokens_per_s, steps):
        """Sizes of so many chunks at that rate."""
        sizes = []
        for _ in range(steps):
            sizes.append((step := scheduler.schedule()).num_chunk_tokens)
            scheduler.record_step(step, sizes[-1] / tokens_per_s)
            run(scheduler, step)
        return sizes

    scheduler.add(make_sequence("a", 15_000))
    first, *others = computed(2048, 5)
    assert (first, {*others}) == (64, {204})  # nothing is known of the first
    slower = computed(1024, 12)  # as behind a long context
    assert slower == sorted(slower, reverse=True) and 102 <= slower[-1] < 110
    assert slower[2] < 150
    assert computed(10, 30)[-1] == 64
    assert computed(1e6, 30)[-1] == 512
    assert scheduler.chunk.tokens_per_s > 5120


def test_a_chunk_may_take_longer_while_no_sequence_runs():
    chunk = ChunkBudget(512, seconds=0.1, alone_s=0.2)
    scheduler = Scheduler(BlockManager(4096, SIZE), chunk, max_batch=4)
    scheduler.add(make_sequence("long", 3000))
    run(scheduler, step := scheduler.schedule())
    scheduler.record_step(step, step.num_chunk_tokens / 1000)
    assert scheduler.schedule().num_chunk_tokens == 200
    scheduler.add(make_sequence("stream", 1, first=5000, priority=-1.0))
    run(scheduler, scheduler.schedule())
    assert shape(scheduler.schedule())[0] == ("stream", 1, 1)
    assert scheduler.schedule().num_chunk_tokens == 100


def test_only_steps_with_some_tokens_of_prompts_measure_their_rate():
    scheduler = Scheduler(BlockManager(64, SIZE), ChunkBudget(64), max_batch=64)
    scheduler.add(make_sequence("short", 31))
    scheduler.record_step(step := scheduler.schedule(), 1.0)
    run(scheduler, step)
    assert scheduler.chunk.tokens_per_s == 0
    scheduler.add(make_sequence("long", 32, first=100))
    scheduler.record_step(scheduler.schedule(), 1.0)
    assert scheduler.chunk.tokens_per_s == 33  # rows: the other's is one


def test_a_batch_above_the_chunk_budget_starves_nobody():
    scheduler = make_scheduler(num_blocks=64, chunk_tokens=4, max_batch=9)
    streams = [make_sequence(f"s{i}", 3, first=100 * i) for i in range(8)]
    for sequence in streams[:6]:
        scheduler.add(sequence)
    while any(sequence.num_pending != 1 for sequence in streams[:6]):
        run(scheduler, scheduler.schedule())
    for sequence in streams[6:]:  # their KV has come
        assert scheduler.reserve(sequence, extra_tokens=1)
        sequence.num_computed = 2
        scheduler.add(sequence)
    scheduler.add(make_sequence("prompt", 20, first=900, priority=-1.0))
    for number in range(5):
        step = scheduler.schedule()
        assert {name for name, _, count in shape(step) if count == 1} == {f"s{i}" for i in range(8)}
        assert shape(step)[-1] == ("prompt", 4 * number, 4)
        run(scheduler, step)


@pytest.mark.parametrize(
    ("prompt_s", "virtual_lag_s"), [(2.0, [5, 10, 13, 13]), (0.0, [0, 0, 0, 0])]
)
def test_virtual_time_advances_with_prompts_that_are_done_by_what_they_count(
    prompt_s, virtual_lag_s
):
    scheduler, found = make_scheduler(), []
    sequence = make_sequence("a", 18)
    sequence.prompt_s = prompt_s
    scheduler.add(sequence)
    for number in range(4):
        step = scheduler.schedule()
        sequence.new_tokens = int(number > 2)  # decodes
        scheduler.record_step(step, 5.0)
        found.append(scheduler.virtual_lag_s)
        run(scheduler, step)
    assert found == virtual_lag_s


def test_a_second_prompt_skips_what_the_first_left_in_the_cache():
    scheduler = make_scheduler(chunk_tokens=32)
    first, second = make_sequence("a", 10), make_sequence("b", 11)
    scheduler.add(first)
    run(scheduler, scheduler.schedule())
    scheduler.add(second)
    step = scheduler.schedule()
    assert ("b", 8, 3) in shape(step)
    assert second.num_cached == 8
    assert second.block_ids[:2] == first.block_ids[:2]


def test_blocks_are_not_shared_before_the_step_that_fills_them_has_run():
    scheduler = make_scheduler(chunk_tokens=64, max_batch=2)
    for name in "abc":  # the batch is bounded
        scheduler.add(make_sequence(name, 10))
    assert shape(scheduler.schedule()) == [("a", 0, 10), ("b", 0, 10)]
    assert len(scheduler.waiting) == 1


def test_the_last_by_priority_is_preempted_and_starts_over_in_its_place():
    scheduler = make_scheduler(num_blocks=4, chunk_tokens=64)
    late = make_sequence("late", 7, 100, priority=9.0)
    early = make_sequence("early", 8, priority=5.0)
    scheduler.add(late)
    scheduler.add(early)  # younger, and yet it stays
    place = late.order
    rounds(scheduler, 1)
    assert rounds(scheduler, 1) == [("early", 8, 1)]
    assert (late.preemptions, early.preemptions, late.order) == (1, 0, place)
    assert (late.num_computed, late.block_ids) == (0, [])
    newcomer = make_sequence("newcomer", 2, 200, priority=20.0)
    scheduler.add(newcomer)
    assert list(scheduler.waiting) == [late, newcomer]
    scheduler.remove(newcomer)
    finish(scheduler, early)
    assert shape(scheduler.schedule()) == [("late", 4, 4)]  # its first block was still cached
    assert late.num_tokens == 8


def test_a_reservation_has_room_for_the_first_token():
    scheduler = make_scheduler(num_blocks=3)
    sequence = make_sequence("a", 8)
    assert scheduler.reserve(sequence, extra_tokens=1)
    assert len(sequence.block_ids) == 3
    assert not scheduler.reserve(make_sequence("b", 1, first=50), extra_tokens=1)
    scheduler.blocks.check()


def test_waiting_ones_need_blocks_if_preempted_or_if_there_were_none_for_the_first():
    scheduler = make_scheduler(num_blocks=4)
    first, second = make_sequence("a", 8), make_sequence("b", 16, first=50)
    scheduler.add(first)
    scheduler.add(second)
    assert rounds(scheduler, 1) == [("a", 0, 8)]
    assert scheduler.waiting and not scheduler.lacks_blocks  # only the chunk had no room
    assert rounds(scheduler, 1) == [("a", 8, 1)]
    assert scheduler.waiting and scheduler.lacks_blocks
    finish(scheduler, second)
    assert not scheduler.lacks_blocks
    scheduler._preempt(first)
    assert scheduler.lacks_blocks


def test_one_that_holds_its_blocks_does_not_wait_behind_one_that_needs_them():
    scheduler = make_scheduler(num_blocks=4)
    reserved = make_sequence("reserved", 11)
    assert scheduler.reserve(reserved, extra_tokens=1)
    scheduler.add(make_sequence("needs", 8, first=100))
    assert shape(scheduler.schedule()) == []
    scheduler.add(reserved)  # its KV has come
    assert shape(scheduler.schedule()) == [("reserved", 0, 8)]
    assert scheduler.num_waiting == 1


def test_one_that_waits_for_blocks_is_hashed_once(monkeypatch):
    scheduler = make_scheduler(num_blocks=16, chunk_tokens=64)
    first = make_sequence("first", 40)
    scheduler.add(first)
    run(scheduler, scheduler.schedule())
    hashed, hash64 = [], block_hash._hash64

    def watched(data):
        hashed.append(len(data))
        return hash64(data)

    monkeypatch.setattr(block_hash, "_hash64", watched)
    scheduler.add(make_sequence("waits", 64))  # 40 of its tokens are cached, and yet it has no room
    for _ in range(20):
        run(scheduler, scheduler.schedule())
    assert scheduler.num_waiting == 1
    # The root of the empty salt has no bytes; two blocks belong to the first one's output.
    of_a_block = 8 + 4 * SIZE
    assert sum(hashed) <= (64 // SIZE + 20 // SIZE) * of_a_block


class Before:
    """Who was where when a step was planned."""

    def __init__(self, scheduler):
        self.running, self.waiting = list(scheduler.running), list(scheduler.waiting)
        self.behind = [s for s in self.running if s.num_pending > 1]
        self.holding = [*scheduler.ready, *scheduler.holding]
        everyone = (*self.running, *self.holding, *self.waiting)
        self.pending = {s.seq_id: s.num_pending for s in everyone}


def check_order(scheduler, before, step):
    """A sequence that got less than it needs was not passed by one with a later finish time."""
    got = {scheduled.sequence.seq_id: scheduled.count for scheduled in step.sequences}
    in_reach = [*before.behind, *before.holding, *before.waiting]
    taken = [s for s in in_reach if got.get(s.seq_id, 0) > 0 and before.pending[s.seq_id] > 1]
    joined = [s for s in taken if s not in before.running]
    for sequence in in_reach:
        if got.get(sequence.seq_id, 0) >= sequence.num_pending:
            continue
        if sequence in scheduler.waiting:
            # It found no place or no blocks, or lost them: then no later one found any after
            # it. Those who hold theirs compete with it no more.
            assert all(s.order < sequence.order for s in joined if s in before.waiting)
        elif sequence not in before.running and sequence not in scheduler.running:
            assert all(s.order < sequence.order for s in joined)
        else:
            assert all(s.order <= sequence.order for s in taken)


@st.composite
def arrivals(draw):
    """For each step what comes: (length, how long until it is due, whether it is reserved)."""
    one = st.tuples(st.integers(1, 30), st.integers(0, 12), st.booleans())
    return draw(st.lists(st.lists(one, max_size=3), min_size=1, max_size=12))


@given(arrivals(), st.integers(9, 24), st.integers(1, 40), st.integers(1, 4))
def test_priorities_are_kept_and_every_sequence_finishes(coming, num_blocks, chunk, max_batch):
    scheduler = make_scheduler(num_blocks, chunk, max_batch)
    alive: dict[str, tuple[Sequence, int]] = {}
    for number in range(3000):
        for length, delay, reserved in coming[number] if number < len(coming) else ():
            first, due = 100 * (number % 3), float(number + delay)
            sequence = make_sequence(f"s{len(alive)}-{number}", length, first, due)
            if reserved and (scheduler.waiting or not scheduler.reserve(sequence, extra_tokens=1)):
                continue
            scheduler.add(sequence)
            alive[sequence.seq_id] = sequence, length + 4
        before = Before(scheduler)
        step = scheduler.schedule()
        assert scheduler.queue_tokens == sum(one.num_pending for one, _ in alive.values())
        assert step.num_tokens <= chunk + max_batch
        planned = {scheduled.sequence for scheduled in step.sequences}
        for sequence in before.running:
            if before.pending[sequence.seq_id] == 1:
                assert sequence in planned or sequence not in scheduler.running
        assert len(scheduler.running) <= max_batch
        check_order(scheduler, before, step)
        run(scheduler, step)
        for sequence, goal in list(alive.values()):
            if sequence.num_tokens >= goal:
                finish(scheduler, sequence)
                del alive[sequence.seq_id]
        if not alive and number >= len(coming):
            break
    assert not alive
    assert (scheduler.blocks.num_held, scheduler.num_waiting, scheduler.queue_tokens) == (0, 0, 0)


# Proposed tokens get what budget is left, and cost no sequence its blocks.

MAX_CONTEXT = 200
LOOP = [1, 2, 3, 4, 5]  # what every sequence of these tests repeats, wherever it begins


def speculating(num_blocks=32, chunk_tokens=64, proposer=None):
    proposer = proposer or NgramProposer(4, MAX_CONTEXT)
    return make_scheduler(num_blocks, chunk_tokens, proposer=proposer)


def looping(name, length=12, max_tokens=50, **fields):
    tokens = [LOOP[at % len(LOOP)] for at in range(length)]
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence(name, tokens, length, params, **fields)


def started(scheduler, *sequences):
    """Brings sequences to where they decode."""
    for sequence in sequences:
        scheduler.add(sequence)
    while any(sequence.num_pending != 1 for sequence in sequences):
        run(scheduler, scheduler.schedule(), LOOP)


def test_step_times_are_learned_by_rows_and_proposed_tokens():
    learned = []

    class Watched(NgramProposer):
        def record_step(self, *step):
            learned.append(step)

    scheduler = speculating(proposer=Watched(2, MAX_CONTEXT))
    started(scheduler, looping("a"), looping("b"))
    step = scheduler.schedule()
    scheduler.record_step(step, 0.5)
    assert learned == [(2, step.num_proposed, 0.5)]
    assert step.num_proposed > 0


def test_they_take_what_budget_is_left():
    scheduler = speculating(chunk_tokens=5)
    started(scheduler, looping("a"), looping("b"))
    counts = [scheduled.count for scheduled in scheduler.schedule().sequences]
    assert sum(counts) <= 7 and max(counts) > 1
    scheduler.add(looping("prompt", 40))
    step = scheduler.schedule()
    assert step.num_proposed == 0
    assert [scheduled.count for scheduled in step.sequences] == [1, 1, 5]


def test_they_end_where_the_sequence_parks():
    scheduler, sequence = speculating(num_blocks=60), looping("parks", pause_after=3)
    started(scheduler, sequence)
    assert scheduler.schedule().num_proposed == 1
    run(scheduler, scheduler.schedule(), LOOP)
    assert sequence.tokens_left(MAX_CONTEXT) == 0


def test_they_never_preempt_and_use_the_slots_there_are():
    scheduler = speculating(num_blocks=8)
    first, second = looping("a", 13), looping("b", 13)
    started(scheduler, first, second)  # four blocks each: none is left
    step = scheduler.schedule()
    assert {len(scheduled.proposed) for scheduled in step.sequences} == {
        2
    }  # to the end of the fourth block
    assert scheduler.preemptions == 0
    assert (len(first.block_ids), len(second.block_ids)) == (4, 4)


def test_they_take_a_new_block_only_while_every_sequence_could_have_one():
    for spare, speculation in ((2, []), (3, ["a"]), (4, ["a", "b"])):
        scheduler = speculating(num_blocks=8 + spare)
        started(scheduler, looping("a", 15), looping("b", 15))
        step = scheduler.schedule()
        assert [
            scheduled.sequence.seq_id for scheduled in step.sequences if scheduled.proposed
        ] == speculation
        assert scheduler.preemptions == 0
