"""Random numbers: fixed for ever, uniform, independent of their neighbours; and random weights."""

import math

import numpy as np
import pytest
import torch

from baton.engine.sampling import randomness
from baton.engine.sampling.randomness import RandomTensors, splitmix64, uniform

MAX = (1 << 64) - 1
# uniform() of the pairs in test_values_never_change.
GOLDEN = [
    0.6524484863740322,
    0.7012121095215252,
    0.36818951565166946,
    0.9435642308648544,
    0.6952598398323256,
    0.7238582745899125,
    0.27717725522395176,
]


def chi_square(values: np.ndarray, bins: int) -> float:
    """Pearson's statistic over its degrees of freedom; about 1 for uniform values."""
    counts = np.bincount((values * bins).astype(int), minlength=bins)
    expected = len(values) / bins
    return float(((counts - expected) ** 2 / expected).sum() / (bins - 1))


def test_mixer_is_the_published_splitmix64():
    # The first outputs of splitmix64.c from state 0: the state grows by GAMMA before each.
    gamma = 0x9E3779B97F4A7C15
    states = np.array([gamma, 2 * gamma & MAX, 3 * gamma & MAX], dtype=np.uint64)
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert splitmix64(states).tolist() == expected


def test_values_never_change():
    seeds, positions = [0, 0, 1, 1, 42, MAX, 1 << 63], [0, 1, 0, 1, 1000, 7, 131_071]
    assert uniform(seeds, positions).tolist() == GOLDEN


def test_a_value_depends_on_its_own_pair_only():
    together = uniform([5, 9, 5], [1, 2, 3])
    assert together.tolist() == [uniform([s], [p])[0] for s, p in [(5, 1), (9, 2), (5, 3)]]
    assert uniform([], []).shape == (0,)


@pytest.mark.parametrize("seed", [0, 1, 12345, MAX])
def test_positions_of_a_seed_are_uniform(seed):
    values = uniform([seed] * 100_000, range(100_000))
    assert values.min() >= 0 and values.max() < 1
    assert 0.8 < chi_square(values, 1000) < 1.2  # ±4.5 standard deviations
    ranks = np.arange(1, len(values) + 1) / len(values)
    assert np.abs(np.sort(values) - ranks).max() < 1.63 / np.sqrt(len(values))  # KS at 1 %


def test_seeds_at_a_position_are_uniform():
    assert 0.8 < chi_square(uniform(range(100_000), [3] * 100_000), 1000) < 1.2


@pytest.mark.parametrize(
    ("seed_step", "position_step"), [(0, 1), (1, 0), (1, 1), (1, -1), (0, 2), (2, 0)]
)
def test_neighbours_are_independent(seed_step, position_step):
    n = 100_000
    seeds, positions = np.arange(n) % 250 + 10, np.arange(n) // 250 + 10
    here = uniform(seeds, positions)
    there = uniform(seeds + seed_step, positions + position_step)
    assert abs(np.corrcoef(here, there)[0, 1]) < 4 / np.sqrt(n)
    # Jointly uniform over a 20 by 20 grid, which correlation alone would not show.
    cells = (here * 20).astype(int) * 20 + (there * 20).astype(int)
    assert 0.7 < chi_square((cells + 0.5) / 400, 400) < 1.3


def test_seed_and_position_are_not_interchangeable():
    assert uniform([3], [4]) != uniform([4], [3])


CPU = torch.device("cpu")
GAMMA = 0x9E3779B97F4A7C15
STD = 0.02


def expected(seed: int, first: int, count: int) -> torch.Tensor:
    """The same in unsigned arithmetic of numpy, and float64."""
    at = np.arange(first, first + count, dtype=np.uint64)
    words = splitmix64(at * np.uint64(GAMMA) + np.uint64(seed))
    steps = (words >> np.uint64(40)).astype(np.float64)
    return torch.from_numpy((steps - (2**24 - 1) / 2) * (STD * math.sqrt(12) / 2**24))


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_the_numbers_are_splitmix64s(seed: int) -> None:
    source = RandomTensors(seed, CPU)
    first = source.uniform((7, 11), torch.float32, STD)
    second = source.uniform((100,), torch.float32, STD)
    assert torch.allclose(first.view(-1).double(), expected(seed, 1, 77), rtol=1e-6, atol=0)
    assert torch.allclose(second.double(), expected(seed, 78, 100), rtol=1e-6, atol=0)
    assert first.shape == (7, 11)


def test_pieces_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = RandomTensors(3, CPU).uniform((1000,), torch.bfloat16, STD)
    monkeypatch.setattr(randomness, "_AT_ONCE", 64)
    assert torch.equal(RandomTensors(3, CPU).uniform((1000,), torch.bfloat16, STD), whole)
    assert whole.dtype == torch.bfloat16


def test_they_are_spread_as_asked() -> None:
    drawn = RandomTensors(1, CPU).uniform((1 << 18,), torch.float32, STD)
    assert abs(drawn.mean().item()) < STD / 100
    assert abs(drawn.std().item() / STD - 1) < 0.01
    assert drawn.abs().max() <= STD * math.sqrt(3)
    assert drawn.abs().max() > STD * math.sqrt(3) * 0.999
    neighbours = (drawn[1:] * drawn[:-1]).mean() / STD**2
    assert abs(neighbours.item()) < 0.01
