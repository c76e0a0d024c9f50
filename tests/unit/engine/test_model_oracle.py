"""The model gives what transformers gives: every architecture and variant, paged any way."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.backends.cpu.native_model import NativeModel
from baton.engine.backends.cpu.native_ops import NativeOps
from baton.engine.models.architectures import ARCHITECTURES
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.weight_loader import load_weights
from tests.unit.engine import small_models
from tests.unit.engine.checkpoints import (
    assert_greedy,
    load_reference,
    make_checkpoint,
    make_model,
)
from tests.unit.engine.model_cases import ABSENT, EDITED, GREEDY, VARIANTS
from tests.unit.engine.paged import PagedRun

CPU = torch.device("cpu")
PROMPT = small_models.tokens(75, 7)
by_kernels = pytest.mark.parametrize("kernels", small_models.KERNELS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Directories of checkpoints and models of transformers, each made once for all kernels."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(architecture, **options):
        if (key := repr((architecture, options))) not in made:
            directory = tmp_path_factory.mktemp("saved")
            made[key] = directory, make_checkpoint(directory, architecture, **options)
        return made[key]

    return make


@torch.inference_mode()
def expected_logits(reference, tokens):
    logits: torch.Tensor = reference(torch.tensor([tokens])).logits[0]
    return logits.float()


@functools.cache
def exact_logits(directory):
    """Of the prompt, in float32; one for all kernels."""
    return expected_logits(load_reference(directory), PROMPT)


@by_kernels
@pytest.mark.parametrize("name", VARIANTS)
def test_equals_transformers_however_the_prompt_is_fed(name, kernels, saved):
    architecture, overrides = VARIANTS[name]
    directory, reference = saved(architecture, **overrides)
    run = PagedRun(small_models.load(directory, kernels))
    expected = expected_logits(reference, PROMPT)
    for query_lens in ([75], [16, 30, 29], [*[1] * 18, 38, *[1] * 19]):
        got = run.logits(PROMPT, *query_lens)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


@by_kernels
def test_experts_may_be_stored_together_whatever_the_architecture(kernels, tmp_path):
    """As Qwen3.5's are."""
    make_checkpoint(tmp_path, "Qwen3_5MoeForConditionalGeneration")
    expected = PagedRun(small_models.load(tmp_path, kernels)).logits(PROMPT)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    names = [name for name in tensors if name.endswith("experts.0.down_proj.weight")]
    for prefix in (name.removesuffix(".0.down_proj.weight") for name in names):
        each = [
            [tensors.pop(f"{prefix}.{one}.{part}_proj.weight") for part in ("gate", "up", "down")]
            for one in range(6)
        ]
        tensors[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(one[:2]) for one in each])
        tensors[f"{prefix}.down_proj"] = torch.stack([one[2] for one in each])
    save_file(tensors, file)
    assert any("mlp.experts.gate_up_proj" in name for name in tensors)
    found = PagedRun(small_models.load(tmp_path, kernels)).logits(PROMPT)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        ("Ernie4_5_MoeForCausalLM", ("model.mtp_block.0.mlp.up_proj", "model.mtp_emb_norm.0")),
        ("ExaoneMoeForCausalLM", ("mtp.layers.0.mlp.up_proj", "mtp.fc")),
    ],
)
def test_layers_that_predict_further_tokens_are_skipped_as_transformers_does(
    architecture, names, tmp_path
):
    make_checkpoint(tmp_path, architecture)
    file = tmp_path / "model.safetensors"
    added = {f"{name}.weight": torch.zeros(4, 4) for name in names}
    save_file(load_file(file) | added, file, {"format": "pt"})
    got = PagedRun(small_models.load(tmp_path, "torch")).logits(PROMPT)
    torch.testing.assert_close(got, exact_logits(tmp_path), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", EDITED)
def test_config_json_is_read_as_transformers_reads_it(name, tmp_path):
    architecture, overrides, edits = EDITED[name]
    make_model(architecture, **overrides).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    edited = {**json.loads(file.read_text()), **edits}
    kept = {key: value for key, value in edited.items() if value is not ABSENT}
    file.write_text(json.dumps(kept))
    got = PagedRun(small_models.load(tmp_path, "torch")).logits(PROMPT)
    expected = expected_logits(load_reference(tmp_path), PROMPT)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


@by_kernels
@pytest.mark.parametrize("architecture", GREEDY)
def test_64_greedy_tokens_are_those_of_transformers(architecture, kernels, saved):
    """And either kernels read the KV that the others wrote, as workers of one cluster may."""
    directory, reference = saved(architecture, sliding_window=24)
    (others,) = {*small_models.KERNELS} - {kernels}
    run = PagedRun(small_models.load(directory, others))
    sequence = run.add(PROMPT[:40], room=64)
    run.step((sequence, 39))
    run.model = small_models.load(directory, kernels)
    assert_greedy(reference, run.generate(sequence, 64), 40)


@pytest.mark.parametrize(
    "architecture",
    [
        name
        for name, arch in ARCHITECTURES.items()
        if not (arch.delta_rule or arch.latent or arch.chunked or arch.value_norm)
    ],
)
def test_operations_one_by_one_compute_what_a_whole_step_does(architecture, saved):
    small_models.require("native")
    directory, _ = saved(architecture, sliding_window=24)
    config = ModelConfig.load(directory)
    weights = small_models.packed(load_weights(directory, config, torch.float32, CPU))
    whole, one_by_one = (
        PagedRun(kind(config, weights, torch.float32)).logits(PROMPT, 37, 1, 37)
        for kind in (NativeModel, NativeOps)
    )
    if config.experts is None and not config.logit_softcap:
        assert torch.equal(one_by_one, whole)
    else:  # torch adds up experts' outputs and makes the cap of logits
        assert small_models.relative_error(one_by_one, whole) < 2e-6


@by_kernels
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bfloat16_is_as_close_to_float32_as_transformers_is(architecture, kernels, saved):
    directory, reference = saved(architecture, dtype=torch.bfloat16)
    bf16 = expected_logits(reference, PROMPT)
    exact = exact_logits(directory)
    run = PagedRun(small_models.load(directory, kernels, torch.bfloat16))
    for query_lens in ([75], [40, *[1] * 35]):
        got = run.logits(PROMPT, *query_lens)
        assert error(got, exact) < 1.3 * error(bf16, exact)


@by_kernels
def test_tokens_are_counted_by_the_experts_that_they_take(kernels, saved):
    architecture, overrides = VARIANTS["qwen3 moe"]
    directory, reference = saved(architecture, **overrides)
    model = small_models.load(directory, kernels)
    PagedRun(model).logits(PROMPT, 40, 34, 1)
    with torch.inference_mode():
        routed = reference(torch.tensor([PROMPT]), output_router_logits=True).router_logits
    expected = [layer.topk(3).indices.flatten().bincount(minlength=6).tolist() for layer in routed]
    assert model.expert_tokens.tolist() == expected


def error(logits, exact):
    """Of the middle row: a last bit may give a row another expert."""
    return (logits - exact).abs().mean(dim=1).median()
