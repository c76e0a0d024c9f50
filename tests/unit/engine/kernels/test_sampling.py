"""The sampling kernels beside what the CPU samples."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from baton.engine.kernels.triton.sampling import random_bits, sample, settings_of
from baton.engine.sampling import randomness, top_k_top_p
from baton.generation.sampling_params import SamplingParams

# Rows cut into a few parts, and room for so few candidates that samples are of every eighth token.
SMALL = {"BLOCK": 1024, "CAPACITY": 256, "ROW_WARPS": 4, "num_warps": 4, "num_stages": 1}
VOCAB = 2048


@triton.jit
def _random_kernel(seeds, positions, out):
    at = tl.program_id(0)
    number = random_bits(tl.load(seeds + at), tl.load(positions + at))
    tl.store(out + at, number.to(tl.int64, bitcast=True))


def test_random_numbers_are_those_of_a_cpu():
    dice = random.Random(3)
    seeds = [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, *(dice.getrandbits(64) for _ in range(9))]
    positions = [0, 1, 2, 77, (1 << 31) - 1, *(dice.randrange(1 << 20) for _ in range(9))]
    found = torch.zeros(len(seeds), dtype=torch.int64)
    bits = torch.from_numpy(np.array(seeds, np.uint64).view(np.int64))
    _random_kernel[(len(seeds),)](bits, torch.tensor(positions, dtype=torch.int32), found)
    wanted = randomness.uniform(seeds, positions)
    assert [number / (1 << 53) for number in found.tolist()] == wanted.tolist()


def sampled(logits, params, seeds, positions, config):
    tokens = torch.full((len(logits),), -1)
    sample(
        logits,
        torch.from_numpy(settings_of(params)),
        torch.tensor(seeds),
        torch.tensor(positions, dtype=torch.int32),
        tokens,
        config,
    )
    return tokens.tolist()


def wanted(logits, params, seeds, positions):
    host = logits.float().numpy()
    numbers = randomness.uniform(seeds, positions)
    drawn = top_k_top_p.sample(
        host, [replace(row, temperature=row.temperature or 1) for row in params], numbers
    )
    greedy = [row.temperature == 0 for row in params]
    return np.where(greedy & (drawn < host.shape[1]), host.argmax(1), drawn).tolist()


def rows_of():
    """Logits `[1, VOCAB]` by how their weights are spread."""
    x = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(4))
    ranks = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5)) + 1.0
    return {
        "a few likely ones": -2.5 * ranks.log()[None],
        "many likely ones": x,
        "nearly equal": x * 1e-3,
        "all equal": x * 0,
        "one of two values": (x > 1).float(),
        "half without": torch.where(x > 0, 2 * x, -torch.inf),
        "three allowed": torch.where(ranks[None] < 4, 0.0, -torch.inf),
        "one allowed": torch.where(ranks[None] < 2, -7.0, -torch.inf),
    }


SETTINGS = (
    {"temperature": 0.0},
    {},
    {"temperature": 1e-5},
    {"temperature": 100.0, "top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.3},
    {"top_p": 1e-9},
    {"top_p": 0.9999999},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 900},
    {"top_k": VOCAB - 1, "top_p": 0.999},
    {"temperature": 1.7, "top_k": 300, "top_p": 0.999},
    {"temperature": 0.01, "top_k": 40},
    {"top_k": 30, "top_p": 0.6},
    {"min_p": 0.2},
    {"min_p": 1.0, "top_p": 0.9},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.05},
)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, torch.float32) for shape in rows_of()),
        *((shape, torch.bfloat16) for shape in ("many likely ones", "half without")),
    ],
    ids=str,
)
def test_samples_what_a_cpu_samples(shape, dtype):
    params = [SamplingParams(**{"temperature": 1.0, **row}) for row in SETTINGS]
    logits = rows_of()[shape].to(dtype).expand(len(params), -1)
    seeds, positions = list(range(len(params))), list(range(1, len(params) + 1))
    found = sampled(logits, params, seeds, positions, SMALL)
    assert found == wanted(logits, params, seeds, positions)


def test_a_row_of_a_batch_does_not_depend_on_the_others():
    """Broken rows and padding among them: a token beyond the vocabulary, and none."""
    logits = rows_of()["many likely ones"].repeat(6, 1)
    logits[1, 700], logits[2, 3], logits[4] = torch.nan, torch.inf, -torch.inf
    for settings in ({"top_p": 0.8}, {"top_k": 3}, {}, {"temperature": 0.0}):
        params = [SamplingParams(**{"temperature": 0.7, **settings})] * 6
        found = sampled(logits, params, [9] * 6, [5, 5, 5, 0, 5, 5], SMALL)
        (token,) = wanted(logits[:1], params[:1], [9], [5])
        assert found == [token, VOCAB, VOCAB, -1, VOCAB, token]


@pytest.mark.parametrize("settings", [{"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.1}], ids=str)
def test_a_vocabulary_of_128_thousand(settings):
    """With the sizes of a GPU's launch."""
    config = {"BLOCK": 4096, "CAPACITY": 8192, "ROW_WARPS": 16, "num_warps": 8, "num_stages": 1}
    logits = torch.randn(1, 128256, generator=torch.Generator().manual_seed(2)).bfloat16()
    params = [SamplingParams(temperature=1.0, **settings)]
    assert sampled(logits, params, [3], [7], config) == wanted(logits, params, [3], [7])
