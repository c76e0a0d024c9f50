"""The sampler: distributions, ties, penalties, masks, logprobs, endings, against a reference."""

from collections import Counter, UserList

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.runner import sample_rows
from baton.engine.sampling import top_k_top_p
from baton.engine.sampling.logprobs import compute_logprobs
from baton.engine.sampling.randomness import splitmix64, uniform
from baton.engine.sampling.sampler import NO_TOKEN, Sampler, SampleRow, finish_reason
from baton.engine.scheduler import ScheduledSequence
from baton.engine.sequence import Sequence
from baton.engine.token_counts import TokenCounts
from baton.generation.sampling_params import SamplingParams

VOCAB = 600  # more than one block that is summed, and not a multiple of it
EOS = frozenset({2, 3})
SAMPLER = Sampler(EOS, VOCAB)


def random_logits(rows, seed=0, vocab=VOCAB, scale=3.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def row(token_ids=(5, 6, 7, 8, 7), prompt_tokens=2, **params):
    return SampleRow(SamplingParams(**params), list(token_ids), prompt_tokens)


def sample(logits, *rows):
    return SAMPLER.sample(logits, list(rows)).token_ids


def probabilities(logits, rows, sampler=SAMPLER):
    """What rows are sampled from: `[rows, vocab]`, each row's sum is 1."""
    adjusted = logits.clone()
    sampler._adjust(adjusted, rows)
    pairs = zip(adjusted.numpy(), [one.params for one in rows], strict=True)
    weights = np.stack([top_k_top_p.row_weights(*pair) for pair in pairs])
    return weights / weights.sum(1, keepdims=True)


def reference_logits(logits, sample_row):
    """Logits after bias, min_tokens and penalties, `[vocab]`: numpy float64, slow and plain."""
    params, token_ids = sample_row.params, sample_row.token_ids
    result = logits.numpy().astype(np.float64)
    output = token_ids[sample_row.prompt_tokens :]
    for token_id, bias in params.logit_bias.items():
        result[token_id] += bias
    if len(output) < params.min_tokens:
        for token_id in EOS | params.stop_token_ids:
            result[token_id] = -np.inf
    for token_id in range(len(result)):
        longer = (*output, token_id)
        if any(longer[-len(word) :] == word for word in params.bad_words):
            result[token_id] = -np.inf
        if params.allowed_token_ids and token_id not in params.allowed_token_ids:
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


def reference(logits, sample_row):
    """Softmax with temperature, then top-k, top-p of what is left, min-p; `[vocab]`."""
    params = sample_row.params
    scaled = reference_logits(logits, sample_row) / params.temperature
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


SETTINGS = [
    {},
    *({"temperature": value} for value in (0.3, 2.5)),
    *({"top_k": value} for value in (1, 7, VOCAB, VOCAB + 5)),
    *({"top_p": value} for value in (0.05, 0.9, 0.999999)),
    *({"min_p": value} for value in (0.1, 1.0)),
    *({"repetition_penalty": value} for value in (1.7, 0.6)),
    {"presence_penalty": 1.5},
    {"frequency_penalty": -1.25},
    {"logit_bias": {4: 3.5, 7: -2.0}},
    {"min_tokens": 4},
    {"min_tokens": 4, "ignore_eos": True, "stop_token_ids": frozenset({9, 11})},
    {"bad_words": ((9,), (8, 7, 4), (7, 7, 11), (7, 12), (6, 7, 8, 7, 10))},
    {"allowed_token_ids": frozenset({5, 9, 599}), "logit_bias": {9: 2.0}, "min_p": 0.01},
    {"top_k": 20, "top_p": 0.7},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.05, "temperature": 1.5},
    {"top_p": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    {"min_tokens": 9, "logit_bias": {2: 100.0}, "top_k": 3, "repetition_penalty": 1.3},
]


def test_probabilities_are_the_references():
    for seed in range(5):
        logits = random_logits(len(SETTINGS), seed)
        rows = [row(**{"temperature": 1.0, **params}) for params in SETTINGS]
        for actual, *given_row in zip(probabilities(logits, rows), logits, rows, strict=True):
            expected = reference(*given_row)
            np.testing.assert_allclose(actual, expected, atol=1e-6)
            assert ((actual > 0) == (expected > 0)).all()


def test_what_may_not_come_now_gives_way_where_nothing_else_may():
    only_end = row(allowed_token_ids=frozenset({2}), min_tokens=9, bad_words=((2,),))
    one_of_two = row(allowed_token_ids=frozenset({2, 30}), min_tokens=9)
    nothing = row(bad_words=tuple((token_id,) for token_id in range(VOCAB)))
    logits = random_logits(3)
    assert sample(logits, only_end, one_of_two, nothing) == [2, 30, int(logits[2].argmax())]


@given(
    seed=st.integers(0, 1 << 30),
    token_ids=st.lists(st.integers(0, 39), min_size=3, max_size=30),
    params=st.fixed_dictionaries(
        {
            "temperature": st.floats(0.1, 5),
            "top_k": st.integers(0, 50),
            "top_p": st.floats(0.01, 1),
            "min_p": st.floats(0, 1),
            "repetition_penalty": st.floats(0.5, 2),
            "presence_penalty": st.floats(-2, 2),
            "frequency_penalty": st.floats(-2, 2),
            "min_tokens": st.integers(0, 20),
        }
    ),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_probabilities_of_any_combination(seed, token_ids, params):
    logits, one = random_logits(1, seed, vocab=40), row(token_ids, **params)
    (actual,) = probabilities(logits, [one], Sampler(EOS, 40))
    np.testing.assert_allclose(actual, reference(logits[0], one), atol=2e-6)


@pytest.mark.parametrize("params", [{}, {"top_k": 12, "top_p": 0.9}, {"frequency_penalty": 1.0}])
def test_samples_follow_the_distribution(params):
    """Chi-square of 8,000 positions of one seed, on tokens expected at least 5 times."""
    n, chunk = 8_000, 1000
    logits = random_logits(1, seed=3, scale=1.0)
    first = row(temperature=1.0, seed=11, **params)
    expected = reference(logits[0], first) * n
    counts = np.zeros(VOCAB)
    for start in range(0, n, chunk):
        # The prompt grows, and with it the position; the output, and so the penalties, do not.
        rows = [
            SampleRow(first.params, [1] * i + first.token_ids, first.prompt_tokens + i)
            for i in range(start, start + chunk)
        ]
        counts += np.bincount(sample(logits.expand(chunk, -1), *rows), None, VOCAB)
    assert counts[expected == 0].sum() == 0
    often = expected >= 5
    statistic = ((counts - expected)[often] ** 2 / expected[often]).sum()
    freedom = often.sum() - 1
    assert abs(statistic - freedom) < 4 * np.sqrt(2 * freedom)


def test_greedy_after_penalties_and_of_equals_is_the_lowest():
    logits = random_logits(len(SETTINGS), seed=2, scale=0.5)
    rows = [row(**{**params, "temperature": 0.0}) for params in SETTINGS]
    expected = [int(reference_logits(*each).argmax()) for each in zip(logits, rows, strict=True)]
    assert sample(logits, *rows) == expected
    logits = torch.zeros(6, VOCAB)
    logits[:, [9, 40, 550]] = 5.0
    rows = [row(), row(frequency_penalty=1.0), *[row(temperature=1.0, top_k=1)] * 2]
    rows += [row(temperature=1e-6, seed=seed) for seed in (1, 2)]
    assert sample(logits, *rows) == [9] * 6


def test_a_row_depends_on_its_own_settings_and_logits_alone():
    logits, rows = random_logits(len(SETTINGS), seed=5), []
    for at, params in enumerate(SETTINGS):
        rows.append(row(**{"temperature": float(at % 3), "seed": at, **params}))
    rows[3] = row(temperature=1.0, seed=1, logprobs=3)
    before = logits.clone()
    together = sample(logits, *rows)
    alone = [sample(logits[i : i + 1], rows[i])[0] for i in range(len(rows))]
    assert together == alone == sample(logits.flip(0), *rows[::-1])[::-1]
    assert torch.equal(logits, before)


def test_a_sample_belongs_to_its_seed_and_position():
    flat, logits = torch.zeros(1, VOCAB), random_logits(1, seed=4)

    def of(seed, length):
        return sample(flat, row([1] * length, 1, temperature=1.0, seed=seed))[0]

    assert of(1, 5) == of(1, 5)
    assert len({of(seed, 5) for seed in range(50)}) > 40
    assert len({of(1, length) for length in range(1, 51)}) > 40
    # One that is resumed elsewhere continues with the numbers that it would have had.
    splits = [row([9] * 20, prompt, temperature=1.0, seed=3) for prompt in (1, 10, 20)]
    assert len(set(sample(logits.expand(3, -1), *splits))) == 1


def test_noise_of_rounding_size_hardly_ever_changes_a_sample():
    n = 2000
    logits = random_logits(1, seed=6).expand(n, -1)
    noisy = logits + torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(1)) * 1e-6
    rows = [row([1] * (i + 1), 1, temperature=1.0, seed=8) for i in range(n)]
    pairs = zip(sample(logits, *rows), sample(noisy, *rows), strict=True)
    assert sum(a != b for a, b in pairs) <= 1


def test_tokens_lie_where_the_cumulative_weight_passes_the_number():
    generator = np.random.default_rng(0)
    params = [SamplingParams(temperature=1.0)] * 500
    # So uneven that float64 sums round: never beyond the vocabulary.
    logits = (generator.random((500, VOCAB)) * -40).astype(np.float32)
    assert top_k_top_p.sample(logits, params, np.full(500, 1 - 2**-53)).max() < VOCAB
    logits = np.log(generator.random((500, VOCAB))).astype(np.float32)
    logits[generator.random((500, VOCAB)) < 0.98] = -np.inf
    logits[:, 100] = -7.0
    numbers = generator.random(500)
    tokens = top_k_top_p.sample(logits, params, numbers)
    weights = np.stack([top_k_top_p.row_weights(row, params[0]) for row in logits])
    assert (weights[np.arange(500), tokens] > 0).all()
    cumulative = weights.cumsum(1, dtype=np.float64)
    passed = cumulative > numbers[:, None] * cumulative[:, -1:]
    assert (tokens == passed.argmax(1)).all()


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [(0, 0.5, 4), (0, 0.51, 5), (0, 1e-9, 1), (4, 0.5, 2), (4, 0.51, 3), (4, 1.0, 4), (8, 0.25, 2)],
)
def test_of_equals_as_many_stay_as_reach_top_p(top_k, top_p, kept):
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p)
    row = top_k_top_p.row_weights(np.zeros(8, np.float32), params)
    assert row.tolist() == [1.0] * kept + [0.0] * (8 - kept)


@pytest.mark.parametrize(("top_p", "kept"), [(0.6, 3), (0.7, 4), (0.95, 1216)])
def test_top_p_is_of_the_sum_of_all_weights(top_p, kept):
    """Four likely tokens, and thousands that make up a twelfth together."""
    row = np.full(3004, np.log(1 / 8192), np.float32)
    row[:4] = 0.0
    weights = top_k_top_p.row_weights(row, SamplingParams(temperature=1.0, top_p=top_p))
    assert abs(np.count_nonzero(weights) - kept) <= (kept > 4)


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53], ids=["least", "greatest"])
def test_extreme_numbers_give_a_token_that_is_kept(number):
    logits = np.full((1, 1300), -np.inf, np.float32)
    logits[0, 600:602] = 0.0
    params = [SamplingParams(temperature=1.0)]
    expected = 600 if number == 0.0 else 601
    assert top_k_top_p.sample(logits, params, np.array([number])).tolist() == [expected]


TOKENS = st.lists(st.integers(0, 9), min_size=1, max_size=12)


@given(TOKENS, st.lists(st.tuples(TOKENS, st.integers(0, 5)), max_size=6))
def test_counts_that_are_kept_are_those_of_all_tokens(prompt, grown):
    """Steps of several tokens, some of them proposed, of which any number may have been wrong."""
    kept, tokens = TokenCounts(), list(prompt)
    for step, proposed in [([], 0), *grown]:
        tokens += step
        guessed = [*tokens, *range(6, 6 + proposed)]
        ids, times = kept.count(guessed, len(prompt), proposed)
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


def test_penalties_look_at_new_tokens_only():
    params = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5)
    tokens = Watched(i % VOCAB for i in range(2000))
    sequence = Sequence("s", tokens, 1500, params, num_computed=1999)
    logits = random_logits(1, seed=3)
    for step in range(10):
        sampled = sample(logits, *sample_rows(ScheduledSequence(sequence, len(tokens) - 1, 1)))
        assert sampled == sample(logits, SampleRow(params, list(tokens.data), 1500))
        tokens += sampled
        if not step:
            tokens.reads = 0
    assert tokens.reads < 100


def test_equally_likely_tokens_are_named_by_id_whatever_other_rows_ask_for():
    logits = random_logits(1, seed=3, scale=1.0).round()  # 5 values
    logits[0, :50] = -torch.inf
    expected = logits[0].sort(descending=True, stable=True).indices.tolist()
    for most in (3, 15, 20):
        rows = [row(logprobs=count, temperature=0.0) for count in (3, most, 0)]
        tops = [one.top for one in SAMPLER.sample(logits.repeat(3, 1), rows).logprobs]
        assert [[token for token, _ in top] for top in tops] == [expected[:3], expected[:most], []]
    found = compute_logprobs(logits.repeat(2, 1), [70, 80], 20)
    assert found.top_ids.tolist() == [expected[:20]] * 2
    better = (logits > logits[0, [70, 80], None]).sum(1)
    assert found.ranks.tolist() == (1 + better).tolist()


def test_logprobs_are_those_of_the_raw_logits():
    logits = random_logits(4, seed=8)
    rows = [
        row(logprobs=5, temperature=0.5, top_k=3, repetition_penalty=1.9, seed=1),
        row(),
        row(logprobs=0, logit_bias={77: 100.0}),
        row(logprobs=2),
    ]
    sampled = SAMPLER.sample(logits, rows)
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
@pytest.mark.parametrize(
    "params", [{}, {"top_k": 3}, {"top_p": 0.5, "min_p": 0.1}, {"temperature": 0.0}]
)
def test_a_row_of_broken_logits_gets_no_token_and_its_neighbours_theirs(value, params):
    logits = torch.full((3, VOCAB), value)
    logits[::2] = torch.linspace(0, 1, VOCAB)
    rows = [row(**{"temperature": 1.0, "logprobs": 2, **params})] * 3
    sampled, alone = SAMPLER.sample(logits, rows), SAMPLER.sample(logits[:1], rows[:1])
    assert sampled.token_ids == [alone.token_ids[0], NO_TOKEN, alone.token_ids[0]]
    assert sampled.logprobs == [alone.logprobs[0], None, alone.logprobs[0]]


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


# Random numbers: fixed for ever, uniform, functions of their own seed and position alone.
MAX = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
GOLDEN = {
    (0, 0): 0.6524484863740322,
    (0, 1): 0.7012121095215252,
    (1, 0): 0.36818951565166946,
    (1, 1): 0.9435642308648544,
    (42, 1000): 0.6952598398323256,
    (MAX, 7): 0.7238582745899125,
    (1 << 63, 131_071): 0.27717725522395176,
}


def chi_square(values, bins):
    """Pearson's statistic over its degrees of freedom; about 1 for uniform values."""
    counts = np.bincount((values * bins).astype(int), minlength=bins)
    expected = len(values) / bins
    return float(((counts - expected) ** 2 / expected).sum() / (bins - 1))


def test_values_never_change_and_depend_on_their_own_pair_only():
    # The first outputs of splitmix64.c from state 0: the state grows by GAMMA before each.
    states = np.array([GAMMA, 2 * GAMMA & MAX, 3 * GAMMA & MAX], dtype=np.uint64)
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert splitmix64(states).tolist() == expected
    assert uniform(*zip(*GOLDEN, strict=True)).tolist() == list(GOLDEN.values())
    assert [uniform([seed], [at])[0] for seed, at in GOLDEN] == list(GOLDEN.values())
    assert uniform([], []).shape == (0,)


@pytest.mark.parametrize("seed", [0, 1, 12345, MAX, None])
def test_positions_of_a_seed_and_seeds_at_a_position_are_uniform(seed):
    many, n = range(100_000), 100_000
    values = uniform(many, [3] * n) if seed is None else uniform([seed] * n, many)
    assert values.min() >= 0 and values.max() < 1
    assert 0.8 < chi_square(values, 1000) < 1.2  # ±4.5 standard deviations
    ranks = np.arange(1, n + 1) / n
    assert np.abs(np.sort(values) - ranks).max() < 1.63 / np.sqrt(n)  # KS at 1 %
