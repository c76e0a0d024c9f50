"""AWQ, GPTQ and compressed-tensors give what the dense model of the same numbers gives."""

import json
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from baton.config import EngineConfig
from baton.engine import build
from baton.engine.kernels.moe_routing import Routing
from baton.engine.kernels.torch.row_quantization import quantize_rows
from baton.engine.models.model_config import ExpertsConfig, ModelConfig
from baton.engine.models.tensor_names import scheme_of
from baton.engine.models.weight_loader import load_weights, random_weights
from baton.engine.quantization.int4 import Int4Weight
from baton.engine.quantization.int8 import Int8Weight
from baton.engine.quantization.linear_weight import DenseWeight
from baton.engine.quantization.methods import quantize_weight
from baton.engine.quantization.mxfp4 import Mxfp4Weight
from baton.errors import CheckpointError, ConfigError
from tests.unit.engine import small_models
from tests.unit.engine.checkpoints import assert_greedy, make_checkpoint
from tests.unit.engine.paged import PagedRun
from tests.unit.engine.quantized_checkpoints import (
    compressed,
    make_mxfp4,
    make_quantized,
    quantize_inputs,
)
from tests.unit.engine.small_models import relative_error

CPU, F32, BF16 = torch.device("cpu"), torch.float32, torch.bfloat16
TOKENS = torch.randint(2, 300, (70,), generator=torch.Generator().manual_seed(7)).tolist()
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
BY_TOKEN = {"strategy": "token", "dynamic": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "sym": True}
MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head"]}
NVFP4 = compressed(
    "nvfp4-pack-quantized",
    {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
)
EXPERTS = "model.layers.0.mlp.experts"
FORMATS: dict[str, Any] = {
    "awq 32": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
    "awq 128": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "GEMM"},
    "gptq 64": {**GPTQ, "group_size": 64, "desc_act": False},
    "gptq 64 experts": {**GPTQ, "group_size": 64},
    "gptq 32 act-order": {**GPTQ, "group_size": 32, "desc_act": True},
    "gptq 128 asymmetric": {**GPTQ, "group_size": 128, "sym": False},
    "gptq 64 v2 asymmetric act-order": {
        **GPTQ, "group_size": 64, "sym": False, "desc_act": True, "checkpoint_format": "gptq_v2",
    },
    "w4a16 128": compressed("pack-quantized", {**INT4, "group_size": 128}),
    "w4a16 32 experts": {
        **compressed("pack-quantized", {**INT4, "group_size": 32}),
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    },
    "w4a16 32 asymmetric act-order": compressed(
        "pack-quantized", {**INT4, "group_size": 32, "symmetric": False, "actorder": "group"}
    ),
    "fp8": {
        "quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
        "fmt": "e4m3",
    },
    "fp8 static": {"quant_method": "fp8", "activation_scheme": "static", "fmt": "float8_e4m3fn"},
    "fp8 static of compressed-tensors": compressed(
        "float-quantized",
        {**FLOAT8, "strategy": "tensor"},
        {**FLOAT8, "strategy": "tensor", "dynamic": False},
    ),
    "fp8 channels without activations": compressed(
        "float-quantized", {**FLOAT8, "strategy": "channel"}
    ),
    "fp8 blocks of compressed-tensors": compressed(
        "float-quantized",
        {**FLOAT8, "strategy": "block", "block_structure": [128, 128]},
        {**FLOAT8, "strategy": "group", "group_size": 128, "dynamic": True},
    ),
    "fp8 of modelopt": {**MODELOPT, "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8}},
    "fp8 channels of modelopt": {**MODELOPT, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    "nvfp4 of modelopt": {**MODELOPT, "quant_algo": "NVFP4", "group_size": 16},
    "mxfp8 of modelopt": {**MODELOPT, "quant_algo": "MXFP8"},
    "nvfp4": NVFP4,
    "mxfp4": compressed(
        "mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 32}
    ),
    "mxfp8": compressed("mxfp8-quantized", {"num_bits": 8, "type": "float", "group_size": 32}),
    "mixed": {
        **NVFP4, "format": "mixed-precision", "config_groups": {
            "group_0": {
                "format": "float-quantized", "weights": {**FLOAT8, "strategy": "channel"},
                "targets": [r"re:.*self_attn\.(q|k|v|o)_proj$"],
            },
            "group_1": {**NVFP4["config_groups"]["group_0"], "format": "nvfp4-pack-quantized"},
        },
    },
    "mixed of modelopt": {
        **MODELOPT, "quant_algo": "MIXED_PRECISION", "quantized_layers": {
            f"model.layers.{i}.{module}": {"quant_algo": algorithm}
            for i in range(2)
            for module, algorithm in (("self_attn", "FP8"), ("mlp", "NVFP4"))
        },
    },
}  # fmt: skip
PARTS: dict[str, Any] = {
    "mixed": [
        ("self_attn", FORMATS["fp8 channels without activations"]), ("mlp", FORMATS["nvfp4"]),
    ],
    "mixed of modelopt": [
        ("self_attn", FORMATS["fp8 of modelopt"]), ("mlp", FORMATS["nvfp4 of modelopt"]),
    ],
}  # fmt: skip
# Of some, rotary embeddings that the decoder takes in another order; fp8 has smaller last blocks.
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
MODELS: dict[str, Any] = {
    # Routers and gates are not quantised, though the config does not say so.
    "gptq 64 experts": (
        "Qwen2MoeForCausalLM",
        {
            "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 128,
        },
    ),
    "w4a16 32 experts": (
        "Qwen3MoeForCausalLM",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 96},
    ),
    "w4a16 32 asymmetric act-order": ("Phi3ForCausalLM", {"rope_parameters": PARTIAL}),
    "fp8": ("Glm4ForCausalLM", {"intermediate_size": 160}),
}  # fmt: skip


@torch.inference_mode()
def logits_of(reference):
    return reference(torch.tensor([TOKENS])).logits[0].float()


def paged_logits(model):
    return PagedRun(model).logits(TOKENS, 33, 33, 4)


@pytest.mark.parametrize("kernels", small_models.KERNELS)
def test_latent_attention_in_blocks_of_fp8(tmp_path, kernels):
    """As DeepSeek-V3 is published: what makes queries and rows is quantised, and so is kv_b."""
    sizes = {"num_key_value_heads": 4, "v_head_dim": 32, "q_lora_rank": 64}
    sizes |= {"moe_intermediate_size": 64, "head_dim": 16}
    reference = make_quantized(tmp_path, FORMATS["fp8"], "DeepseekV3ForCausalLM", **sizes)
    model = small_models.load(tmp_path, kernels)
    assert relative_error(paged_logits(model), logits_of(reference)) < 1e-5


@pytest.mark.parametrize("kernels", small_models.KERNELS)
@pytest.mark.parametrize("name", FORMATS)
def test_int4_and_blocks_of_fp8_give_the_tokens_of_the_dense_model(tmp_path, name, kernels):
    default = "Qwen2ForCausalLM" if "gptq" in name else "LlamaForCausalLM", {}
    architecture, sizes = MODELS.get(name, default)
    parts = PARTS.get(name, ())
    reference = make_quantized(tmp_path, FORMATS[name], architecture, parts=parts, **sizes)
    model = small_models.load(tmp_path, kernels)
    expected = logits_of(reference)
    assert relative_error(paged_logits(model), expected) < 1e-5
    run = PagedRun(model)
    assert_greedy(reference, run.generate(run.add(TOKENS, room=64), 64), len(TOKENS))
    # In bfloat16 no further from it than the dense model is.
    low = relative_error(paged_logits(small_models.load(tmp_path, kernels, BF16)), expected)
    assert low < 1.2 * relative_error(logits_of(reference.bfloat16()), expected) < 0.05


@pytest.mark.parametrize(
    ("kernels", "strategy", "kind"),
    [
        ("torch", "channel", torch.int8),
        ("native", "tensor", torch.int8),
        ("torch", "channel", torch.float8_e4m3fn),
        ("torch", "tensor", torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_w8a8_gives_the_dense_model_s_scores_for_inputs_in_8_bits(
    tmp_path, kernels, strategy, kind
):
    values = INT8 if kind == torch.int8 else FLOAT8
    form = "int-quantized" if kind == torch.int8 else "float-quantized"
    config = compressed(form, {**values, "strategy": strategy}, {**values, **BY_TOKEN})
    reference = make_quantized(tmp_path, config, "Qwen3ForCausalLM")
    expected = logits_of(quantize_inputs(reference, kind))
    # A last bit may round an input to its neighbour, a hundredth or a sixteenth from it.
    limit = 3e-3 if kind == torch.int8 else 2e-2
    assert relative_error(paged_logits(small_models.load(tmp_path, kernels)), expected) < limit


@dataclass(frozen=True)
class OfRounded(DenseWeight):
    """A dense weight that takes its inputs in whole units of int8, each row's own."""

    def apply(self, x, bias=None):
        values, scales = quantize_rows(x)
        return super().apply(values * scales[:, None], bias)


@pytest.mark.parametrize("kernels", small_models.KERNELS)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_experts_are_those_of_the_dense_model_of_their_values(kernels, quantization):
    config = small_models.small_config(
        50,
        architecture="GptOssForCausalLM",
        activation="swigluoai",
        hidden_size=128,
        experts=ExpertsConfig(6, 64, Routing(3, normed=True), (True, True)),
    )

    def prepare(weight, is_output):
        return quantize_weight(DenseWeight(weight.tensor * 8), quantization)

    def dense(weight, is_output):
        held = prepare(weight, is_output)
        if isinstance(held, Int4Weight):
            return DenseWeight(held.dequantized(F32))
        assert isinstance(held, Int8Weight)
        return OfRounded(held.values * held.scales[:, None])

    weights, expected = (
        random_weights(config, F32, CPU, seed=3, prepare=one) for one in (prepare, dense)
    )
    assert isinstance(weights.layers[0].experts.router, DenseWeight), "routers stay exact"
    got = paged_logits(small_models.make(kernels, config, weights))
    wanted = paged_logits(small_models.make("torch", config, expected))
    assert wanted.std() > 0.3, "a model that says nothing proves nothing"
    # A last bit may round an int8 to its neighbour, or give a row another expert.
    assert relative_error(got, wanted) < (1e-5 if quantization == "int4" else 5e-3)


def test_mxfp4_experts_are_those_of_the_dense_model(tmp_path):
    sizes = {"num_local_experts": 4, "sliding_window": 24}
    reference = make_mxfp4(tmp_path, **sizes)
    for kernels in small_models.KERNELS:
        got = paged_logits(small_models.load(tmp_path, kernels))
        assert relative_error(got, logits_of(reference)) < 1e-5
    weights = load_weights(tmp_path, ModelConfig.load(tmp_path), BF16, CPU)
    expert = weights.layers[1].experts.experts[3]
    assert isinstance(expert.gate_up, Mxfp4Weight) and isinstance(expert.down, Mxfp4Weight)
    half = range(expert.down.shape[1] // 2)
    assert expert.down.take_inputs(half).num_bytes == expert.down.num_bytes // 2
    make_mxfp4(tmp_path, damage=changed(f"{EXPERTS}.down_proj_blocks", torch.zeros(3)), **sizes)
    with pytest.raises(CheckpointError, match=r"down_proj_blocks has dtype F32; supported: U8"):
        small_models.load(tmp_path, "torch")


def test_what_is_not_quantised_stays_dense_and_symmetric_groups_have_no_zero_points(tmp_path):
    make_quantized(tmp_path, FORMATS["gptq 64"])
    config = ModelConfig.load(tmp_path)
    weights = load_weights(tmp_path, config, F32, CPU)
    layer = weights.layers[0]
    assert isinstance(weights.lm_head, DenseWeight)
    assert isinstance(layer.qkv, Int4Weight)
    assert layer.qkv.zeros is layer.qkv.order is None
    assert (layer.qkv.shape, layer.qkv.group) == ((256, 128), 64)
    assert layer.qkv.num_bytes == 256 * 128 // 2 + 256 * 2 * 4


def load_config(directory, quantization, **changes):
    """A checkpoint's config, once these keys have been changed."""
    file = directory / "config.json"
    values = {**json.loads(file.read_text()), **changes, "quantization_config": quantization}
    file.write_text(json.dumps(values))
    return ModelConfig.load(directory)


@pytest.mark.parametrize(
    "config",
    [
        {**FORMATS["awq 32"], "modules_to_not_convert": ["self_attn"]},
        {**FORMATS["w4a16 128"], "ignore": ["lm_head", r"re:.*self_attn\..*_proj$"]},
        {**FORMATS["w4a16 128"], "ignore": ["lm_head", "re:^model.layers.0.self_attn"]},
        {**FORMATS["fp8"], "modules_to_not_convert": ["model.layers.0.self_attn", "mlp.up"]},
        {**FORMATS["fp8"], "modules_to_not_convert": ["self_attn.q_proj"]},
    ],
)
def test_modules_that_a_config_leaves_out_stay_dense(tmp_path, config):
    make_quantized(tmp_path, FORMATS["awq 32"])
    quantization = load_config(tmp_path, config).quantization
    assert quantization is not None
    assert quantization.scheme("model.layers.0.mlp.up_proj") is not None
    assert quantization.scheme("model.layers.0.self_attn.q_proj") is None
    assert quantization.scheme("lm_head") is None


def test_a_predicting_layer_is_quantised_as_its_names_in_the_checkpoint_say(tmp_path):
    """Qwen3-Next's and Qwen3.5's layer has a gate that the config leaves out by such a name."""
    gate = "mlp.shared_expert_gate"
    make_checkpoint(tmp_path, "Qwen3_5MoeForCausalLM")
    dense = ["lm_head", f"mtp.layers.0.{gate}"]
    config = load_config(tmp_path, {**FORMATS["fp8"], "modules_to_not_convert": dense})
    found = {
        module: scheme_of(config.predictor, {f"model.layers.4.{module}.weight": (1, 64)})
        for module in (gate, "self_attn.q_proj")
    }
    assert found == {gate: None, "self_attn.q_proj": config.quantization}


def test_parts_of_one_matrix_are_quantised_all_or_none(tmp_path):
    make_quantized(tmp_path, FORMATS["w4a16 128"])
    config = load_config(tmp_path, {**FORMATS["w4a16 128"], "ignore": ["lm_head", "re:.*k_proj"]})
    with pytest.raises(CheckpointError, match=r"ignores some of .*q_proj.*all or none"):
        load_weights(tmp_path, config, F32, CPU)


Q, K = (f"model.layers.1.self_attn.{part}_proj" for part in "qk")


def changed(name, value):
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("awq 32", lambda held: held.pop(f"{Q}.qzeros"), f"lacks tensor {Q}.qzeros"),
        (
            "gptq 64",
            changed(f"{Q}.scales", torch.zeros(3, 128)),
            f"tensor {Q}.scales has shape [3, 128]; config.json implies [2, 128]",
        ),
        (
            "w4a16 128",
            changed(f"{Q}.weight_packed", torch.zeros(128, 16)),
            f"tensor {Q}.weight_packed has dtype F32; supported: I32",
        ),
        (
            "gptq 32 act-order",
            changed(f"{K}.g_idx", torch.arange(128, dtype=torch.int32) // 32),
            f"{K} has its inputs in other groups (g_idx) than {Q}",
        ),
        (
            "gptq 32 act-order",
            changed(f"{Q}.g_idx", torch.zeros(128, dtype=torch.int32)),
            f"{Q}.g_idx has groups of other sizes than 32",
        ),
        (
            "gptq 64",
            changed(f"{Q}.bias", torch.ones(128)),
            f"tensor {Q}.bias is not part of LlamaForCausalLM",
        ),
    ],
)
def test_a_broken_checkpoint_is_an_error_that_names_the_tensor(tmp_path, name, damage, message):
    make_quantized(tmp_path, FORMATS[name], damage=damage)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        small_models.load(tmp_path, "torch")


def test_biases_of_zeros_that_old_exports_saved_are_ignored(tmp_path):
    reference = make_quantized(
        tmp_path, FORMATS["gptq 64"], damage=changed(f"{Q}.bias", torch.zeros(128))
    )
    assert (
        relative_error(paged_logits(small_models.load(tmp_path, "torch")), logits_of(reference))
        < 3e-6
    )


@pytest.mark.parametrize(
    ("sizes", "settings", "error", "message"),
    [
        ({}, {"quantization": "int8"}, ConfigError, "--quantization int8: .* already int4 (gptq)"),
        ({}, {"random_weights": True}, ConfigError, "--random-weights: .* --quantization int4"),
        (
            {"intermediate_size": 200},
            {},
            CheckpointError,
            "mlp.down_proj has 128 outputs and 200 inputs: .* multiples of 8 and 64; or serve",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(tmp_path, sizes, settings, error, message):
    make_quantized(tmp_path, FORMATS["w4a16 128"])
    load_config(tmp_path, FORMATS["gptq 64"], **sizes)
    with pytest.raises(error, match=message.replace("(", r"\(").replace(")", r"\)")):
        build.load(EngineConfig(str(tmp_path), kv_blocks=8, **settings))


def test_fp8_weights_need_a_gpu(tmp_path):
    values = {**FLOAT8, "strategy": "channel"}
    make_quantized(tmp_path, compressed("float-quantized", values, {**FLOAT8, **BY_TOKEN}))
    with pytest.raises(ConfigError, match=r"fp8, .* GPU only: add --device cuda, or take"):
        build.load(EngineConfig(str(tmp_path), kv_blocks=8))
