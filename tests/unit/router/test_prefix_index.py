"""Which workers cache the first blocks of a prompt, beside sets of hashes that are walked."""

import itertools
import random

import pytest

from router.fleet.prefix_index import PrefixIndex


@pytest.mark.parametrize("workers", [3, 40])
def test_the_index_finds_what_each_worker_caches_as_workers_come_and_go(workers):
    dice, index, cached = random.Random(workers), PrefixIndex(), {}
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
                index.clear(slot)
                cached[slot] = set()
            else:
                index.leave(slot)
                del cached[slot]
        prompt = range(dice.randrange(25))
        leading = index.leading(iter(prompt))
        for slot, own in cached.items():
            assert index._cached[slot] == own
            assert leading[slot] == len(list(itertools.takewhile(own.__contains__, prompt)))
    for slot in cached:
        index.leave(slot)
    assert not index._holders
