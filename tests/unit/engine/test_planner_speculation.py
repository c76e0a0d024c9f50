"""Proposed tokens in plans: they get what budget is left, and cost no sequence its blocks."""

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.blocks import BlockPool
from baton.engine.planner import Planner
from baton.engine.sequence import Sequence
from baton.engine.speculative.ngram import RowCost, SpeculativeConfig, verify
from baton.sampling import SamplingParams

SIZE = 4
MAX_CONTEXT = 200
LOOP = [1, 2, 3, 4, 5]  # what every sequence of these tests repeats, wherever it begins


def make_planner(num_blocks=32, chunk_tokens=64, most=4, max_batch=4):
    blocks = BlockPool(num_blocks, SIZE, prefix_cache=False)
    return Planner(blocks, chunk_tokens, max_batch, SpeculativeConfig(most, MAX_CONTEXT))


def looping(name, length=12, max_tokens=50, **fields):
    tokens = [LOOP[at % len(LOOP)] for at in range(length)]
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence(name, tokens, length, params, **fields)


def run(planner, plan):
    """Every sequence goes on with the loop."""
    for work in plan.work:
        sampled = [LOOP[at % len(LOOP)] for at in _positions(work)]
        work.sequence.tokens += sampled
        work.sequence.new_tokens += len(sampled)
        planner.advance(work, sampled)
    planner.blocks.check()


def started(planner, *sequences):
    """Brings sequences to where they decode."""
    for sequence in sequences:
        planner.add(sequence)
    while any(sequence.num_pending != 1 for sequence in sequences):
        run(planner, planner.plan())


def shape(plan):
    return [(work.sequence.seq_id, work.count, work.proposed) for work in plan.work]


def test_step_times_are_learned_by_rows_and_proposed_tokens():
    learned = []

    class Watched(RowCost):
        def took(self, *step):
            learned.append(step)

    planner = make_planner(most=2)
    planner.speculation = SpeculativeConfig(2, MAX_CONTEXT, Watched())
    started(planner, looping("a"), looping("b"))
    plan = planner.plan()
    planner.ran(plan, 0.5)
    assert learned == [(2, plan.num_proposed, 0.5)]
    assert plan.num_proposed > 0


def test_they_take_what_budget_is_left():
    planner = make_planner(chunk_tokens=5)
    started(planner, looping("a"), looping("b"))
    counts = [count for _, count, _ in shape(planner.plan())]
    assert sum(counts) <= 7 and max(counts) > 1
    planner.add(looping("prompt", 40))
    plan = planner.plan()
    assert plan.num_proposed == 0
    assert [work.count for work in plan.work] == [1, 1, 5]


def test_they_end_where_the_sequence_parks():
    planner, sequence = make_planner(num_blocks=60), looping("parks", park_after=3)
    started(planner, sequence)
    assert [len(draft) for _, _, draft in shape(planner.plan())] == [1]
    run(planner, planner.plan())
    assert sequence.tokens_left(MAX_CONTEXT) == 0


def test_they_never_preempt_and_use_the_slots_there_are():
    planner = make_planner(num_blocks=8)
    first, second = looping("a", 13), looping("b", 13)
    started(planner, first, second)  # four blocks each: none is left
    plan = planner.plan()
    assert {len(work.proposed) for work in plan.work} == {2}  # to the end of the fourth block
    assert planner.preemptions == 0
    assert (len(first.block_ids), len(second.block_ids)) == (4, 4)


def test_they_take_a_new_block_only_while_every_sequence_could_have_one():
    for spare, speculation in ((2, []), (3, ["a"]), (4, ["a", "b"])):
        planner = make_planner(num_blocks=8 + spare)
        started(planner, looping("a", 15), looping("b", 15))
        plan = planner.plan()
        assert [name for name, _, draft in shape(plan) if draft] == speculation
        assert planner.preemptions == 0


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    num_blocks=st.integers(12, 30),
    chunk=st.integers(1, 40),
    most=st.integers(1, 6),
    data=st.data(),
)
def test_every_sequence_gets_the_same_tokens_and_nothing_stays_held(
    lengths, num_blocks, chunk, most, data
):
    """Loops that break off now and then, in pools so small that sequences lose their blocks."""
    planner = make_planner(num_blocks, chunk, most, max_batch=3)
    numbers = data.draw(st.randoms(use_true_random=False))
    alive = [looping(f"s{i}", n, max_tokens=12) for i, n in enumerate(lengths)]
    broken = {sequence: numbers.randrange(12) for sequence in alive}
    for sequence in alive:
        planner.add(sequence)
    for _ in range(3000):
        plan = planner.plan()
        assert plan.num_tokens <= chunk + planner.max_batch
        assert [work.count > 1 for work in plan.work] == sorted(
            work.count > 1 for work in plan.work
        )
        for work in plan.work:
            sequence = work.sequence
            held = len(sequence.block_ids) * SIZE
            assert work.start + work.count <= held
            sampled = [_true_token(sequence, at, broken) for at in _positions(work)]
            sampled = sampled[: verify(work.proposed, sampled)] if sampled else []
            sequence.tokens += sampled
            planner.advance(work, sampled)
            assert sequence.num_tokens - sequence.prompt_tokens <= 12
        planner.blocks.check()
        for sequence in [s for s in alive if s.num_tokens - s.prompt_tokens == 12]:
            planner.remove(sequence)
            planner.free(sequence)
            alive.remove(sequence)
            output = range(sequence.prompt_tokens, sequence.num_tokens)
            assert sequence.tokens[sequence.prompt_tokens :] == [
                _true_token(sequence, at, broken) for at in output
            ]
        if not alive:
            break
    assert not alive
    assert planner.blocks.num_held == 0


def _positions(work):
    """Of the tokens that a step draws."""
    known = work.sequence.num_tokens
    return range(known, known + len(work.proposed) + 1) if work.samples else range(0)


def _true_token(sequence, at, broken):
    """The token that belongs at a position, whatever was drafted there."""
    return 77 if at == sequence.prompt_tokens + broken[sequence] else LOOP[at % len(LOOP)]
