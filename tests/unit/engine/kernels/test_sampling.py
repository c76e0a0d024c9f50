"""The sampling kernels beside what the CPU samples."""

import random

import numpy as np
import torch
import triton
import triton.language as tl

from baton.engine.ops.triton.sampling import random_bits
from baton.engine.sampling import randomness


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
