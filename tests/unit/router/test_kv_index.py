"""Which workers cache the first blocks of a prompt, beside sets of hashes that are walked."""

import asyncio
import collections
import itertools
import random
from array import array

import pytest

from router.fleet.kv_index import MOST_AT_ONCE, AssignedPrompt, KvIndex


@pytest.mark.parametrize("workers", [3, 40])
def test_the_index_finds_what_each_worker_caches_as_workers_come_and_go(workers):
    dice, index, cached = random.Random(workers), KvIndex(), {}
    for _ in range(400):
        if len(cached) < workers and dice.random() < 0.3:
            slot = index.join()
            assert slot not in cached and slot < workers
            cached[slot] = set()
        elif cached:
            slot = dice.choice(sorted(cached))
            some = set(range(dice.randrange(30))) if dice.random() < 0.5 else {dice.randrange(30)}
            act = dice.choice(["store"] * 6 + ["evict"] * 3 + ["clear", "leave"])
            if act == "store":
                index.store(slot, some)
                cached[slot] |= some
            elif act == "evict":
                index.evict(slot, some)
                cached[slot] -= some
            elif act == "clear":
                index.take(slot, [], cleared=True)
                cached[slot] = set()
            else:
                index.leave(slot)
                del cached[slot]
        prompt = range(dice.randrange(25))
        leading = index.leading(iter(prompt))
        for slot, own in cached.items():
            assert index._num_cached[slot] == len(own) and set(index._stored[slot]) >= own
            num_blocks = len(list(itertools.takewhile(own.__contains__, prompt)))
            assert num_blocks == (0 if leading is None else leading[slot])
    for slot in cached:
        index.leave(slot)
    assert not index._holders


async def test_whole_caches_are_taken_in_by_parts_between_which_the_loop_runs(monkeypatch):
    """100 workers that cache 50,000 blocks each kept a router that starts from its loop for 3 s."""
    index, parts, store = KvIndex(), [], KvIndex.store
    monkeypatch.setattr(
        KvIndex, "store", lambda *args: parts.append((turns, len(args[2]))) or store(*args)
    )
    turns, (one, other) = 0, (index.join(), index.join())
    many = [random.getrandbits(64) for _ in range(5 * MOST_AT_ONCE)]
    index.take(one, many)
    index.take(other, many, cleared=True)
    index.take(one, [], many[:3])
    index.take(one, [7])
    assert not parts, "those of all workers may come in one turn"
    while index._work:
        await asyncio.sleep(0)
        turns += 1
    by_turn = collections.Counter()
    for turn, size in parts:
        by_turn[turn] += size
    assert max(by_turn.values()) == MOST_AT_ONCE
    assert index.leading(many)[[one, other]].tolist() == [0, len(many)]
    assert index.leading(many[3:])[[one, other]].tolist() == [len(many) - 3] * 2
    assert index.leading([7])[one] == 1
    index.leave(one)
    index.take(other, many[:1], cleared=True)
    await done(index)
    assert index.join() == one and index._holders == {many[0]: 1 << other}


async def done(index):
    while index._work:  # noqa: ASYNC110 - no event is sent
        await asyncio.sleep(0)


async def test_what_a_worker_evicts_again_and_again_is_forgotten():
    index = KvIndex()
    slot = index.join()
    for start in range(0, 20 * MOST_AT_ONCE, MOST_AT_ONCE):
        index.take(slot, range(start, start + MOST_AT_ONCE), range(start))
        await done(index)
    assert index._num_cached[slot] == MOST_AT_ONCE
    assert len(index._stored[slot]) <= 3 * MOST_AT_ONCE + MOST_AT_ONCE
    index.leave(slot)
    await done(index)
    assert not index._holders


def test_prompts_in_work_are_found_by_their_common_tokens_until_they_end():
    index, shared = KvIndex(), array("I", range(100))
    first = AssignedPrompt(90, 0.0, shared + array("I", [7] * 50), "a")
    second = AssignedPrompt(20, 0.0, shared[:40], "a")
    index.begin("first", 3, first)
    index.begin("second", 5, second)
    asked = shared + array("I", [8] * 50)
    assert list(index.in_work("a", asked)) == [(3, 96, 90), (5, 32, 20)]  # whole blocks of 16
    assert list(index.in_work("a", first.token_ids)) == [(3, 144, 90), (5, 32, 20)]
    assert not [*index.in_work("b", asked), *index.in_work("a", asked[1:])]
    index.end("first", first)
    assert list(index.in_work("a", asked)) == [(5, 32, 20)]
    index.end("second", second)
    assert not index._in_work
