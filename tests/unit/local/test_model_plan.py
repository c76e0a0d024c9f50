"""`baton doctor --model` says what a worker will take, and what to change where it does not fit."""

import json
import re
from functools import partial

import pytest
import torch

from baton.cli import main as cli
from baton.config import EngineConfig
from baton.engine.backends.cpu import backend as cpu
from baton.engine.kv_cache import KvLayout
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.weight_loader import load_weights
from baton.local import doctor, model_plan
from baton.local.model_plan import check_plan, weight_bytes
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.quantized_checkpoints import make_mxfp4, make_quantized

CPU = torch.device("cpu")
GIB = 1 << 30
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
EXPERTS = {"num_experts": 6, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 80}


@pytest.fixture
def free(monkeypatch):
    """Sets how much memory is free, in bytes."""
    return lambda size: monkeypatch.setattr(doctor, "host_memory", lambda: (1 << 50, size))


def plan(model, **settings):
    found = list(check_plan(EngineConfig(str(model), **settings)))
    return {one.subject: one for one in found}


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize(
    ("architecture", "options"),
    [("LlamaForCausalLM", {"tie_word_embeddings": True}), ("Qwen2MoeForCausalLM", EXPERTS)],
)
def test_weights_take_what_is_planned(architecture, options, quantization, kernels, tmp_path):
    make_checkpoint(tmp_path, architecture, **options)
    settings = EngineConfig(str(tmp_path), quantization=quantization, kernels=kernels)
    config = ModelConfig.load(tmp_path)
    prepare = partial(cpu.prepare_weight, quantization=quantization, native=kernels == "native")
    loaded = load_weights(tmp_path, config, torch.bfloat16, CPU, prepare)
    tied = quantization == "none" and kernels == "torch" and config.tie_embeddings
    expected = loaded.num_bytes + (0 if tied else loaded.embedding.nbytes)
    planned = weight_bytes(settings, config, torch.bfloat16, on_gpu=False)
    # A router of six experts is counted as that of one.
    assert planned == pytest.approx(expected, rel=0.01 if config.experts else 0)


@pytest.mark.parametrize(
    "make", [partial(make_quantized, config=AWQ), partial(make_mxfp4, num_local_experts=16)]
)
def test_weights_that_are_stored_quantised_are_counted_as_they_are(tmp_path, make):
    make(tmp_path)
    config = ModelConfig.load(tmp_path)
    loaded = load_weights(tmp_path, config, torch.float32, CPU)
    planned = weight_bytes(EngineConfig(str(tmp_path)), config, torch.float32, on_gpu=False)
    assert planned == pytest.approx(loaded.num_bytes + loaded.embedding.nbytes, rel=0.1)
    file = EngineConfig(str(tmp_path / "config.json"), random_weights=True)
    assert weight_bytes(file, config, torch.float32, on_gpu=False) > planned, (
        "random ones are dense"
    )


def test_a_plan_says_what_fits_and_what_to_change(tmp_path, free):
    make_checkpoint(tmp_path, tokenizer=True)
    free(64 * GIB)
    found = plan(tmp_path, kv_cache_bytes=1 << 20)
    assert {one.level for one in found.values()} == {"ok"}
    layout = KvLayout(1, 2, 2, 16, 16, torch.float32)
    assert f"{layout.bytes_per_token / 1024:g} KiB a token" in found["KV"].text

    found = plan(tmp_path, kv_cache_bytes=64 << 10)
    assert found["KV"].level == "warn" and "instead of 512" in found["KV"].text
    size = re.match(r"--kv-cache (\d+)GiB", found["KV"].fix)
    assert size and plan(tmp_path, kv_cache_bytes=int(size[1]) * GIB)["KV"].level == "ok"
    blocks = re.match(r"--kv-blocks (\d+),", plan(tmp_path, kv_blocks=4)["KV"].fix)
    assert blocks and plan(tmp_path, kv_blocks=int(blocks[1]))["KV"].level == "ok"
    assert plan(tmp_path, kv_blocks=int(blocks[1]) - 1)["KV"].level == "warn"

    need = plan(tmp_path, kv_cache_bytes=GIB)["memory"].text
    assert need.startswith("a worker needs 1.")
    free(2 * GIB)
    found = plan(tmp_path, kv_cache_bytes=GIB)
    assert found["memory"].level == "warn" and "of each role" in found["memory"].text
    free(GIB)
    found = plan(tmp_path, kv_cache_bytes=GIB)
    assert found["memory"].level == "fail"
    assert "smaller --kv-cache, or --quantization int8 (" in found["memory"].fix


def test_doctor_reports_a_model_and_one_that_cannot_be_served(tmp_path, free, capsys):
    make_checkpoint(tmp_path, "Qwen3ForCausalLM", tokenizer=True)
    free(64 * GIB)
    argv = ["doctor", "--json", "--timeout", "1", "--model", str(tmp_path)]
    assert cli.main([*argv, "--kernels", "torch"]) == 0
    report = json.loads(capsys.readouterr().out)
    levels = {one["subject"]: one["level"] for one in report["model"]}
    assert levels == {"model": "ok", "kernels": "warn", "weights": "ok", "KV": "ok", "memory": "ok"}
    (tmp_path / "model.safetensors").unlink()
    assert cli.main(argv) == 1
    report = json.loads(capsys.readouterr().out)
    assert "has neither model.safetensors nor" in report["model"][0]["text"]


def test_a_plan_counts_what_is_beyond_windows(tmp_path, free):
    make_checkpoint(
        tmp_path, "GptOssForCausalLM", tokenizer=True, num_local_experts=4, sliding_window=64
    )
    free(64 * GIB)
    text = plan(tmp_path, kv_cache_bytes=1 << 20, chunk_tokens=32)["KV"].text
    # Two groups of a layer of 2 heads of 16 elements in float32.
    assert text.startswith("0.5 KiB a token, 0.25 beyond windows of 64; ")
    sequences = 256 // (1024 // 16 + (64 + 32) // 16 + 1)
    assert f"tokens: {sequences} sequences of 1,024" in text


def test_a_draft_model_is_counted(monkeypatch, free):
    free(GIB)
    found = plan("demo", speculative_model="demo", kv_cache_bytes=64 << 20)
    alone = plan("demo", kv_cache_bytes=64 << 20)
    weights = alone["weights"].text.partition(" GiB")[0]
    assert f"{weights} GiB of weights and 0.06 GiB of KV" in found["draft model"].text
    needs = [
        float(re.search("needs ([0-9.]+) GiB", one["memory"].text)[1]) for one in (alone, found)
    ]
    assert needs[1] - needs[0] == pytest.approx(float(weights) + 0.0625, abs=0.015)
    monkeypatch.setattr(model_plan, "device_of", lambda settings: torch.device("cuda", 0))
    refused = plan("demo", speculative_model="demo")["model"].text
    assert refused.startswith("--speculative-model computes on CPUs only")
