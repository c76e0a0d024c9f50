"""The sampler: distributions, ties, penalties, masks, logprobs, endings, against a reference."""

from collections import Counter, UserList

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.planner import Work
from baton.engine.runner import sample_rows
from baton.engine.sampling import filters
from baton.engine.sampling.sampler import Sampler, SampleRow, finish_reason
from baton.engine.sequence import Sequence, TokenCounts
from baton.errors import InternalError
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


def test_ties_at_the_edge_keep_the_lowest_ids(sampler):
    logits = torch.zeros(1, VOCAB)
    kept = sampler.probabilities(logits, [row(temperature=1.0, top_k=4)])[0].nonzero()[:, 0]
    assert kept.tolist() == [0, 1, 2, 3]
    kept = sampler.probabilities(logits, [row(temperature=1.0, top_p=0.01)])[0].nonzero()[:, 0]
    assert kept.tolist() == [0, 1, 2, 3, 4, 5]
    logits[0, 100] = 1.0  # one above the tie takes its place from the highest id
    kept = sampler.probabilities(logits, [row(temperature=1.0, top_k=4)])[0].nonzero()[:, 0]
    assert kept.tolist() == [0, 1, 2, 100]


def mixed_rows():
    return [
        row(),
        row(temperature=1.0, seed=1),
        row(temperature=0.7, seed=1, top_k=5, min_p=0.01),
        row(repetition_penalty=1.5),
        row(temperature=1.0, seed=7, frequency_penalty=1.0, logit_bias={9: 5.0}),
        row(temperature=1.3, seed=2, top_p=0.9, min_tokens=10),
        row(temperature=1.0, seed=1, logprobs=3),
        row(min_tokens=9, stop_token_ids=frozenset({1})),
    ]


def test_a_row_does_not_depend_on_its_batch(sampler):
    logits, rows = random_logits(8, seed=5), mixed_rows()
    together = sampler.sample(logits, rows).token_ids
    alone = [sampler.sample(logits[i : i + 1], [rows[i]]).token_ids[0] for i in range(8)]
    backwards = sampler.sample(logits.flip(0), rows[::-1]).token_ids[::-1]
    assert together == alone == backwards


def test_logits_are_not_changed(sampler):
    logits = random_logits(8, seed=5)
    before = logits.clone()
    sampler.sample(logits, mixed_rows())
    for sample_row in mixed_rows():
        sampler.sample(logits[:1], [sample_row])
    assert torch.equal(logits, before)


def test_same_seed_and_position_give_the_same_draw(sampler):
    logits = torch.zeros(1, VOCAB)

    def draws(seed, length):
        return sampler.sample(logits, [row([1] * length, 1, temperature=1.0, seed=seed)]).token_ids

    assert draws(1, 5) == draws(1, 5)
    assert len({tuple(draws(seed, 5)) for seed in range(50)}) > 40
    assert len({tuple(draws(1, length)) for length in range(1, 51)}) > 40


def test_the_split_between_prompt_and_output_does_not_move_the_draw(sampler):
    """A sequence resumed elsewhere continues with the numbers it would have had."""
    logits = random_logits(1, seed=4)
    drawn = {
        sampler.sample(logits, [row([9] * 20, n, temperature=1.0, seed=3)]).token_ids[0]
        for n in (1, 10, 20)
    }
    assert len(drawn) == 1


def test_noise_of_rounding_size_hardly_ever_changes_a_draw(sampler):
    n = 2000
    logits = random_logits(1, seed=6).expand(n, -1)
    noisy = logits + torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(1)) * 1e-6
    rows = [row([1] * (i + 1), 1, temperature=1.0, seed=8) for i in range(n)]
    clean_ids, noisy_ids = (sampler.sample(x, rows).token_ids for x in (logits, noisy))
    assert sum(a != b for a, b in zip(clean_ids, noisy_ids, strict=True)) <= 1


def test_draw_at_the_ends_of_the_unit_interval():
    weights = torch.zeros(2, VOCAB)
    weights[:, 37], weights[:, VOCAB - 1] = 0.3, 1.0
    drawn = filters.sample(weights, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
    assert drawn.tolist() == [37, VOCAB - 1]


def test_rounding_never_draws_beyond_the_vocabulary():
    """Weights so uneven that float64 sums round, and the largest number there is."""
    generator = torch.Generator().manual_seed(0)
    weights = (torch.rand(2000, VOCAB, generator=generator) * -40).exp()
    drawn = filters.sample(weights, torch.full((2000,), 1 - 2**-53, dtype=torch.float64))
    assert int(drawn.max()) < VOCAB


def test_draw_never_takes_a_token_of_weight_zero():
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(500, VOCAB, generator=generator)
    weights[torch.rand(500, VOCAB, generator=generator) < 0.98] = 0
    weights[:, 100] = 1e-3
    numbers = torch.rand(500, generator=generator, dtype=torch.float64)
    drawn = filters.sample(weights, numbers)
    assert (weights.gather(1, drawn[:, None]) > 0).all()
    for i in range(500):
        cumulative = weights[i].double().cumsum(0)
        assert drawn[i] == torch.searchsorted(cumulative, numbers[i] * cumulative[-1], right=True)


def test_greedy_takes_the_lowest_of_equals(sampler):
    logits = torch.zeros(2, VOCAB)
    logits[:, [9, 40, 550]] = 5.0
    assert sampler.sample(logits, [row(), row(frequency_penalty=1.0)]).token_ids == [9, 9]
    nearly = [row(temperature=1e-6, seed=seed) for seed in (1, 2, 3, 4, 5, 6)]
    assert sampler.sample(logits[:1].expand(6, -1), nearly).token_ids == [9] * 6
    assert sampler.sample(logits, [row(temperature=1.0, top_k=1)] * 2).token_ids == [9, 9]


def test_repetition_counts_the_prompt_and_the_others_do_not(sampler):
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 20] = 2.0, 1.5  # 5 is in the prompt only

    def greedy(**params):
        return sampler.sample(logits, [row([5, 6, 7], 2, **params)]).token_ids

    assert greedy(repetition_penalty=2.0) == [20]
    assert greedy(frequency_penalty=2.0, presence_penalty=2.0) == [5]


TOKENS = st.lists(st.integers(0, 9), min_size=1, max_size=12)


@settings(deadline=None)
@given(TOKENS, st.lists(st.tuples(TOKENS, st.integers(0, 5)), max_size=6))
def test_counts_that_are_kept_are_those_of_all_tokens(prompt, grown):
    """Steps of several tokens, some of them drafts, of which any number may have been wrong."""
    kept, tokens = TokenCounts(), list(prompt)
    for step, drafts in [([], 0), *grown]:
        tokens += step
        guessed = [*tokens, *range(6, 6 + drafts)]
        ids, times = kept.of(guessed, len(prompt), drafts)
        output = Counter(guessed[len(prompt) :])
        expected = {token_id: output[token_id] for token_id in guessed}
        assert dict(zip(ids.tolist(), times.tolist(), strict=True)) == expected
        assert len(ids) == len(expected)


class Watched(UserList):
    """Tokens that count how often they are looked at."""

    reads = 0

    def __getitem__(self, at):
        found = super().__getitem__(at)
        self.reads += len(found) if isinstance(at, slice) else 1
        return found


def test_penalties_look_at_new_tokens_only(sampler):
    params = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5)
    tokens = Watched(i % VOCAB for i in range(2000))
    sequence = Sequence("s", tokens, 1500, params, num_computed=1999)
    logits = random_logits(1, seed=3)
    for step in range(10):
        rows = list(sample_rows(Work(sequence, len(tokens) - 1, 1)))
        (token_id,) = sampler.sample(logits, rows).token_ids
        anew = SampleRow(params, list(tokens.data), 1500)
        assert [token_id] == sampler.sample(logits, [anew]).token_ids
        tokens.append(token_id)
        if not step:
            tokens.reads = 0
    assert tokens.reads < 100


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bias_of_100_forces_and_forbids(sampler, temperature):
    logits = random_logits(20, seed=1, scale=2.0)
    forced = [row(temperature=temperature, seed=i, logit_bias={123: 100.0}) for i in range(20)]
    assert set(sampler.sample(logits, forced).token_ids) == {123}
    best = int(logits[0].argmax())
    forbidden = [row(temperature=temperature, seed=i, logit_bias={best: -100.0}) for i in range(20)]
    assert best not in sampler.sample(logits[:1].expand(20, -1), forbidden).token_ids


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_masks_every_ending_until_there_are_enough(sampler, ignore_eos):
    logits = torch.zeros(1, VOCAB)
    logits[0, [2, 3, 9, 40]] = torch.tensor([9.0, 8.0, 7.0, 6.0])
    params = {"min_tokens": 2, "stop_token_ids": frozenset({9}), "ignore_eos": ignore_eos}
    assert sampler.sample(logits, [row([1, 1], 1, **params)]).token_ids == [40]
    assert sampler.sample(logits, [row([1, 1, 1], 1, **params)]).token_ids == [2]


def test_logprobs_are_those_of_the_raw_logits(sampler):
    logits = random_logits(4, seed=8)
    rows = [
        row(logprobs=5, temperature=0.5, top_k=3, repetition_penalty=1.9, seed=1),
        row(),
        row(logprobs=0, logit_bias={77: 100.0}),
        row(logprobs=2),
    ]
    sampled = sampler.sample(logits, rows)
    expected = logits.log_softmax(1)
    assert sampled.logprobs[1] is None
    assert sampled.token_ids[2] == 77
    for i, wanted in [(0, 5), (2, 0), (3, 2)]:
        found = sampled.logprobs[i]
        assert found.token_id == sampled.token_ids[i]
        assert found.logprob == pytest.approx(float(expected[i, found.token_id]), abs=1e-6)
        best = expected[i].topk(wanted)
        assert [t for t, _ in found.top] == best.indices.tolist()
        assert [p for _, p in found.top] == pytest.approx(best.values.tolist(), abs=1e-6)
    assert sampled.logprobs[3].top[0][0] == sampled.token_ids[3]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_p": 0.5, "min_p": 0.1}])
def test_broken_logits_are_an_error(sampler, value, params):
    logits = torch.full((2, VOCAB), value)
    logits[0] = 1.0
    with pytest.raises(InternalError, match="not finite"):
        sampler.sample(logits, [row(temperature=1.0, **params)] * 2)


@pytest.mark.parametrize(
    ("output", "params", "max_context", "expected"),
    [
        ([8], {}, 100, None),
        ([8, 2], {}, 100, "stop"),
        ([8, 3], {}, 100, "stop"),
        ([8, 2], {"ignore_eos": True}, 100, None),
        ([8, 2], {"ignore_eos": True, "stop_token_ids": frozenset({2})}, 100, "stop"),
        ([8, 9], {"stop_token_ids": frozenset({9})}, 100, "stop"),
        ([9, 8], {"stop_token_ids": frozenset({9})}, 100, None),
        ([8, 2], {"min_tokens": 3}, 100, None),
        ([8, 8, 2], {"min_tokens": 3}, 100, "stop"),
        ([8, 9], {"min_tokens": 3, "stop_token_ids": frozenset({9})}, 100, None),
        ([8, 8], {"max_tokens": 3}, 100, None),
        ([8, 8, 8], {"max_tokens": 3}, 100, "length"),
        ([8, 8, 2], {"max_tokens": 3}, 100, "stop"),
        ([8, 8, 2], {"max_tokens": 3, "ignore_eos": True}, 100, "length"),
        ([8, 8], {}, 7, None),
        ([8, 8], {}, 6, "length"),
        ([8, 2], {"min_tokens": 5, "max_tokens": 5}, 6, "length"),
    ],
)
def test_finish_reason(output, params, max_context, expected):
    sample_row = row([5, 5, 5, 5, *output], 4, **params)
    assert finish_reason(sample_row, EOS, max_context) == expected


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
