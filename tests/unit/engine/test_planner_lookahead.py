"""Slots for tokens that are not known yet: given where blocks abound only."""

from __future__ import annotations

import random

import pytest

from baton.engine.blocks import BlockPool
from baton.engine.planner import Plan, Planner
from baton.engine.sequence import Sequence
from baton.sampling import SamplingParams

SIZE = 4


def planner_of(num_blocks: int, lookahead: int = 1, max_batch: int = 4) -> Planner:
    return Planner(BlockPool(num_blocks, SIZE), 16, max_batch, lookahead=lookahead)


def sequence(name: str, length: int) -> Sequence:
    first = 100 * sum(name.encode())
    return Sequence(name, list(range(first, first + length)), length, SamplingParams())


def run(planner: Planner) -> Plan:
    plan = planner.plan()
    planner.blocks.check()
    for work in plan.work:
        samples = work.samples
        planner.advance(work)
        if samples:
            work.sequence.tokens.append(7)
    planner.blocks.check()
    return plan


@pytest.mark.parametrize(("lookahead", "blocks"), [(0, 2), (1, 3), (4, 3), (5, 4)])
def test_decoding_sequences_have_slots_beforehand(lookahead: int, blocks: int) -> None:
    planner, one = planner_of(16, lookahead), sequence("a", 7)
    planner.add(one)
    run(planner)
    assert (one.num_tokens, len(one.block_ids)) == (8, 2)
    planner.plan()
    assert len(one.block_ids) == blocks


def test_none_are_given_that_running_sequences_might_need() -> None:
    planner, some = planner_of(5), [sequence("a", 7), sequence("b", 7)]
    for one in some:
        planner.add(one)
    run(planner)
    planner.plan()  # 4 are held, and 1 is left for two who run
    assert planner.blocks.num_free == 1
    assert planner.preemptions == 0


def names(plan: Plan) -> tuple[list[str], list[str]]:
    """Of those in the plan, and of those who join."""
    return (
        [work.sequence.seq_id for work in plan.work],
        [work.sequence.seq_id for work in plan.joining],
    )


def come(planner: Planner, name: str, length: int = 1) -> None:
    one = sequence(name, length)
    assert planner.reserve(one)
    planner.add(one)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_newcomers_to_a_step_of_single_tokens_join_later(lookahead: int) -> None:
    planner = planner_of(16, lookahead)
    come(planner, "a")
    assert names(run(planner)) == (["a"], []), "a step for nobody else"
    come(planner, "b")
    plan = run(planner)
    assert names(plan) == ((["a"], ["b"]) if lookahead else (["a", "b"], []))
    assert names(run(planner)) == (["a", "b"], [])


def test_newcomers_can_join_at_once() -> None:
    planner = planner_of(16)
    come(planner, "a")
    run(planner)
    come(planner, "b")
    plan = planner.plan()
    plan.join()
    assert names(plan) == (["a", "b"], [])
    assert plan.num_tokens == 2


def test_newcomers_join_at_once_where_a_prompt_is_computed() -> None:
    planner = planner_of(16)
    come(planner, "a")
    run(planner)
    come(planner, "b")
    come(planner, "c", 9)
    assert names(run(planner)) == (["a", "b", "c"], [])


@pytest.mark.parametrize("seed", range(20))
def test_block_accounting_is_right_whatever_happens(
    seed: int,
) -> None:
    dice = random.Random(seed)
    planner = planner_of(dice.choice((12, 40)), dice.choice((1, 3)), 3)
    for step in range(120):
        if dice.random() < 0.2:
            planner.add(sequence(f"s{step}", dice.randrange(1, 20)))
        if len(planner.running) and dice.random() < 0.15:
            gone = planner.running.last
            planner.remove(gone)
            planner.free(gone)
        before = {one: len(one.block_ids) for one in planner.running}
        plan = run(planner)
        for work in plan.work:
            sequence_ = work.sequence
            assert len(sequence_.block_ids) * SIZE >= work.start + work.count
            if sequence_ in before and work.count > 1:
                continue
            most = -(-(sequence_.num_tokens + 3) // SIZE)
            assert len(sequence_.block_ids) <= max(most, before.get(sequence_, 0))
        for one in [one for one in planner.running if one.num_tokens > 40]:
            planner.remove(one)
            planner.free(one)
    while planner.running or planner.num_waiting:
        for group in (planner.running, planner.ready, planner.holding, planner.waiting):
            for one in list(group):
                planner.remove(one)
                planner.free(one)
    planner.blocks.check()
    assert planner.blocks.num_held == 0
