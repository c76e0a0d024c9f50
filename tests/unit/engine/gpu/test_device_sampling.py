"""Tokens sampled on the device are the sampler's."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.backends.gpu.device import Stream
from baton.engine.backends.gpu.device_sampling import DeviceSampler
from baton.engine.sampling import filters
from baton.engine.sampling.sampler import Sampler, SampleRow
from baton.sampling import SamplingParams

VOCAB = 700
VOCABS = (7, VOCAB, 1536)  # less than a block of sums, some and a rest, whole ones
MOST = 150  # more rows than are cut at once


def a_row(dice):
    temperature = dice.choice((0.0, 1e-6, 0.4, 1.0, 1.7))
    params = SamplingParams(
        temperature=temperature,
        top_k=dice.choice((0, 0, 1, 2, 40, VOCAB, 5000)),
        top_p=dice.choice((1.0, 1.0, 0.999, 0.95, 0.5, 1e-9)),
        min_p=dice.choice((0.0, 0.0, 0.1)),
        seed=dice.randrange(1 << 64),
    )
    length = dice.randrange(1, 50)
    return SampleRow(params, [3] * length, length)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from((1, 2, 9, MOST)), st.sampled_from(VOCABS))
def test_whatever_the_rows_ask_for(seed, count, vocab):
    """The host draws row by row in numpy, the device all rows at once."""
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    sampler = DeviceSampler(Stream(), MOST)
    for _ in range(2):  # memory is used again
        rows = [a_row(dice) for _ in range(count)]
        logits = torch.randn(count, vocab, generator=generator) * dice.choice((0.1, 3.0, 20.0))
        if dice.random() < 0.3:  # equals, everywhere
            logits = logits.round()
        before = logits.clone()
        positions = [len(row.token_ids) for row in rows]
        sampler.sample(sampler.prepare([row.params for row in rows], positions, vocab), logits)
        expected = Sampler(frozenset(), vocab).sample(logits, rows).token_ids
        assert sampler.host_tokens[:count].tolist() == expected
        assert sampler.tokens[:count].tolist() == expected
        assert torch.equal(logits, before)


@pytest.mark.parametrize("flat", [0.0, 1e-4, 1.0])
def test_a_large_vocabulary_is_cut_where_a_ranking_of_it_is(flat):
    """Tens of thousands of weights in the one bucket in which top-p is reached, or nearly."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 50_000, generator=generator) * flat
    shares = (0.1, 0.5, 0.999)
    whole = filters.weights(logits, [SamplingParams(temperature=1.0)] * 3).double()
    kept = filters.weights(logits, [SamplingParams(temperature=1.0, top_p=p) for p in shares])
    for share, weights, some in zip(shares, whole, kept, strict=True):
        ranked, ids = weights.sort(descending=True, stable=True)
        before = ranked.cumsum(0) - ranked
        expected = ids[before < share * weights.sum()]
        assert torch.equal(some.nonzero()[:, 0], expected.sort().values)


def test_logits_that_are_no_numbers_give_a_token_beyond_the_vocabulary():
    sampler = DeviceSampler(Stream(), 4)
    logits = torch.zeros(3, VOCAB)
    logits[1] = torch.nan
    for params in ({"top_p": 0.5}, {"top_k": 3}, {}):
        sampled = SamplingParams(temperature=1.0, **params)
        sampler.sample(sampler.prepare([sampled] * 3, [1, 2, 3], VOCAB), logits)
        tokens = sampler.host_tokens[:3].tolist()
        assert tokens[1] >= VOCAB
        assert max(tokens[0], tokens[2]) < VOCAB
