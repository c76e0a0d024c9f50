"""Batches built step after step are those that would be built anew each time."""

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.batch import BatchBuilder
from baton.engine.scheduler import ScheduledSequence, ScheduledStep
from baton.engine.sequence import Sequence
from baton.generation.sampling_params import SamplingParams

SIZE = 4


def batches():
    return BatchBuilder(SIZE, torch.device("cpu"))


def from_nothing(plan):
    """The batch of a plan but its block_tables, as plain lists, one token at a time."""
    token_ids: list[int] = []
    logit_rows: list[int] = []
    for work in plan.sequences:
        known = [*work.sequence.tokens, *work.proposed]
        token_ids += known[work.start : work.start + work.count]
        if work.start + work.count == len(known):
            last = len(token_ids) - 1
            logit_rows += range(last - len(work.proposed), last + 1)
    return {
        "token_ids": token_ids,
        "context_lens": [work.start for work in plan.sequences],
        "query_lens": [work.count for work in plan.sequences],
        "logit_rows": logit_rows,
        "num_decodes": sum(work.count == 1 for work in plan.sequences),
    }


def assert_same(batch, plan):
    for name, expected in from_nothing(plan).items():
        value = getattr(batch, name)
        if isinstance(value, torch.Tensor):
            assert value.dtype == torch.int32
            assert value.is_contiguous()
            value = value.tolist()
        assert value == expected, name
    assert batch.block_tables.dtype == torch.int32
    assert batch.block_tables.is_contiguous()
    assert len(batch.block_tables) == len(plan.sequences)
    for work, table in zip(plan.sequences, batch.block_tables.tolist(), strict=True):
        blocks = work.sequence.block_ids
        needed = (work.start + work.count + SIZE - 1) // SIZE
        assert table[:needed] == blocks[:needed]
        own = table[: len(blocks)]
        assert own in (blocks, blocks[:needed] + [0] * (len(own) - needed)), "own blocks, or none"
        assert not any(table[len(blocks) :]), "behind its blocks there are none"


def a_sequence(name, tokens, blocks):
    return Sequence(name, tokens, len(tokens), SamplingParams(), block_ids=blocks)


def change(dice, sequence):
    """What may happen to a sequence between two steps: new tokens, and further blocks in its list
    or others in a new one."""
    sequence.tokens += [dice.randrange(50) for _ in range(dice.choice((0, 1, 1, 1, 9)))]
    old, needed = sequence.block_ids, -(-len(sequence.tokens) // SIZE) + dice.randrange(2)
    kept = dice.randrange(len(old) + 1) if dice.random() < 0.3 else len(old)
    blocks = old[:kept] + [dice.randrange(1, 200) for _ in range(needed - kept)]
    if kept < len(old) or dice.random() < 0.5:
        sequence.block_ids = blocks
    else:
        old += blocks[kept:]


def some_work(dice, sequence):
    """Its last token, with or without proposed ones; or a chunk, which may end before it."""
    known, room = len(sequence.tokens), len(sequence.block_ids) * SIZE - len(sequence.tokens)
    kind = dice.random()
    if kind < 0.8:
        proposed = range(dice.randint(0, room) if kind < 0.1 else 0)
        return ScheduledSequence(sequence, known - 1, 1 + len(proposed), tuple(proposed))
    start = dice.randrange(known)
    return ScheduledSequence(sequence, start, dice.randint(1, known - start))


@given(seed=st.integers(0, 2**32))
def test_whatever_happens_to_sequences_batches_are_those_of_their_plans(seed):
    dice, built = random.Random(seed), batches()
    alive = [a_sequence(f"s{i}", [i], []) for i in range(5)]
    running = alive[:3]
    for _ in range(40):
        if dice.random() < 0.1:  # another life of the same id
            alive[0] = a_sequence("s0", [0], [])
        if dice.random() < 0.2:
            running = dice.sample(alive, dice.randint(1, 5))
        for sequence in running:
            change(dice, sequence)
        work = [some_work(dice, sequence) for sequence in running]
        if dice.random() < 0.5:
            work = [ScheduledSequence(s, len(s.tokens) - 1, 1) for s in running]
        plan = ScheduledStep(sorted(work, key=lambda one: one.count > 1))
        assert_same(built.build(plan), plan)


def test_a_sequence_that_goes_on_costs_no_new_tensors():
    sequence, built = a_sequence("a", [1, 2, 3, 4], [7]), batches()
    first = built.build(ScheduledStep([ScheduledSequence(sequence, 3, 1)]))
    for token, at in zip(range(5, 13), range(4, 12), strict=True):
        sequence.tokens.append(token)
        sequence.block_ids += [at] if at % SIZE == 0 else []
        plan = ScheduledStep([ScheduledSequence(sequence, at, 1)])
        batch = built.build(plan)
        assert_same(batch, plan)
        assert batch.block_tables.data_ptr() == first.block_tables.data_ptr()
