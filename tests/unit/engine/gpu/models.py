"""Tiny models for the GPU path, wide enough in their weights that a wrong step is seen."""

from dataclasses import replace

import torch

from baton.engine.backends.gpu import linear
from baton.engine.backends.gpu.model import GpuModel
from baton.engine.kernels.delta_rule import DeltaRuleShape
from baton.engine.kernels.moe_routing import Routing
from baton.engine.models.decoder import DecoderModel
from baton.engine.models.model_config import (
    DeltaRuleConfig,
    ExpertsConfig,
    LatentConfig,
    LayerHeads,
)
from baton.engine.models.rope_config import Rope
from baton.engine.models.weight_loader import random_weights
from baton.engine.models.weights import ModelWeights
from baton.engine.quantization.fp8 import Fp8Weight
from baton.engine.quantization.int8 import Int8Weight
from baton.engine.quantization.linear_weight import DenseWeight
from tests.unit.engine.small_models import CPU, changed, qwen_config

TINY = replace(
    qwen_config(),
    vocab_size=96,
    hidden_size=32,
    head_size=16,
    score_scale=16**-0.5,
    intermediate_size=48,
    qkv_bias=False,
    max_context=256,
)
ODD = replace(TINY, num_heads=3, num_kv_heads=1, head_size=48, score_scale=48**-0.5)
QWEN3 = replace(TINY, architecture="Qwen3ForCausalLM")
EXPERTS = ExpertsConfig(6, 32, Routing(3, normed=True), (True, True))
CORRECTED = Routing(3, normed=True, sigmoid=True, groups=3, taken_groups=2, group_top=2, scale=1.5)
LATENT = replace(
    TINY,
    architecture="DeepseekV3ForCausalLM",
    num_kv_heads=1,
    head_size=48,
    latent=LatentConfig(q_rank=24, kv_rank=32, nope_size=20, rope_size=16, value_size=12),
)
CONFIGS = {
    "llama": TINY,
    "llama biases, odd heads": replace(ODD, qkv_bias=True, o_bias=True, mlp_bias=True),
    "mistral window, no gqa": replace(TINY, num_kv_heads=4, windows=(12, 12)),
    "qwen2 tied": replace(TINY, qkv_bias=True, tie_embeddings=True),
    "qwen3 window in one layer": replace(
        QWEN3, head_size=32, score_scale=32**-0.5, windows=(None, 9)
    ),
    "gemma3": replace(
        TINY,
        architecture="Gemma3ForCausalLM",
        windows=(9, None),
        ropes=(Rope(1e4), Rope(1e6, "linear", 8.0)),
        activation="gelu_tanh",
        embedding_scale=2.0,
        logit_softcap=30.0,
    ),
    "gemma2": replace(
        TINY,
        architecture="Gemma2ForCausalLM",
        windows=(9, None),
        activation="gelu_tanh",
        attention_softcap=2.0,
        logit_softcap=30.0,
    ),
    "qwen2 moe": replace(
        TINY,
        architecture="Qwen2MoeForCausalLM",
        experts=replace(EXPERTS, routing=Routing(3, False), layers=(False, True), shared_size=32),
    ),
    "gpt-oss": replace(
        TINY,
        architecture="GptOssForCausalLM",
        windows=(9, None),
        qkv_bias=True,
        o_bias=True,
        activation="swigluoai",
        experts=EXPERTS,
    ),
    "deepseek v3": replace(
        LATENT,
        experts=replace(EXPERTS, routing=CORRECTED, layers=(False, True), shared_size=32),
    ),
    "deepseek v2 lite": replace(
        LATENT, architecture="DeepseekV2ForCausalLM", latent=replace(LATENT.latent, q_rank=0)
    ),
    "minimax m2": replace(
        TINY,
        architecture="MiniMaxM2ForCausalLM",
        experts=replace(EXPERTS, routing=replace(CORRECTED, groups=1, taken_groups=1)),
    ),
    "qwen3.5": replace(
        TINY,
        architecture="Qwen3_5ForCausalLM",
        delta_rule=DeltaRuleConfig((True, False), DeltaRuleShape(2, 4, 16, 16, kernel=4)),
    ),
    "gemma4": replace(
        TINY,
        architecture="Gemma4ForCausalLM",
        num_layers=3,
        num_kv_heads=2,
        head_size=32,
        layer_heads=(
            LayerHeads(2, 16, keys_as_values=False, kv_layer=0),
            LayerHeads(2, 32, keys_as_values=True, kv_layer=1),
            LayerHeads(2, 16, keys_as_values=False, kv_layer=0),
        ),
        windows=(9, None, 9),
        ropes=(Rope(1e4), Rope(1e6, "proportional", size=8), Rope(1e4)),
        activation="gelu_tanh",
        embedding_scale=2.0,
    ),
    "llama4": replace(
        TINY,
        architecture="Llama4ForCausalLM",
        windows=(6, None),
        ropes=(Rope(1e4), None),
        query_scaling=(4.0, 0.5),
        experts=replace(
            EXPERTS, routing=Routing(3, False, sigmoid=True), shared_size=32, scales_inputs=True
        ),
    ),
    "hunyuan": replace(TINY, architecture="HunYuanDenseV1ForCausalLM"),
    "olmo2, partly turned": replace(
        TINY, architecture="Olmo2ForCausalLM", ropes=(Rope(1e4, size=8), None)
    ),
}

# Sizes of a checkpoint with states that are interpreted in seconds.
FEW_STATES = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def weights_of(config, dtype=torch.float32, quantization="none"):
    """Seeded weights: matrices as wide as they are deep, norms and biases of every size."""
    drawn = random_weights(config, dtype, CPU, seed=3)
    lm_head = drawn.embedding * 50 if config.tie_embeddings else drawn.lm_head.tensor * 8
    return ModelWeights(
        lm_head if config.tie_embeddings else drawn.embedding * 50,
        tuple(_layer(layer, seed, quantization) for seed, layer in enumerate(drawn.layers)),
        _norm(drawn.final_norm, 99),
        linear.prepare(DenseWeight(lm_head), True, quantization),
    )


def _layer(layer, seed, quantization):
    def of_tensor(name, tensor):
        if not name.endswith("norm"):
            return tensor * 15
        return _norm(tensor, 10 * seed + sum(name.encode()))

    def of_weight(weight):
        return linear.prepare(DenseWeight(weight.tensor * 8), False, quantization)

    return changed(layer, of_weight, of_tensor)


def _norm(ones, seed):
    generator = torch.Generator().manual_seed(seed)
    return ones + 0.2 * torch.randn(ones.shape, generator=generator).to(ones.dtype)


def both(config, dtype=torch.float32, quantization="none"):
    """The reference and the GPU's model over the same weights."""
    weights = weights_of(config, dtype, quantization)
    plain = reference_weights(weights)
    return DecoderModel(config, plain, dtype, CPU), GpuModel(config, weights, dtype, CPU)


def reference_weights(weights):
    """The same weights, multiplied by torch and not by the GPU's kernels."""
    layers = tuple(changed(layer, _reference) for layer in weights.layers)
    return replace(weights, layers=layers, lm_head=_reference(weights.lm_head))


def _reference(weight):
    """The weight as torch multiplies it, without the GPU's kernels."""
    if isinstance(weight, linear.GpuReferenceWeight):
        return weight.weight
    if isinstance(weight, DenseWeight):
        return DenseWeight(weight.tensor)
    kind = Int8Weight if isinstance(weight, Int8Weight) else Fp8Weight
    return kind(weight.values, weight.scales)


def tokens(length, seed, vocab=TINY.vocab_size):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (length,), generator=generator).tolist()
