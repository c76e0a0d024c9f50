"""A plan's batch has the rows that counting them one token at a time gives."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.batch import build_batch
from baton.engine.planner import Plan, Work
from baton.engine.sequence import Sequence
from baton.sampling import SamplingParams

SIZE = 4


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
        assert not any(table[needed:]), "behind the blocks in use there are none"


@st.composite
def works(draw):
    """Some tokens of a sequence that has blocks for all of them, and maybe more."""
    known, proposed = draw(st.integers(1, 20)), draw(st.integers(0, 3))
    count = -(-(known + proposed) // SIZE) + draw(st.integers(0, 2))
    blocks = draw(st.permutations(range(1, 20)))[:count]
    sequence = Sequence("s", list(range(known)), known, SamplingParams(), block_ids=blocks)
    start = draw(st.integers(0, known - 1))
    if proposed:
        return Work(sequence, start, known - start + proposed, tuple(range(50, 50 + proposed)))
    return Work(sequence, start, draw(st.integers(1, known - start)))


@settings(max_examples=150, deadline=None)
@given(st.lists(works(), min_size=1, max_size=5))
def test_batches_are_those_of_their_plans(work):
    plan = Plan(sorted(work, key=lambda one: one.count > 1))
    assert_same(build_batch(plan, SIZE, torch.device("cpu")), plan)
