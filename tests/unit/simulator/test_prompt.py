"""Simulated prompts: equal where and only where their tokens would be."""

import pytest

from baton.bench.request import Demand
from baton.block_hash import hash_chain
from baton.simulator.prompt import Prompt
from router.queueing.fair_queue import FairQueue
from router.request import Demand as RouterDemand
from router.request import TenantShare

SIZE = 16


def prompt(*parts):
    return Prompt(Demand(0.0, parts, 1), SIZE)


def common(one, other):
    """Leading blocks that are equal."""
    return sum(a == b for a, b in zip(hashes(one), hashes(other), strict=False))


def hashes(one):
    return one.leading_hashes(len(one.blocks))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (((1, 64), (2, 40)), ((1, 64), (3, 40))),
        (((1, 50), (2, 40)), ((1, 50), (3, 40))),
        (((1, 40),), ((1, 80),)),
        (((1, 20), (2, 20), (3, 30)), ((1, 20), (2, 20), (4, 30))),
        (((1, 20), (2, 30)), ((2, 30), (1, 20))),
        (((1, 7),), ((1, 7),)),
    ],
)
def test_as_many_blocks_are_equal_as_of_the_tokens(one, other):
    ids = range(1000, 4000)
    tokens = [Demand(0.0, parts, 1).prompt(ids) for parts in (one, other)]
    chains = [hash_chain(of, SIZE) for of in tokens]
    expected = sum(a == b for a, b in zip(*chains, strict=False))
    assert common(prompt(*one), prompt(*other)) == expected
    assert len(prompt(*one).blocks) == len(chains[0])


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 160])
def test_the_router_hashes_it_as_the_workers_do(tokens):
    one = prompt((1, tokens))
    pending = FairQueue(lambda: 0.0).add(TenantShare("t"), 1.0)
    found = list(RouterDemand(one, pending).hashes(SIZE))
    assert found == hashes(one)[: (tokens - 1) // SIZE]
    assert len(one) == tokens


def test_slices_of_less_than_a_block_are_equal_only_where_the_block_is():
    """The router compares prompts in work by their first 16 tokens, blocks may be larger."""
    one, other = (Prompt(Demand(0.0, ((seed, 1000),), 1), 256) for seed in (1, 2))
    assert one[:16] != other[:16]
    assert one[:16] == Prompt(Demand(0.0, ((1, 300),), 1), 256)[:16]
    assert one[:256] == (one.blocks[0],)
