"""Draws row by row in numpy, against `filters`, which does the same with a whole batch in torch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.sampling import filters
from baton.sampling import SamplingParams

# Fewer than a block, some blocks and a rest, whole blocks.
VOCABS = (7, 1300, 1536)

SETTINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from((0.1, 0.8, 1.0, 5.0)),
    top_k=st.sampled_from((0, 0, 1, 2, 40, 1299, 5000)),
    top_p=st.sampled_from((1.0, 1.0, 1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 1e-16)),
    min_p=st.sampled_from((0.0, 0.0, 0.01, 0.5, 1.0)),
)


def some_logits(rows, vocab, scale, seed, steps):
    """Random numbers; on a grid of `steps` for each unit, if any, so that many are equal."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale
    return (logits * steps).round() / steps if steps else logits


@settings(max_examples=150, deadline=None)
@given(
    params=st.lists(SETTINGS, min_size=1, max_size=4),
    vocab=st.sampled_from(VOCABS),
    scale=st.sampled_from((0.01, 1.0, 6.0)),
    seed=st.integers(0, 2**32),
    steps=st.sampled_from((0, 0, 2, 50)),
)
def test_rows_keep_and_draw_what_a_batch_does(params, vocab, scale, seed, steps):
    logits = some_logits(len(params), vocab, scale, seed, steps)
    before = logits.clone()
    expected = filters.weights(logits, params)
    kept = np.stack(
        [filters.row_weights(row, one) for row, one in zip(logits.numpy(), params, strict=True)]
    )
    # Equal up to the rounding of exp and of sums, which moves an edge by one weight, or by many
    # that add nothing to a sum.
    disagree = (kept > 0) != (expected.numpy() > 0)
    weights_apart = np.sort(np.maximum(kept, expected.numpy()) * disagree)
    assert weights_apart[:, :-1].sum() < 1e-9
    both = ~disagree
    assert np.allclose(kept[both], expected.numpy()[both], rtol=1e-5, atol=1e-37)
    if not disagree.any():
        uniform = np.random.default_rng(seed).random(len(params))
        drawn = filters.sample_on_cpu(logits.numpy(), params, uniform)
        assert drawn.tolist() == filters.sample(expected, torch.from_numpy(uniform)).tolist()
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [(0, 0.5, 4), (0, 0.51, 5), (0, 1e-9, 1), (4, 0.5, 2), (4, 0.51, 3), (4, 1.0, 4), (8, 0.25, 2)],
)
def test_of_equals_as_many_stay_as_reach_top_p(top_k, top_p, kept):
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p)
    row = filters.row_weights(np.zeros(8, np.float32), params)
    assert row.tolist() == [1.0] * kept + [0.0] * (8 - kept)


@pytest.mark.parametrize(("top_p", "kept"), [(0.6, 3), (0.7, 4), (0.95, 1216)])
def test_top_p_is_of_the_sum_of_all_weights(top_p, kept):
    """Four likely tokens, and thousands that make up a twelfth together."""
    row = np.full(3004, np.log(1 / 8192), np.float32)
    row[:4] = 0.0
    weights = filters.row_weights(row, SamplingParams(temperature=1.0, top_p=top_p))
    assert abs(np.count_nonzero(weights) - kept) <= (kept > 4)


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53], ids=["least", "greatest"])
def test_extreme_numbers_give_a_token_that_is_kept(number):
    logits = np.full((1, 1300), -np.inf, np.float32)
    logits[0, 600:602] = 0.0
    params = [SamplingParams(temperature=1.0)]
    expected = 600 if number == 0.0 else 601
    assert filters.sample_on_cpu(logits, params, np.array([number])).tolist() == [expected]
