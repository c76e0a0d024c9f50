"""The whole GPU path: planner, runner and the model over its kernels give the plain path's tokens.

On a CPU the kernels are interpreted. With a GPU, and `TRITON_INTERPRET=0` so that they are compiled
for it, the same is done there, with graphs and with overlap.
"""

import os
from dataclasses import fields, replace

import pytest
import torch

from baton.config import EngineConfig
from baton.engine.backends.gpu.model import GpuModel
from baton.engine.backends.gpu.runner import GpuRunner
from baton.engine.kv_cache import KvLayout, allocate_pool
from baton.engine.models.decoder import Model
from baton.engine.runner import Runner
from baton.engine.sampling.sampler import Sampler
from baton.engine.sequence import Sequence
from baton.sampling import SamplingParams
from tests.unit.engine.gpu.driving import EOS, Driven
from tests.unit.engine.gpu.models import TINY, weights_of

SIZE, MAX_CONTEXT, BLOCKS = 16, 48, 20
CONFIG = replace(TINY, num_layers=1, windows=(None,), max_context=MAX_CONTEXT)
CPU = torch.device("cpu")


def moved(part, device):
    """The same weights on a device."""
    if isinstance(part, torch.Tensor):
        return part.to(device)
    if isinstance(part, tuple):
        return tuple(moved(one, device) for one in part)
    if part is None:
        return None
    return replace(
        part, **{field.name: moved(getattr(part, field.name), device) for field in fields(part)}
    )


def driven_on(device, weights, *, graphs, overlap):
    sizes = (BLOCKS, CONFIG.num_layers, CONFIG.num_kv_heads, SIZE, CONFIG.head_size)
    pool = allocate_pool(KvLayout(*sizes, torch.float32), None, device)
    model = GpuModel(CONFIG, moved(weights, device), torch.float32, device)
    settings = EngineConfig(max_batch=4, block_size=SIZE)
    runner = GpuRunner(model, pool, Sampler(EOS, CONFIG.vocab_size), settings, MAX_CONTEXT)
    if graphs:
        runner.capture()
    return _driven(runner, overlap=overlap)


def _driven(runner, *, overlap=False):
    driven = Driven(runner, BLOCKS, max_batch=4, overlap=overlap, block_size=SIZE)
    greedy = SamplingParams(max_tokens=13, ignore_eos=True)
    seeded = replace(greedy, temperature=0.8, top_p=0.9, seed=7)
    for number, params in enumerate((greedy, seeded, replace(greedy, logprobs=1, max_tokens=2))):
        prompt = [(11 * i + 5 * number) % 90 + 3 for i in range(9 + 10 * number)]
        driven.add(Sequence(f"s{number}", prompt, len(prompt), params))
    driven.finish()
    return driven


@pytest.fixture(scope="module")
def weights():
    return weights_of(CONFIG)


@pytest.fixture(scope="module")
def expected(weights):
    sizes = (BLOCKS, CONFIG.num_layers, CONFIG.num_kv_heads, SIZE, CONFIG.head_size)
    pool = allocate_pool(KvLayout(*sizes, torch.float32), None, CPU)
    model = Model(CONFIG, weights, torch.float32, CPU)
    return _driven(Runner(model, pool, Sampler(EOS, CONFIG.vocab_size))).tokens


@pytest.mark.parametrize("graphs", [False, True])
def test_interpreted(weights, expected, graphs):
    driven = driven_on(CPU, weights, graphs=graphs, overlap=graphs)
    assert driven.tokens == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "0", reason="kernels are interpreted")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_on_a_gpu(weights, expected, graphs, overlap):
    device = torch.device("cuda:0")
    assert driven_on(device, weights, graphs=graphs, overlap=overlap).tokens == expected
