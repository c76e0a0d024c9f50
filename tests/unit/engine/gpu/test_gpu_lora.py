"""LoRA adapters on the GPU's path: as the torch model, kernel by kernel and by captured steps."""

from dataclasses import replace

import pytest
import torch

from baton.config import EngineConfig
from baton.engine.adapters import LoraAdapter
from baton.engine.backends.gpu.device import Stream
from baton.engine.backends.gpu.model import GpuModel
from baton.engine.backends.gpu.runner import GpuRunner
from baton.engine.kernels.torch.lora import add_lora as reference_add_lora
from baton.engine.kernels.triton.lora import add_lora
from baton.engine.models.decoder import DecoderModel
from baton.engine.models.lora import LoraSlots, adapted_fields, empty_update
from baton.engine.runner import Runner
from baton.engine.sampling.sampler import Sampler
from baton.engine.sequence import Sequence
from baton.generation.sampling_params import SamplingParams
from tests.unit.engine.gpu.driving import (
    CONFIG,
    EOS,
    MAX_CONTEXT,
    SIZE,
    Driven,
    PaddedModel,
    new_pool,
)
from tests.unit.engine.gpu.models import CONFIGS, both, reference_weights, tokens, weights_of
from tests.unit.engine.paged import PagedRun
from tests.unit.engine.small_models import CPU


def an_adapter(config, seed, rank=4):
    generator = torch.Generator().manual_seed(seed)
    updates = {}
    for layer in range(config.num_layers):
        for field in adapted_fields(config, layer):
            updates[layer, field] = tuple(
                0.15 * torch.randn(part.shape, generator=generator)
                for part in empty_update(config, layer, field, rank)
            )
    return LoraAdapter(f"adapter {seed}", rank, updates)


def adapted(model, config):
    """The model with two adapters in its slots."""
    slots = LoraSlots(config, 2, 8, torch.float32, CPU)
    model._weights = replace(model._weights, lora=slots)
    for slot in range(2):
        model.write_lora(slot, an_adapter(config, slot))
    return model


@pytest.mark.parametrize(
    "name",
    [
        *("llama biases, odd heads", "gemma2", "qwen2 moe", "olmo2, partly turned", "qwen3.5"),
        *("gemma4", "llama4", "hunyuan"),
    ],
)
def test_rows_of_adapters_equal_the_torch_models(name):
    config = CONFIGS[name]
    found = []
    for model in both(config):
        run = PagedRun(adapted(model, config))
        one, other, third = (run.add(tokens(12, seed)) for seed in range(3))
        other.lora_slot, third.lora_slot = 0, 1
        logits = run.step((one, 11), (other, 5), (third, 8))
        logits += run.step((one, 1), (other, 7), (third, 3))
        found.append(torch.cat(logits))
    assert isinstance(model, GpuModel)
    torch.testing.assert_close(*found, rtol=0, atol=1e-4)


def test_tiles_of_many_rows_equal_the_reference():
    slots = LoraSlots(CONFIG, 3, 20, torch.float32, CPU)
    for slot in range(3):
        slots.write(slot, an_adapter(CONFIG, slot, 20 - slot))
    for field, lora in slots.layers[0].items():
        x, of_rows = torch.randn(150, lora.a.shape[2]), torch.arange(150).int() // 40 - 1
        y = torch.randn(150, lora.b.shape[2])
        expected = y.clone()
        add_lora(y, x, of_rows, lora)
        reference_add_lora(expected, x, of_rows, lora)
        torch.testing.assert_close(y, expected, msg=field)


def run_all(runner, **options):
    """What sequences of two adapters and of none get, some of them added later."""
    driven = Driven(runner, 40, lora_slots=2, **options)
    for seed in range(2):
        driven.do(driven.engine.load_adapter(an_adapter(CONFIG, seed)))
    for number in range(6):
        params = SamplingParams(temperature=0.0, max_tokens=6 + number, ignore_eos=True)
        prompt = tokens(5 + 3 * number, number % 2)
        adapter = ("", "adapter 0", "adapter 1")[number % 3]
        driven.add(Sequence(str(number), prompt, len(prompt), params, adapter, adapter=adapter))
        driven.step()
    driven.finish()
    return driven.tokens


@pytest.mark.parametrize("overlap", [False, True])
def test_captured_steps_with_adapters_give_the_same_tokens(overlap):
    weights = reference_weights(weights_of(CONFIG))

    def model(kind):
        return adapted(kind(CONFIG, weights, torch.float32, CPU), CONFIG)

    sampler = Sampler(EOS, CONFIG.vocab_size)
    expected = run_all(Runner(model(DecoderModel), new_pool(40), sampler))
    settings = EngineConfig(max_batch=6, block_size=SIZE, max_loras=2, chunk_tokens=16)
    runner = GpuRunner(model(PaddedModel), new_pool(40), sampler, settings, MAX_CONTEXT, Stream())
    runner.capture()
    assert {shape.lora for shape in runner._graphs._captured} == {False, True}
    assert run_all(runner, overlap=overlap) == expected
    assert len(set(map(tuple, expected.values()))) == len(expected)
