"""Made-up weights of GPUs: the numbers that SplitMix64 says, whatever computes them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from baton.engine.sampling import randomness
from baton.engine.sampling.randomness import RandomTensors, splitmix64

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
    first = source.normal((7, 11), torch.float32, STD)
    second = source.normal((100,), torch.float32, STD)
    assert torch.allclose(first.view(-1).double(), expected(seed, 1, 77), rtol=1e-6, atol=0)
    assert torch.allclose(second.double(), expected(seed, 78, 100), rtol=1e-6, atol=0)
    assert first.shape == (7, 11)


def test_pieces_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = RandomTensors(3, CPU).normal((1000,), torch.bfloat16, STD)
    monkeypatch.setattr(randomness, "_AT_ONCE", 64)
    assert torch.equal(RandomTensors(3, CPU).normal((1000,), torch.bfloat16, STD), whole)
    assert whole.dtype == torch.bfloat16


def test_they_are_spread_as_asked() -> None:
    drawn = RandomTensors(1, CPU).normal((1 << 18,), torch.float32, STD)
    assert abs(drawn.mean().item()) < STD / 100
    assert abs(drawn.std().item() / STD - 1) < 0.01
    assert drawn.abs().max() <= STD * math.sqrt(3)
    assert drawn.abs().max() > STD * math.sqrt(3) * 0.999
    neighbours = (drawn[1:] * drawn[:-1]).mean() / STD**2
    assert abs(neighbours.item()) < 0.01
