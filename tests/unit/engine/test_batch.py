"""Batches built step after step are those that would be built anew each time."""

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.batch import BatchBuilder
from baton.engine.blocks import BlockPool
from baton.engine.planner import Plan, Planner, Work
from baton.engine.sequence import Sequence
from baton.sampling import SamplingParams

SIZE = 4


def batches():
    return BatchBuilder(SIZE, torch.device("cpu"))


def from_nothing(plan):
    """The batch of a plan but its block_tables, as plain lists, one token at a time."""
    token_ids: list[int] = []
    logit_rows: list[int] = []
    for work in plan.work:
        known = [*work.sequence.tokens, *work.proposed]
        token_ids += known[work.start : work.start + work.count]
        if work.start + work.count == len(known):
            last = len(token_ids) - 1
            logit_rows += range(last - len(work.proposed), last + 1)
    return {
        "token_ids": token_ids,
        "context_lens": [work.start for work in plan.work],
        "query_lens": [work.count for work in plan.work],
        "logit_rows": logit_rows,
        "num_decodes": sum(work.count == 1 for work in plan.work),
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
    assert len(batch.block_tables) == len(plan.work)
    for work, table in zip(plan.work, batch.block_tables.tolist(), strict=True):
        blocks = work.sequence.block_ids
        needed = (work.start + work.count + SIZE - 1) // SIZE
        assert table[:needed] == blocks[:needed]
        own = table[: len(blocks)]
        assert own in (blocks, blocks[:needed] + [0] * (len(own) - needed)), "own blocks, or none"
        assert not any(table[len(blocks) :]), "behind its blocks there are none"


def a_sequence(name, tokens, blocks):
    return Sequence(name, tokens, len(tokens), SamplingParams(), block_ids=blocks)


class Life:
    """A planner with sequences that come, are preempted, draft, are cut short and leave."""

    def __init__(self, seed):
        self.dice = random.Random(seed)
        chunk, most = self.dice.choice((3, 8, 40)), self.dice.choice((2, 5, 40))
        self.planner = Planner(BlockPool(self.dice.choice((20, 200)), SIZE), chunk, most)
        self.drafts = self.dice.random() < 0.5
        self.alive: list[Sequence] = []

    def come(self):
        # Two lives of one id, and shared prefixes, must not be mistaken for each other.
        name = f"s{self.dice.randrange(3)}"
        first, length = self.dice.randrange(2) * 100, self.dice.randrange(1, 24)
        sequence = a_sequence(name, list(range(first, first + length)), [])
        self.alive.append(sequence)
        self.planner.add(sequence)

    def leave(self):
        if self.alive:
            sequence = self.alive.pop(self.dice.randrange(len(self.alive)))
            self.planner.remove(sequence)
            self.planner.free(sequence)

    def move(self):
        """A sequence's last blocks become others, in its list or in a new one; more at times."""
        running = [s for s in self.planner.running if s.block_ids]
        if not running:
            return
        sequence = self.dice.choice(running)
        kept = self.dice.randrange(len(sequence.block_ids))
        needed = -(-sequence.num_tokens // SIZE)
        other = self.planner.blocks.allocate(max(0, needed - kept) + self.dice.randrange(2))
        if other is not None:
            self.planner.blocks.release(sequence.block_ids[kept:])
            if self.dice.random() < 0.5:
                sequence.block_ids = sequence.block_ids[:kept] + other
            else:
                sequence.block_ids[kept:] = other
            if self.dice.random() < 0.5:  # as one that starts over
                sequence.num_computed = min(sequence.num_computed, kept * SIZE)

    def plan(self):
        plan = self.planner.plan()
        if self.drafts and self.dice.random() < 0.5:
            plan.work = [self.with_draft(work) for work in plan.work]
            plan.work.sort(key=lambda work: work.count > 1)
        return plan

    def with_draft(self, work):
        room = len(work.sequence.block_ids) * SIZE - work.sequence.num_tokens
        if work.count > 1 or not work.samples or room == 0:
            return work
        draft = tuple(self.dice.randrange(50) for _ in range(self.dice.randint(0, room)))
        return Work(work.sequence, work.start, 1 + len(draft), draft)

    def run(self, plan):
        for work in plan.work:
            samples = work.samples
            self.planner.advance(work)
            if samples:
                work.sequence.tokens.append(self.dice.randrange(50))


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_life_of_sequences_gives_the_batches_of_their_plans(seed):
    life, built = Life(seed), batches()
    for _ in range(40):
        if life.dice.random() < 0.6:
            life.dice.choice((life.come, life.leave, life.move, life.move))()
        plan = life.plan()
        if plan.work:
            assert_same(built.build(plan), plan)
            life.run(plan)


def test_a_sequence_that_goes_on_costs_no_new_tensors():
    sequence, built = a_sequence("a", [1, 2, 3, 4], [7]), batches()
    first = built.build(Plan([Work(sequence, 3, 1)]))
    for token, at in zip(range(5, 13), range(4, 12), strict=True):
        sequence.tokens.append(token)
        sequence.block_ids += [at] if at % SIZE == 0 else []
        plan = Plan([Work(sequence, at, 1)])
        batch = built.build(plan)
        assert_same(batch, plan)
        assert batch.block_tables.data_ptr() == first.block_tables.data_ptr()
