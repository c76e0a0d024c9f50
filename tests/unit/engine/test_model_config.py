"""config.json in all its spellings, and a refusal by name of what is not supported."""

import json
import math
import os
from typing import Any

import pytest
import torch
import transformers

from baton.engine.checkpoint.tensor_headers import fingerprint
from baton.engine.kernels.moe_routing import Routing
from baton.engine.kv_cache import plan_layout
from baton.engine.models.architectures import WRAPPERS
from baton.engine.models.model_config import LatentConfig, ModelConfig, Rope
from baton.engine.models.rope import inverse_frequencies
from baton.errors import CheckpointError
from tests.unit.engine import quantized_checkpoints
from tests.unit.engine.checkpoints import make_checkpoint

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


QWEN = {"architectures": ["Qwen2ForCausalLM"]}
PHI = {"architectures": ["Phi3ForCausalLM"]}
GEMMA = {"architectures": ["Gemma3ForCausalLM"]}
GPT_OSS = {"architectures": ["GptOssForCausalLM"], "num_local_experts": 8}
SMOL = {"architectures": ["SmolLM3ForCausalLM"]}
QWEN_NEXT = {
    "architectures": ["Qwen3_5ForCausalLM"], "full_attention_interval": 3,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8,
}  # fmt: skip
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4,
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 32,
}
GLM_FLASH = {**DEEPSEEK, "architectures": ["Glm4MoeLiteForCausalLM"]}
ERNIE = {"architectures": ["Ernie4_5_MoeForCausalLM"]}
YARN = {"rope_type": "yarn", "factor": 4}


def write(directory, **overrides):
    """A text model's config.json, or a multimodal one's, as sparse as published ones are."""
    file = directory / "config.json"
    base = {"vision_config": {"hidden_size": 32}} if "text_config" in overrides else BASE
    file.write_text(json.dumps({**base, **overrides}))
    return file


def load(directory, **overrides):
    return ModelConfig.load(write(directory, **overrides))


def wrapper(name, **text):
    """The keys of a multimodal model with these of its text part."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}
    architecture = f"{name}ForConditionalGeneration"
    return {"architectures": [architecture], "text_config": {**sizes, **text}}


def test_defaults_are_those_of_transformers(tmp_path):
    config = load(tmp_path)
    assert config.head_size == 16
    assert config.ropes == (Rope(10000.0),) * 3
    assert config.windows == (None, None, None)
    assert (config.dtype, config.eos_token_ids, config.rms_eps) == ("float32", (), 1e-6)
    assert not (config.tie_embeddings or config.qkv_bias or config.o_bias or config.mlp_bias)
    assert load(tmp_path, num_key_value_heads=None).num_kv_heads == 4
    assert load(tmp_path, architectures=["Qwen3ForCausalLM"]).head_size == 128


LINEAR = (Rope(5e5, "linear", 2.0, original_context=512),) * 3
OF_LINEAR, OLD_LINEAR = ({key: "linear", "factor": 2.0} for key in ("rope_type", "type"))
WINDOW = {"use_sliding_window": True, "sliding_window": 32}


@pytest.mark.parametrize(
    ("architecture", "overrides", "field", "value"),
    [
        ("Llama", {"dtype": "bfloat16"}, "dtype", "bfloat16"),
        ("Llama", {"torch_dtype": "float16"}, "dtype", "float16"),
        ("Llama", {"rope_theta": 5e5, "rope_scaling": OF_LINEAR}, "ropes", LINEAR),
        ("Llama", {"rope_theta": 5e5, "rope_scaling": OLD_LINEAR}, "ropes", LINEAR),
        ("Llama", {"rope_parameters": {"rope_theta": 5e5, **OF_LINEAR}}, "ropes", LINEAR),
        ("Llama", {"rope_theta": 5e5, "rope_parameters": OF_LINEAR}, "ropes", LINEAR),
        ("Mistral", {"max_position_embeddings": 8192}, "windows", (4096,) * 3),
        ("Mistral", {}, "windows", (None,) * 3),  # longer than any context
        ("Mistral", {"sliding_window": None}, "windows", (None,) * 3),
        ("Mistral", {"sliding_window": 32}, "windows", (32,) * 3),
        ("Qwen2", {"sliding_window": 32}, "windows", (None,) * 3),
        ("Qwen2", {**WINDOW, "max_window_layers": 2}, "windows", (None, None, 32)),
        (
            "Qwen3",
            {**WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            "windows",
            (32, None, 32),
        ),
        # As Gemma 3's first checkpoints have it.
        (
            "Gemma3",
            {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 3},
            "ropes",
            (Rope(1e4), Rope(1e4), Rope(1e6, "linear", 8.0, original_context=512)),
        ),
        ("Gemma2", {"sliding_window": 32}, "windows", (32, None, 32)),
        ("SmolLM3", {"no_rope_layer_interval": 2}, "ropes", (Rope(2e6), None, Rope(2e6))),
        ("Phi3", {"partial_rotary_factor": 0.75}, "ropes", (Rope(1e4, size=12),) * 3),
        ("Llama", {"rope_scaling": YARN}, "max_context", 2048),
    ],
)
def test_every_spelling_is_read(tmp_path, architecture, overrides, field, value):
    config = load(tmp_path, architectures=[f"{architecture}ForCausalLM"], **overrides)
    assert getattr(config, field) == value
    assert ModelConfig.load(tmp_path / "config.json") == config


def test_llama3_rope_frequencies_equal_transformers(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    rope, *_ = load(tmp_path, rope_theta=5e5, rope_scaling=scaling).ropes
    assert rope == Rope(5e5, "llama3", 8.0, 1.0, 4.0, 8192)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415

    reference = transformers.LlamaConfig(
        head_dim=128, rope_parameters={**scaling, "rope_theta": 5e5}
    )
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](reference, torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(rope, 128), expected, rtol=1e-6, atol=0)


def test_biases_by_architecture(tmp_path):
    def biases(architecture):
        config = load(
            tmp_path, architectures=[architecture], attention_bias=True, mlp_bias=True, head_dim=16
        )
        return config.qkv_bias, config.o_bias, config.mlp_bias

    assert biases("LlamaForCausalLM") == (True, True, True)
    assert biases("MistralForCausalLM") == (False, False, False)
    assert biases("Qwen2ForCausalLM") == (True, False, False)
    assert biases("Qwen3ForCausalLM") == (True, True, False)
    assert biases("Glm4ForCausalLM") == (True, False, False)


def test_stop_tokens_of_generation_config_win(tmp_path):
    write(tmp_path, eos_token_id=2)
    assert ModelConfig.load(tmp_path).eos_token_ids == (2,)
    generation = tmp_path / "generation_config.json"
    generation.write_text('{"bos_token_id": 1}')
    assert ModelConfig.load(tmp_path).eos_token_ids == (2,)
    generation.write_text('{"eos_token_id": [5, 7]}')
    assert ModelConfig.load(tmp_path).eos_token_ids == (5, 7)


# Published sizes: those of E2B, 26B-A4B and 31B, which have 1, 8 and 16 KV heads.
GEMMA4 = {
    "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 6, "head_dim": 256,
    "global_head_dim": 512, "hidden_size_per_layer_input": 8, "max_position_embeddings": 131072,
    "vocab_size": 262144, "sliding_window": 512,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"],
}  # fmt: skip


def gemma4(**changes):
    return wrapper("Gemma4", **{"model_type": "gemma4_text", **GEMMA4, **changes})


REMEDY = "--quantization int4"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64}
FP8 = {
    "quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
}  # fmt: skip


def compressed(form, weights=None, activations=None, **changes):
    """A quantization_config of compressed-tensors."""
    kind = {"type": "float" if form.startswith("float") else "int", "num_bits": 8}
    inputs: Any = {**kind, "strategy": "token", "dynamic": True, "symmetric": True}
    held: Any = {**kind, "strategy": "channel", "symmetric": True}
    if form == "pack-quantized":
        held |= {"num_bits": 4, "strategy": "group", "group_size": 64}
    of_inputs = None if form == "pack-quantized" else {**inputs, **(activations or {})}
    config = quantized_checkpoints.compressed(form, {**held, **(weights or {})}, of_inputs)
    return {**config, **changes}


REFUSED_FORMATS: list[Any] = [
    ({"bits": 4}, ["quantization_config.quant_method", "None", "gptq", REMEDY]),
    ({"quant_method": "bitsandbytes"}, ["quant_method", "'bitsandbytes'", "awq", REMEDY]),
    ({"quant_method": "fp8", "activation_scheme": "x"}, ["activation_scheme is 'x'", "static"]),
    ({**FP8, "weight_block_size": [1, 128]}, ["weight_block_size", "[128, 128]", REMEDY]),
    ({**FP8, "activation_scheme": "static"}, ["activation_scheme", "dynamic", REMEDY]),
    ({**FP8, "scale_fmt": "ue8m0"}, ["scale_fmt is 'ue8m0'", "float", REMEDY]),
    ({**GPTQ, "bits": 3}, ["quantization_config.bits is 3", REMEDY]),
    ({**GPTQ, "bits": 8}, ["quantization_config.bits is 8", REMEDY]),
    ({**GPTQ, "group_size": -1}, ["group_size is -1", "32, 64, 128", REMEDY]),
    ({**GPTQ, "is_marlin_format": True}, ["is_marlin_format", REMEDY]),
    ({**GPTQ, "checkpoint_format": "marlin"}, ["checkpoint_format", "marlin", "gptq_v2", REMEDY]),
    ({**GPTQ, "lm_head": True}, ["lm_head is True", REMEDY]),
    ({**GPTQ, "dynamic": {"-:down": {}}}, ["dynamic", REMEDY]),
    ({**AWQ, "version": "gemv"}, ["version is 'gemv'", "gemm", REMEDY]),
    ({**AWQ, "zero_point": False}, ["zero_point", REMEDY]),
    ({**AWQ, "modules_to_not_convert": "up_proj"}, ["modules_to_not_convert", "a list", REMEDY]),
    (compressed("marlin-24"), ["format is 'marlin-24'", "pack-quantized", REMEDY]),
    (compressed("pack-quantized", {"num_bits": 3}), ["group_0.weights.num_bits is 3", REMEDY]),
    (compressed("pack-quantized", {"strategy": "channel"}), ["weights.strategy", REMEDY]),
    (compressed("float-quantized", {"symmetric": False}), ["weights.symmetric is False", REMEDY]),
    (compressed("float-quantized", {"strategy": "group"}), ["weights.strategy", REMEDY]),
    (
        compressed("float-quantized", {"strategy": "block", "block_structure": [1, 128]}),
        ["weights.block_structure is [1, 128]", REMEDY],
    ),
    (compressed("float-quantized", {"type": "int"}), ["weights.type is 'int'", "float", REMEDY]),
    (
        compressed("int-quantized", activations={"dynamic": False}),
        ["group_0.input_activations.dynamic is False", REMEDY],
    ),
    (
        compressed("int-quantized", activations={"strategy": "tensor"}),
        ["input_activations.strategy is 'tensor'", REMEDY],
    ),
    (compressed("int-quantized", transform_config={"r1": {}}), ["transform_config", REMEDY]),
    (compressed("int-quantized", config_groups={}), ["config_groups is []", "one group", REMEDY]),
    (compressed("int-quantized", ignore=["re:(a|b)+"]), ["ignore is 're:(a|b)+'", REMEDY]),
    (compressed("int-quantized", ignore=["re:(a|b"]), ["ignore is 're:(a|b'", "expression"]),
    (compressed("int-quantized", ignore=["re:" + ".*a" * 7]), ["ignore", "6 of *", REMEDY]),
    (compressed("mixed-precision"), ["config_groups.group_0.format is 'mixed-precision'"]),
    (
        compressed("nvfp4-pack-quantized", {"type": "float", "num_bits": 4, "group_size": 32}),
        ["group_0.weights.group_size is 32", "16", REMEDY],
    ),
    ({"quant_method": "modelopt"}, ["quant_algo is None", "NVFP4", REMEDY]),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, ["quant_algo is 'W4A8_AWQ'", REMEDY]),
    (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
        ["group_size is 32", "16", REMEDY],
    ),
    (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"model.layers.0.mlp": {"quant_algo": "INT8_SQ"}},
        },
        ["quantized_layers.model.layers.0.mlp.quant_algo is 'INT8_SQ'", REMEDY],
    ),
]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["architectures", "GPT2LMHeadModel", "Qwen3"]),
        ({"architectures": None}, ["architectures", "None"]),
        *(
            ({"architectures": [name]}, [name, "both directions"])
            for name in ("BertModel", "XLMRobertaForSequenceClassification", "ModernBertModel")
        ),
        *(
            ({"architectures": [f"{name}ForCausalLM"]}, [name, "sparse attention", "indexer"])
            for name in ("DeepseekV32", "GlmMoeDsa")
        ),
        ({"architectures": ["DeepseekV4ForCausalLM"]}, ["compressed KV", "hyper-connections"]),
        ({**DEEPSEEK, "num_key_value_heads": 2}, ["num_key_value_heads is 2", "4, the heads"]),
        ({**DEEPSEEK, "qk_rope_head_dim": 15}, ["qk_rope_head_dim", "15", "even"]),
        ({**DEEPSEEK, "attention_bias": True}, ["attention_bias", "True"]),
        ({**DEEPSEEK, "rope_interleave": False}, ["rope_interleave", "False"]),
        ({**DEEPSEEK, "scoring_func": "softmax"}, ["scoring_func", "softmax", "sigmoid"]),
        ({**DEEPSEEK, "topk_method": "greedy"}, ["topk_method", "greedy", "noaux_tc"]),
        ({**DEEPSEEK, "n_group": 3}, ["n_group is 3", "divisor of 16"]),
        ({**DEEPSEEK, "n_group": 16}, ["n_group is 16", "2 or more"]),
        ({**DEEPSEEK, "topk_group": 1}, ["topk_group is 1", "8 experts"]),
        ({**GLM_FLASH, "mlp_layer_types": ["dense"]}, ["mlp_layer_types", "3 times"]),
        ({**ERNIE, "use_bias": True}, ["use_bias", "True"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "silu"]),
        *(({"quantization_config": config}, named) for config, named in REFUSED_FORMATS),
        ({"pretraining_tp": 2}, ["pretraining_tp", "2"]),
        ({"clip_qkv": 8.0}, ["clip_qkv", "8.0", "null"]),
        ({"is_causal": False}, ["is_causal", "False", "supported: True"]),
        ({"use_bidirectional_attention": True}, ["use_bidirectional_attention", "True"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor", "0.5"]),
        ({**GEMMA, "attn_logit_softcapping": 2.0}, ["attn_logit_softcapping", "2.0", "null"]),
        (
            {"rope_parameters": {"rope_type": "yarn", "llama_4_scaling_beta": 0.1}},
            ["rope_parameters.llama_4_scaling_beta", "0.1", "not supported"],
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "alpha": 1e3}}, ["rope_scaling.alpha"]),
        ({"rope_parameters": {"full_attention": {"factor": 2}}}, ["full_attention"]),
        (
            {**GEMMA, "rope_parameters": {"full_attention": {"attn_factor": 2}}},
            ["rope_parameters.full_attention.attn_factor"],
        ),
        ({"rope_scaling": {"rope_type": "ntk"}}, ["rope_scaling.rope_type", "ntk", "yarn"]),
        ({"rope_scaling": {"type": "dynamic"}}, ["rope_scaling.factor", "None"]),
        (
            {**PHI, "rope_scaling": {"type": "longrope", "short_factor": [1] * 7}},
            ["rope_scaling.short_factor", "8 numbers"],
        ),
        ({**PHI, "partial_rotary_factor": 0.2}, ["partial_rotary_factor", "0.2"]),
        (
            {"architectures": ["MiniMaxM2ForCausalLM"], "head_dim": 16, "rotary_dim": 18},
            ["rotary_dim is 18", "from 1 to 16"],
        ),
        ({**GEMMA, "final_logit_softcapping": -1}, ["final_logit_softcapping", "-1"]),
        ({**GEMMA, "hidden_activation": "gelu"}, ["hidden_activation", "'gelu'"]),
        ({**GPT_OSS, "swiglu_limit": 5}, ["swiglu_limit", "5", "7.0"]),
        ({**GPT_OSS, "quantization_config": GPTQ}, ["quant_method", "gptq", "mxfp4"]),
        ({**SMOL, "no_rope_layers": [1, 2, 0]}, ["no_rope_layers", "3 times 0 or 1"]),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor", "None"]),
        ({"rope_scaling": {"type": "llama3", "factor": 2}}, ["rope_scaling.low_freq_factor"]),
        ({"rope_scaling": "linear"}, ["rope_scaling", "'linear'"]),
        ({"rope_theta": "big"}, ["rope_theta", "'big'"]),
        ({"hidden_size": None}, ["hidden_size", "None"]),
        ({"vocab_size": 0}, ["vocab_size", "0"]),
        ({"num_hidden_layers": 2.5}, ["num_hidden_layers", "2.5"]),
        ({"num_attention_heads": True}, ["num_attention_heads", "True"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3", "divisor"]),
        ({"head_dim": 15}, ["head_dim", "15"]),
        ({"rms_norm_eps": -1}, ["rms_norm_eps", "-1"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "'yes'"]),
        ({"torch_dtype": "float8"}, ["torch_dtype", "float8"]),
        ({"eos_token_id": ["x"]}, ["eos_token_id", "x"]),
        ({**QWEN, "layer_types": ["full_attention"]}, ["layer_types", "3 times"]),
        ({**QWEN, "layer_types": ["sliding_attention"] * 3}, ["layer_types", "full_attention"]),
        ({**QWEN, "layer_types": ["full_attention"] * 100_000}, ["layer_types"]),
        ({**QWEN, "max_window_layers": "all"}, ["max_window_layers"]),
        # Numbers and texts without bounds.
        ({"num_hidden_layers": 10**12}, ["num_hidden_layers"]),
        ({"vocab_size": 10**30}, ["vocab_size"]),
        ({"head_dim": 2**40}, ["head_dim"]),
        ({"max_position_embeddings": 10**18}, ["max_position_embeddings"]),
        ({"rms_norm_eps": 10**400}, ["rms_norm_eps"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps"]),
        ({"rope_theta": float("inf")}, ["rope_theta"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 10**400}}, ["rope_scaling"]),
        ({"rope_scaling": {**YARN, "factor": 1e9}}, ["rope_scaling.factor", "16777216 tokens"]),
        ({"rope_scaling": {**YARN, "rope_type": "dynamic", "factor": 1e-9}}, ["rope_scaling.fac"]),
        # Numbers that formulas divide by, or by their logarithms.
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 0.5}}, ["original_max_pos"]),
        ({"rope_scaling": YARN, "rope_theta": 1}, ["rope_scaling.rope_theta is 1.0"]),
        ({"rope_scaling": YARN, "max_position_embeddings": 1}, ["original_max_position"]),
        (
            {"rope_scaling": {**YARN, "rope_type": "dynamic"}, "head_dim": 2},
            ["head_dim is 2", "more than two dimensions"],
        ),
        ({"eos_token_id": 10**30}, ["eos_token_id"]),
        ({**QWEN_NEXT, "layer_types": ["linear_attention"] * 3}, ["layer_types", "at least once"]),
        (
            {**QWEN_NEXT, "layer_types": ["sliding_attention"] * 3},
            ["layer_types", "linear_attention"],
        ),
        (
            {**QWEN_NEXT, "linear_num_key_heads": 3},
            ["linear_num_key_heads is 3", "multiple of 2 KV"],
        ),
        (
            {**QWEN_NEXT, "linear_num_value_heads": 6},
            ["linear_num_value_heads is 6", "4 key heads"],
        ),
        ({**QWEN_NEXT, "linear_conv_kernel_dim": 1}, ["linear_conv_kernel_dim is 1"]),
        ({"architectures": ["x" * 1_000_000]}, ["architectures"]),
        (
            wrapper("Mistral3", model_type="mistral4"),
            ["text_config.model_type is 'mistral4'", "mistral, ministral3"],
        ),
        (wrapper("Gemma3", hidden_size=0), ["text_config.hidden_size is 0"]),
        (
            wrapper("Gemma3", use_bidirectional_attention=True),
            ["text_config.use_bidirectional_attention"],
        ),
        (wrapper("Gemma3n"), ["architectures", "it needs embeddings for each"]),
        (gemma4(head_dim=96), ["text_config.head_dim is 96", "1/2", "2 of 512"]),
        (
            gemma4(num_kv_shared_layers=5),
            ["text_config.num_kv_shared_layers is 5", "a layer of each attention"],
        ),
        (
            gemma4(per_layer_config={"5": {"hidden_size": 2}}),
            ["per_layer_config.5.hidden_size is 2", "head_dim and num_key_value_heads"],
        ),
        (
            gemma4(per_layer_config={"2": None, "5": 7}),
            ["text_config.per_layer_config.5 is 7", "an object"],
        ),
        (gemma4(vocab_size_per_layer_input=7), ["text_config.vocab_size_per_layer_input is 7"]),
    ],
)
def test_refusals_name_file_key_and_value(tmp_path, overrides, named):
    file = write(tmp_path, **overrides)
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.load(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{file}: ")
    assert all(text in message for text in named)
    assert len(message) < len(str(file)) + 900


def test_published_configs_of_latent_attention(tmp_path):
    """The keys that matter, as DeepSeek-V3's and V2-Lite's authors wrote them."""
    latent = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    sizes = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1}
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    shared = {
        **latent, **sizes, "ep_size": 1, "v_head_dim": 128, "max_position_embeddings": 163840,
        "rope_theta": 10000, "torch_dtype": "bfloat16",
    }  # fmt: skip
    lite = load(
        tmp_path,
        **{
            **shared, "architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": None,
            "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64,
            "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
            "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False,
            "routed_scaling_factor": 1.0, "num_hidden_layers": 27,
            "rope_scaling": {**yarn, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    )  # fmt: skip
    assert lite.latent == LatentConfig(0, 512, 128, 64, 128)
    assert lite.experts.routing == Routing(6, normed=False)
    assert (lite.experts.shared_size, lite.experts.counts) == (2816, (26, 64))
    assert lite.score_scale == pytest.approx(192**-0.5 * (0.0707 * math.log(40) + 1) ** 2)
    assert plan_layout(lite, torch.bfloat16, 16, 1, 0).bytes_per_token == 27 * 576 * 2
    large = load(
        tmp_path,
        **{
            **shared, "architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": 1536,
            "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
            "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
            "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
            "routed_scaling_factor": 2.5, "num_hidden_layers": 61, "n_group": 8, "topk_group": 4,
            "first_k_dense_replace": 3, "num_nextn_predict_layers": 1,
            "rope_scaling": {**yarn, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    )  # fmt: skip
    assert large.experts.routing == Routing(
        8, normed=True, sigmoid=True, groups=8, taken_groups=4, group_top=2, scale=2.5
    )
    assert (large.experts.counts, large.predicting_layers) == ((58, 256), 1)
    assert plan_layout(large, torch.bfloat16, 16, 1, 0).bytes_per_token == 61 * 576 * 2


def test_fingerprint_tells_models_apart(tmp_path):
    for name, options in {
        "a": {"tokenizer": True},
        "same": {"tokenizer": True},
        "no tokenizer": {},
        "other weights": {"tokenizer": True, "seed": 1},
        "other config": {"tokenizer": True, "max_position_embeddings": 256},
        "sharded": {"tokenizer": True, "max_shard_size": "100KB"},
    }.items():
        make_checkpoint(tmp_path / name, **options)
    prints = {path.name: fingerprint(path) for path in tmp_path.iterdir()}
    assert prints["a"] == prints["same"]
    assert len(set(prints.values())) == len(prints) - 1
    file = write(tmp_path)  # of random weights it is config and seed
    assert fingerprint(file, 0) == fingerprint(tmp_path, 0) != fingerprint(file, 1)


def test_a_config_that_is_no_usual_file_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        ModelConfig.load(tmp_path)
    file = write(tmp_path)
    for text in ("", "{", "[1]", "\xff"):
        file.write_text(text, encoding="latin-1")
        with pytest.raises(CheckpointError, match=str(file)):
            ModelConfig.load(tmp_path)
    for content in ('{"a": ' + "[" * 100_000, '{"a": ' + "9" * 5000 + "}", " " * (20 << 20)):
        file.write_text(content)
        with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
            ModelConfig.load(tmp_path)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match=r"config\.json: .*not a regular file"):
        ModelConfig.load(tmp_path)


def test_the_text_part_of_a_multimodal_config_has_the_defaults_of_its_family(tmp_path):
    rope = {"rope_type": "linear", "factor": 8.0}
    values = wrapper("Gemma3", rope_scaling=rope, sliding_window=1024)
    config = load(tmp_path, **values, eos_token_id=[1, 106])
    assert config.architecture == "Gemma3ForCausalLM"
    assert config.wrapper == "Gemma3ForConditionalGeneration"
    sizes = (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_size)
    assert sizes == (262208, 8, 4, 256)
    assert (config.max_context, config.eos_token_ids) == (131072, (1, 106))
    assert config.tie_embeddings


FLAT = {
    **wrapper("")["text_config"], "num_attention_heads": 4, "vocab_size": 320,
    "max_position_embeddings": 512,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "tie_word_embeddings": True,
}  # fmt: skip
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_context": "max_position_embeddings",
}


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        (name, kind)
        for name, wrapper in WRAPPERS.items()
        for kind in wrapper.text
        if not kind.startswith("gemma4")  # whose heads transformers has by layer
    ],
)
def test_keys_that_a_text_part_lacks_have_the_values_of_transformers(tmp_path, architecture, kind):
    """Published configs of Llama's and Mistral's lack any that transformers 4 has by default."""
    is_sparse = kind in ("llama", "mistral")
    further = dict.fromkeys(("num_experts", "num_local_experts"), 60)
    further |= dict.fromkeys(("moe_intermediate_size", "intermediate_size_mlp"), 96)
    text = {} if is_sparse else {**FLAT, **further, "num_hidden_layers": 6}
    text.pop("rope_scaling", None)
    values = {"architectures": [architecture], "text_config": {"model_type": kind, **text}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config, expected = ModelConfig.load(tmp_path), transformers.CONFIG_MAPPING[kind](**text)
    assert config.rms_eps == expected.rms_norm_eps
    if is_sparse:
        for name, key in SIZES.items():
            assert getattr(config, name) == getattr(expected, key), key
    rope = expected.rope_parameters
    assert config.ropes[-1].theta == rope.get("full_attention", rope)["rope_theta"]
    if config.experts is not None:
        assert config.experts.routing.per_token == expected.num_experts_per_tok


@pytest.mark.parametrize(
    ("sizes", "pool", "groups", "storing"),
    [
        # 12 and 3 layers of 35 store: the pool's heads are those of full attention.
        ({"num_hidden_layers": 35, "num_kv_shared_layers": 20, "num_key_value_heads": 1,
          "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7}, (1, 512), (3, 3), 15),
        ({"num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8,
          "layer_types": GEMMA4["layer_types"] * 5, "attention_k_eq_v": True,
          "num_global_key_value_heads": 2}, (8, 256), (5, 6), 30),
        ({"num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16,
          "layer_types": GEMMA4["layer_types"] * 10, "attention_k_eq_v": True,
          "num_global_key_value_heads": 4}, (16, 256), (5, 11), 60),
    ],
)  # fmt: skip
def test_heads_of_two_sizes_share_blocks(tmp_path, sizes, pool, groups, storing):
    config = load(tmp_path, **wrapper("Gemma4", **{**GEMMA4, **sizes}))
    assert (config.num_kv_heads, config.head_size) == pool
    found = config.layer_groups
    assert (found.size, len(found.windows)) == groups
    stored = {at for at in range(config.num_layers) if not config.only_reads(at)}
    taken = [found.places[at] for at in stored]
    assert len(set(taken)) == len(stored) == storing
    for at in set(range(config.num_layers)) - stored:
        source = config.layer_heads[at].kv_layer
        assert found.places[at] == found.places[source]
        assert config.windows[at] == config.windows[source]


def test_a_multimodal_config_without_a_text_part_has_its_keys_outside(tmp_path):
    """So have Qwen2-VL's of transformers 4."""
    values = {**FLAT, "architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = ModelConfig.load(tmp_path)
    assert config.architecture == "Qwen2ForCausalLM"
    assert (config.ropes[0], config.tie_embeddings) == (Rope(1e6), True)


def test_modelopt_s_own_file_beside_the_config_says_how_weights_are_quantised(tmp_path):
    write(tmp_path)
    quantization = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", "*.0*"]}
    file = tmp_path / "hf_quant_config.json"
    file.write_text(json.dumps({"producer": {}, "quantization": quantization}))
    found = ModelConfig.load(tmp_path).quantization
    assert (found.method, found.weights) == ("modelopt", "nvfp4")
    assert found.scheme("model.layers.1.mlp.up_proj") is found
    assert found.scheme("model.layers.0.mlp.up_proj") is found.scheme("lm_head") is None
    file.write_text(json.dumps({"quantization": {"quant_algo": "INT4_AWQ"}}))
    with pytest.raises(CheckpointError, match=r"hf_quant_config.json: quantization.quant_algo is"):
        ModelConfig.load(tmp_path)


def test_names_in_a_multimodal_config_s_lists_have_prefixes(tmp_path):
    ignored = ["model.language_model.layers.0.self_attn", "language_model.model.layers.1.mlp"]
    quantization = {**FP8, "modules_to_not_convert": ignored}
    found = load(tmp_path, **wrapper("Gemma3"), quantization_config=quantization).quantization
    for module, is_quantized in (
        ("layers.0.self_attn.q_proj", False),
        ("layers.0.mlp.up_proj", True),
        ("layers.1.mlp.up_proj", False),
    ):
        assert (found.scheme(f"model.{module}") is found) == is_quantized
