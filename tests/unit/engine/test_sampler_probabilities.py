"""The sampler's distributions against a plain reference, exactly and by many draws."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.sampling.sampler import Sampler, SampleRow
from baton.sampling import SamplingParams

VOCAB = 600  # more than one block of the draw, and not a multiple of it
EOS = frozenset({2, 3})


@pytest.fixture
def sampler():
    return Sampler(EOS, VOCAB)


def random_logits(rows, seed=0, vocab=VOCAB, scale=3.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def row(token_ids=(5, 6, 7, 8, 7), prompt_tokens=2, **params):
    return SampleRow(SamplingParams(**params), list(token_ids), prompt_tokens)


def probabilities(logits, params, token_ids, prompt_tokens, eos_token_ids):
    """What a row is drawn from, `[vocab]`: numpy float64, slow and plain."""
    return filtered(adjusted(logits, params, token_ids, prompt_tokens, eos_token_ids), params)


def adjusted(logits, params, token_ids, prompt_tokens, eos_token_ids):
    """Logits after bias, min_tokens and penalties, `[vocab]`."""
    result = np.array(logits, dtype=np.float64)
    output = list(token_ids[prompt_tokens:])
    for token_id, bias in params.logit_bias.items():
        result[token_id] += bias
    if len(output) < params.min_tokens:
        for token_id in eos_token_ids | params.stop_token_ids:
            result[token_id] = -np.inf
    for token_id in set(token_ids):
        if result[token_id] > 0:
            result[token_id] /= params.repetition_penalty
        else:
            result[token_id] *= params.repetition_penalty
    for token_id in set(output):
        result[token_id] -= params.frequency_penalty * output.count(token_id)
        result[token_id] -= params.presence_penalty
    return result


def filtered(logits, params):
    """Softmax with temperature, then top-k, top-p of what is left, min-p; `[vocab]`."""
    scaled = logits / params.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    ranked = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    if params.top_k:
        probs[ranked[params.top_k :]] = 0
        probs /= probs.sum()
    if params.top_p < 1:
        before = 0.0
        for token_id in ranked:
            mass, probs[token_id] = probs[token_id], probs[token_id] * (before < params.top_p)
            before += mass
    probs[probs < params.min_p * probs.max()] = 0
    return probs / probs.sum()


def reference(logits, sample_row):
    return probabilities(
        logits.numpy(), sample_row.params, sample_row.token_ids, sample_row.prompt_tokens, EOS
    )


SETTINGS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": VOCAB},
    {"top_k": VOCAB + 5},
    {"top_p": 0.05},
    {"top_p": 0.9},
    {"top_p": 0.999999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -1.25},
    {"logit_bias": {4: 3.5, 7: -2.0}},
    {"min_tokens": 4},
    {"min_tokens": 4, "ignore_eos": True, "stop_token_ids": frozenset({9, 11})},
    {"top_k": 20, "top_p": 0.7},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.05, "temperature": 1.5},
    {"top_p": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    {"min_tokens": 9, "logit_bias": {2: 100.0}, "top_k": 3, "repetition_penalty": 1.3},
]


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_probabilities_are_the_references(sampler, params):
    logits = random_logits(5, seed=len(str(params)))
    rows = [row(**{"temperature": 1.0, **params}) for _ in range(5)]
    actual = sampler.probabilities(logits, rows).numpy()
    for i in range(5):
        expected = reference(logits[i], rows[i])
        np.testing.assert_allclose(actual[i], expected, atol=1e-6)
        assert ((actual[i] > 0) == (expected > 0)).all()


def test_probabilities_of_rows_with_different_settings(sampler):
    logits = random_logits(len(SETTINGS), seed=9)
    rows = [row(**{"temperature": 1.0, **params}) for params in SETTINGS]
    actual = sampler.probabilities(logits, rows).numpy()
    for i, sample_row in enumerate(rows):
        np.testing.assert_allclose(actual[i], reference(logits[i], sample_row), atol=1e-6)


@given(
    seed=st.integers(0, 1 << 30),
    temperature=st.floats(0.1, 5),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    repetition=st.floats(0.5, 2),
    penalties=st.tuples(st.floats(-2, 2), st.floats(-2, 2)),
    token_ids=st.lists(st.integers(0, 39), min_size=3, max_size=30),
    min_tokens=st.integers(0, 20),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_combination(
    seed, temperature, top_k, top_p, min_p, repetition, penalties, token_ids, min_tokens
):
    logits = random_logits(1, seed, vocab=40)
    sample_row = row(
        token_ids,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition,
        presence_penalty=penalties[0],
        frequency_penalty=penalties[1],
        min_tokens=min_tokens,
    )
    actual = Sampler(EOS, 40).probabilities(logits, [sample_row])[0].numpy()
    np.testing.assert_allclose(actual, reference(logits[0], sample_row), atol=2e-6)


def test_top_p_of_flat_and_of_peaked_rows():
    vocab = 3000
    sampler = Sampler(EOS, vocab)
    logits = random_logits(2, scale=0.01, vocab=vocab)
    logits[1, 77] = 30.0
    rows = [row(temperature=1.0, top_p=0.5), row(temperature=1.0, top_p=0.5)]
    actual = sampler.probabilities(logits, rows).numpy()
    assert (actual[0] > 0).sum() > 1024
    assert (actual[1] > 0).sum() == 1
    for i in range(2):
        np.testing.assert_allclose(actual[i], reference(logits[i], rows[i]), atol=1e-6)


@pytest.mark.parametrize("params", [{}, {"top_k": 12, "top_p": 0.9}, {"frequency_penalty": 1.0}])
def test_draws_follow_the_distribution(sampler, params):
    """Chi-square of 20,000 positions of one seed, on tokens expected at least 5 times."""
    n = 20_000
    logits = random_logits(1, seed=3, scale=1.0)
    first = row(temperature=1.0, seed=11, **params)
    expected = reference(logits[0], first) * n
    counts = np.zeros(VOCAB)
    chunk = 1000
    for start in range(0, n, chunk):
        # The prompt grows, and with it the position; the output, and so the penalties, do not.
        rows = [
            SampleRow(first.params, [1] * i + first.token_ids, first.prompt_tokens + i)
            for i in range(start, start + chunk)
        ]
        counts += np.bincount(sampler.sample(logits.expand(chunk, -1), rows).token_ids, None, VOCAB)
    assert counts[expected == 0].sum() == 0
    often = expected >= 5
    statistic = ((counts - expected)[often] ** 2 / expected[often]).sum()
    freedom = often.sum() - 1
    assert abs(statistic - freedom) < 4 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("params", [p for p in SETTINGS if SamplingParams(**p).has_penalties])
def test_greedy_after_penalties(sampler, params):
    logits = random_logits(6, seed=2, scale=0.5)
    rows = [row(**params)] * 6
    expected = [
        int(adjusted(x.numpy(), rows[0].params, rows[0].token_ids, 2, EOS).argmax()) for x in logits
    ]
    assert sampler.sample(logits, rows).token_ids == expected
