"""The supported architectures, as a table of their differences from Llama.

Keys and defaults are those of transformers' configurations. `baton.engine.models.decoder`
implements all of them; `ModelConfig.load` reads the rest of config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# Values of `layer_types`.
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

QkNorm = Literal["none", "head", "row"]
"""Norms of queries and keys: over each head, or over all heads of a row."""


@dataclass(frozen=True)
class ExpertNames:
    """Names of a mixture of experts: keys of config.json, and modules of a layer in checkpoints."""

    count: str = "num_experts"
    size: str = "moe_intermediate_size"
    module: str = "mlp"
    gate_up: tuple[str, str] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    router: str = "gate"
    biased: bool = False
    stacked: bool = False  # see `baton.engine.models.tensor_names`


@dataclass(frozen=True)
class Architecture:
    """An architecture's differences from Llama, whose values are the defaults here.

    defaults: values of keys that config.json may lack; most are keys of few architectures · biases:
    present, absent, or the key of config.json that says so · windows: which layers have sliding
    attention if config.json has no `layer_types`: "all"; "from" `max_window_layers` on;
    "alternate", every other one before it; "unrotated", those without rotary embedding; n, all but
    each n-th; "none" and "always" ignore `layer_types`; where `use_sliding_window` is a key and not
    set, none · delta_rule: projections of layers with linear attention, in the order of
    `baton.engine.models.delta_rule`; names · models: well-known models, for the documentation.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: QkNorm = "none"
    input_norm: str = "input_layernorm"  # before attention; empty: none
    attention_norm: str = ""  # of attention's output
    mlp_norm: str = "post_attention_layernorm"  # before the MLP
    output_norm: str = ""  # of the MLP's output
    norm_plus_one: bool = False  # 1 is added to norms' weights
    norm_rounds_once: bool = False  # after the weight only, not also before it
    scaled_embedding: bool = False  # by the square root of the hidden size
    joined: tuple[str, ...] = ()  # fields stored as one tensor
    windows: Literal["none", "always", "all", "from", "alternate", "unrotated"] | int = "none"
    interleaved_rope: bool = False  # rotated pairs are neighbours
    sinks: bool = False  # each head's softmax has a further score, whose value is 0
    gated_attention: bool = False  # outputs are multiplied by a gate, projected beside each query
    delta_rule: tuple[str, ...] = ()
    experts: ExpertNames | None = None  # if layers have a mixture of experts
    models: str = ""


_GEMMA: dict[str, Any] = {
    "qkv_bias": "attention_bias",
    "o_bias": "attention_bias",
    "attention_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "output_norm": "post_feedforward_layernorm",
    "norm_plus_one": True,
    "norm_rounds_once": True,
    "scaled_embedding": True,
}
_GEMMA_DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_SPARSE = {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []}
_QWEN_DEFAULTS = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN_NEXT_DEFAULTS = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "layer_types": None,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_QWEN_NEXT_MOE = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_QWEN_NEXT: dict[str, Any] = {
    "qkv_bias": "attention_bias",
    "o_bias": "attention_bias",
    "qk_norm": "head",
    "norm_plus_one": True,
    "norm_rounds_once": True,
    "gated_attention": True,
}
_BY_PART = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_ATTENTION_BIASES: dict[str, Any] = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
_ALL_BIASES: dict[str, Any] = {**_ATTENTION_BIASES, "mlp_bias": "mlp_bias"}

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(**_ALL_BIASES, models="Llama 2 and 3, SmolLM2"),
    # transformers reads an absent window as 4096, and null as none.
    "MistralForCausalLM": Architecture({"sliding_window": 4096}, windows="all", models="Mistral"),
    "Qwen2ForCausalLM": Architecture(
        _QWEN_DEFAULTS, qkv_bias=True, windows="from", models="Qwen2, Qwen2.5"
    ),
    "Qwen3ForCausalLM": Architecture(
        {**_QWEN_DEFAULTS, "head_dim": 128},
        **_ATTENTION_BIASES,
        qk_norm="head",
        windows="from",
        models="Qwen3",
    ),
    "Gemma2ForCausalLM": Architecture(
        {**_GEMMA_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        **_GEMMA,
        windows=2,
        models="Gemma 2",
    ),
    "Gemma3ForCausalLM": Architecture(
        {
            **_GEMMA_DEFAULTS,
            "final_logit_softcapping": None,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        **_GEMMA,
        qk_norm="head",
        windows=6,
        models="Gemma 3 (text)",
    ),
    "Phi3ForCausalLM": Architecture(
        {
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "partial_rotary_factor": 1.0,
            "original_max_position_embeddings": 4096,
        },
        windows="always",
        joined=("qkv", "gate_up"),
        models="Phi-3, Phi-4",
    ),
    "Olmo2ForCausalLM": Architecture(
        {"rms_norm_eps": 1e-5},
        **_ATTENTION_BIASES,
        qk_norm="row",
        input_norm="",
        attention_norm="post_attention_layernorm",
        mlp_norm="",
        output_norm="post_feedforward_layernorm",
        norm_rounds_once=True,
        models="OLMo 2",
    ),
    "SmolLM3ForCausalLM": Architecture(
        {
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
        **_ALL_BIASES,
        windows="unrotated",
        models="SmolLM3",
    ),
    "Glm4ForCausalLM": Architecture(
        {
            "head_dim": 128,
            "rms_norm_eps": 1.5625e-7,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
            "eos_token_id": [151329, 151336, 151338],
        },
        qkv_bias="attention_bias",
        attention_norm="post_self_attn_layernorm",
        output_norm="post_mlp_layernorm",
        joined=("gate_up",),
        interleaved_rope=True,
        models="GLM-4",
    ),
    "MixtralForCausalLM": Architecture(
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
            "norm_topk_prob": True,
            "num_experts_per_tok": 2,
        },
        windows="always",
        experts=ExpertNames(
            "num_local_experts", "intermediate_size", "block_sparse_moe", ("w1", "w3"), "w2"
        ),
        models="Mixtral",
    ),
    "Qwen2MoeForCausalLM": Architecture(
        {
            **_QWEN_DEFAULTS,
            **_SPARSE,
            "num_experts_per_tok": 4,
            "qkv_bias": True,
            "shared_expert_intermediate_size": 0,
        },
        qkv_bias="qkv_bias",
        windows="alternate",
        experts=ExpertNames(),
        models="Qwen2-MoE",
    ),
    "Qwen3MoeForCausalLM": Architecture(
        {**_QWEN_DEFAULTS, **_SPARSE, "num_experts_per_tok": 8},
        **_ATTENTION_BIASES,
        qk_norm="head",
        windows="always",
        experts=ExpertNames(),
        models="Qwen3-MoE",
    ),
    "Qwen3NextForCausalLM": Architecture(
        {**_QWEN_NEXT_DEFAULTS, **_QWEN_NEXT_MOE},
        **_QWEN_NEXT,
        delta_rule=("in_proj_qkvz", "in_proj_ba"),
        experts=ExpertNames(),
        models="Qwen3-Next",
    ),
    "Qwen3_5ForCausalLM": Architecture(
        _QWEN_NEXT_DEFAULTS,
        **_QWEN_NEXT,
        delta_rule=_BY_PART,
        models="Qwen3.5 (text)",
    ),
    "Qwen3_5MoeForCausalLM": Architecture(
        {
            **_QWEN_NEXT_DEFAULTS,
            **_QWEN_NEXT_MOE,
            "intermediate_size": 5632,  # of no layer
            "num_experts_per_tok": 8,
            "num_experts": 256,
        },
        **_QWEN_NEXT,
        delta_rule=_BY_PART,
        experts=ExpertNames(),
        models="Qwen3.5-MoE (text)",
    ),
    "OlmoeForCausalLM": Architecture(
        {"rms_norm_eps": 1e-5, "norm_topk_prob": False, "num_experts_per_tok": 8},
        **_ATTENTION_BIASES,
        qk_norm="row",
        experts=ExpertNames(size="intermediate_size"),
        models="OLMoE",
    ),
    "GptOssForCausalLM": Architecture(
        {
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "attention_bias": True,
            "sliding_window": 128,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,  # softmax of the best scores equals the normed softmax of all
        },
        **_ATTENTION_BIASES,
        norm_rounds_once=True,
        windows=2,
        sinks=True,
        models="gpt-oss",
        experts=ExpertNames(
            "num_local_experts", "intermediate_size", router="router", biased=True, stacked=True
        ),
    ),
    "GraniteForCausalLM": Architecture(
        {
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        **_ALL_BIASES,
        models="Granite",
    ),
}
