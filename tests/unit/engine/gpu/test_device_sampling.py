"""Tokens sampled on the device, and their log-probabilities, are the sampler's."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.backends.gpu.device import Stream
from baton.engine.backends.gpu.device_sampling import DeviceSampler
from baton.engine.sampling.sampler import NO_TOKEN, Sampler, SampleRow
from baton.generation.sampling_params import SamplingParams

VOCABS = (7, 1500, 2048)  # less than a block of the kernel, one and a rest, whole ones
EOS = frozenset({2})


def a_row(dice, vocab):
    length, prompt = dice.randrange(2, 50), 1
    params = SamplingParams(
        temperature=dice.choice((0.0, 1e-6, 0.4, 1.0, 1.7)),
        top_k=dice.choice((0, 0, 1, 2, 40, 300, 5000)),
        top_p=dice.choice((1.0, 1.0, 0.999, 0.95, 0.5, 1e-9)),
        min_p=dice.choice((0.0, 0.0, 0.1)),
        repetition_penalty=dice.choice((1.0, 1.0, 1.3, 0.7)),
        frequency_penalty=dice.choice((0.0, 0.0, 0.5, -0.5)),
        presence_penalty=dice.choice((0.0, 0.0, 1.0)),
        logit_bias=dice.choice(({}, {}, {1: 3.0, 5: -4.0})),
        min_tokens=dice.choice((0, 0, 30)),
        logprobs=dice.choice((None, None, 0, 3)),
        allowed_token_ids=dice.choice((frozenset(), frozenset(), frozenset({1, 4, 5}))),
        bad_words=dice.choice(((), (), ((4,), (3, 5), (5,)))),
        seed=dice.randrange(1 << 64),
    )
    return SampleRow(params, [dice.randrange(vocab) for _ in range(length)], prompt)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from((1, 2, 6)), st.sampled_from(VOCABS))
def test_whatever_the_rows_ask_for(seed, count, vocab):
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    host = Sampler(EOS, vocab)
    device = DeviceSampler(Stream(), host, 4)
    for _ in range(2):  # memory is used again
        rows = [a_row(dice, vocab) for _ in range(count)]
        logits = torch.randn(count, vocab, generator=generator) * dice.choice((0.1, 3.0, 20.0))
        if dice.random() < 0.3:  # equals, everywhere
            logits = logits.round()
        wanted = host.sample(logits, rows)
        device.prepare(rows)
        device.sample(logits)
        found = device.sampled()
        assert found.token_ids == wanted.token_ids == device.tokens[:count].tolist()
        for one, other in zip(found.logprobs, wanted.logprobs, strict=True):
            assert (one is None) == (other is None)
            if one and other:
                assert one.logprob == pytest.approx(other.logprob, rel=1e-5, abs=1e-5)
                assert one.top == [
                    (token, pytest.approx(score, rel=1e-5, abs=1e-5)) for token, score in other.top
                ] or sorted(x for _, x in one.top) == pytest.approx(
                    sorted(x for _, x in other.top), rel=1e-5, abs=1e-5
                )


def test_only_a_row_of_broken_logits_gets_no_token():
    device = DeviceSampler(Stream(), Sampler(EOS, 300), 4)
    for params in ({"top_p": 0.5}, {"logprobs": 2}):
        logits = torch.zeros(3, 300)
        logits[1, 7] = torch.nan
        row = SampleRow(SamplingParams(**{"temperature": 1.0, **params}), [1], 1)
        device.prepare([row] * 3)
        device.sample(logits)
        tokens = device.sampled().token_ids
        assert tokens[1] == NO_TOKEN
        assert min(tokens[0], tokens[2]) >= 0
