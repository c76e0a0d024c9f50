"""Random numbers: fixed for ever, uniform, and functions of their own seed and position alone."""

import numpy as np
import pytest

from baton.engine.sampling.randomness import splitmix64, uniform

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
