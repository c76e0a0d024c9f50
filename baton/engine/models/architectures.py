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
CHUNKED = "chunked_attention"

QkNorm = Literal["none", "head", "row", "unit"]
"""Norms of queries and keys: over each head; over all heads of a row; over each head of layers with
rotary embedding, without a weight."""


@dataclass(frozen=True)
class StackedExperts:
    """How checkpoints store the experts of a layer together; `gate_up` and `down` are tensors.

    transposed: `[experts, in, out]`, else `[experts, out, in]`; None: either, as sizes say ·
    interleaved: even outputs are the
    gate's and odd ones up's, else the gate's are first.
    """

    gate_up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"
    transposed: bool | None = True
    interleaved: bool = False


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
    stacked: StackedExperts | None = None  # if a layer's experts are stored in one tensor
    taken: str = "num_experts_per_tok"
    scale: str = "routed_scaling_factor"  # empty: none, whatever config.json has
    normed: bool | None = None  # see `Routing`; None: as `norm_topk_prob` says
    sigmoid: bool = False  # see `Routing`
    group_top: int = 0  # see `Routing`; 0: there are no groups
    correction: str = ""  # the tensor of a layer that corrects scores; empty: none
    float32_router: bool = False
    shared: str = "shared_expert"  # the module of the expert that all tokens take
    shared_size: str = ""  # the key of its size, or of the number of experts that it stands for
    shared_gate: bool = False  # whether a gate weighs it
    enabled: str = ""  # the key of config.json that says whether there are experts; empty: always
    input_norm: str = ""  # experts, router and MLP have norms of their own, this one of experts
    scales_inputs: bool = False  # see `ExpertsConfig`
    share_scale: str = ""  # the tensor of a layer that multiplies shares; empty: none


@dataclass(frozen=True)
class Wrapper:
    """A multimodal architecture, of which the text part is served.

    text: the text part's architecture by its `model_type`; the first is that of a config that does
    not say it.
    """

    text: Mapping[str, str]
    models: str = ""


@dataclass(frozen=True)
class Architecture:
    """An architecture's differences from Llama, whose values are the defaults here.

    defaults: values of keys that config.json may lack; most are keys of few architectures · biases:
    present, absent, or the key of config.json that says so · windows: which layers have sliding
    attention if config.json has no `layer_types`: "all"; "from" `max_window_layers` on;
    "alternate", every other one before it; "unrotated", those without rotary embedding; "rotated",
    those with it; n, all but each n-th; "none" and "always" ignore `layer_types`; where
    `use_sliding_window` is a key and not set, none · rotates: "sliding" if layers of full attention
    have no rotary embedding where others have windows · delta_rule: projections of layers with
    linear attention: two by key head, or four by part · models: well-known models, for the
    documentation.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: QkNorm = "none"
    qk_norms: tuple[str, str] = ("q_norm", "k_norm")  # their modules
    norms_rotated: bool = False  # they follow rotary embedding
    ntk_alpha: bool = False  # `alpha` of dynamic rotary embedding stretches its base
    input_norm: str = "input_layernorm"  # before attention; empty: none
    attention_norm: str = ""  # of attention's output
    mlp_norm: str = "post_attention_layernorm"  # before the MLP
    output_norm: str = ""  # of the MLP's output
    norm_plus_one: bool = False  # 1 is added to norms' weights
    norm_rounds_once: bool = False  # after the weight only, not also before it
    scaled_embedding: bool = False  # by the square root of the hidden size
    layer_scale: bool = False  # a layer's output is multiplied by a number of the checkpoint
    value_norm: bool = False  # values are normed, without a weight
    joined: tuple[str, ...] = ()  # fields stored as one tensor
    windows: Literal["none", "always", "all", "from", "alternate", "unrotated", "rotated"] | int = (
        "none"
    )
    chunked: bool = False  # windows are `attention_chunk_size` long, and begin at a multiple of it
    rotates: Literal["all", "sliding"] = "all"
    interleaved_rope: bool = False  # rotated pairs are neighbours
    sinks: bool = False  # each head's softmax has a further score, whose value is 0
    gated_attention: bool = False  # outputs are multiplied by a gate, projected beside each query
    delta_rule: tuple[str, ...] = ()
    latent: bool = False  # attention is over latent KV (MLA)
    experts: ExpertNames | None = None  # if layers have a mixture of experts
    mlp: str = "mlp"  # the module of MLPs, and the key of their size
    mlp_size: str = "intermediate_size"
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
_OLMO: dict[str, Any] = {
    "qkv_bias": "attention_bias",
    "o_bias": "attention_bias",
    "qk_norm": "row",
    "input_norm": "",
    "attention_norm": "post_attention_layernorm",
    "mlp_norm": "",
    "output_norm": "post_feedforward_layernorm",
    "norm_rounds_once": True,
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
_QWEN_EXPERTS = ExpertNames(shared_size="shared_expert_intermediate_size", shared_gate=True)
_BY_PART = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
}
_PARTLY_ROTATED = {"partial_rotary_factor": None, "rotary_dim": None}
_CORRECTED: dict[str, Any] = {
    "count": "n_routed_experts",
    "sigmoid": True,
    "group_top": 2,
    "correction": "gate.e_score_correction_bias",
    "float32_router": True,
    "shared": "shared_experts",
    "shared_size": "n_shared_experts",
}
_CORRECTED_DEFAULTS = {
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
_GRANITE_DEFAULTS = {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_GLM_DEFAULTS = {
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "eos_token_id": [151329, 151336, 151338],
}
_ATTENTION_BIASES: dict[str, Any] = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
_ALL_BIASES: dict[str, Any] = {**_ATTENTION_BIASES, "mlp_bias": "mlp_bias"}
_HUNYUAN: dict[str, Any] = {
    **_ATTENTION_BIASES,
    "qk_norm": "head",
    "qk_norms": ("query_layernorm", "key_layernorm"),
    "norms_rotated": True,
    "ntk_alpha": True,
}

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(**_ALL_BIASES, models="Llama 2 and 3, SmolLM2"),
    "Llama4ForCausalLM": Architecture(
        {
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
            "use_qk_norm": True,
            "interleave_moe_layer_step": 1,
            "num_experts_per_tok": 1,
        },
        **_ATTENTION_BIASES,
        qk_norm="unit",
        windows="rotated",
        chunked=True,
        interleaved_rope=True,
        mlp="feed_forward",
        mlp_size="intermediate_size_mlp",
        experts=ExpertNames(
            "num_local_experts",
            "intermediate_size",
            "feed_forward",
            router="router",
            stacked=StackedExperts(),
            normed=False,
            sigmoid=True,
            scales_inputs=True,
            shared_size="intermediate_size",
        ),
        models="Llama 4 (text)",
    ),
    # transformers reads an absent window as 4096, and null as none.
    "MistralForCausalLM": Architecture({"sliding_window": 4096}, windows="all", models="Mistral"),
    "MinistralForCausalLM": Architecture(
        {"sliding_window": 4096}, windows="all", models="Ministral of 2024"
    ),
    "Ministral3ForCausalLM": Architecture(
        {
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        windows="always",
        models="Ministral 3",
    ),
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
    "Gemma4ForCausalLM": Architecture(
        {
            **_GEMMA_DEFAULTS,
            "sliding_window": 512,
            "query_pre_attn_scalar": 1,  # scores are not scaled: queries and keys are normed
            "final_logit_softcapping": None,
            "rope_local_base_freq": None,
            "partial_rotary_factor": 1.0,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1e6,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "global_head_dim": 512,
            "num_global_key_value_heads": None,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262144,
            "use_double_wide_mlp": False,
        },
        **{**_GEMMA, "norm_plus_one": False},
        qk_norm="head",
        value_norm=True,
        layer_scale=True,
        windows=6,
        experts=ExpertNames(
            module="",
            router="router.proj",
            taken="top_k_experts",
            normed=True,
            stacked=StackedExperts(transposed=False),
            shared="mlp",
            shared_size="intermediate_size",
            enabled="enable_moe_block",
            input_norm="pre_feedforward_layernorm_2",
            share_scale="router.per_expert_scale",
        ),
        models="Gemma 4 (text)",
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
        **_OLMO,
        models="OLMo 2",
    ),
    "Olmo3ForCausalLM": Architecture(
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "rope_local_base_freq": None,
            "sliding_window": 4096,
        },
        **_OLMO,
        windows=4,
        models="OLMo 3",
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
        _GLM_DEFAULTS,
        qkv_bias="attention_bias",
        attention_norm="post_self_attn_layernorm",
        output_norm="post_mlp_layernorm",
        joined=("gate_up",),
        interleaved_rope=True,
        models="GLM-4",
    ),
    "GlmForCausalLM": Architecture(
        _GLM_DEFAULTS,
        qkv_bias="attention_bias",
        joined=("gate_up",),
        interleaved_rope=True,
        models="GLM-4 of 2024, GLM-Edge",
    ),
    "SeedOssForCausalLM": Architecture(
        {"head_dim": 128, "attention_bias": True},
        qkv_bias="attention_bias",
        o_bias="attention_out_bias",
        mlp_bias="mlp_bias",
        models="Seed-OSS",
    ),
    "HeliumForCausalLM": Architecture(
        {"rms_norm_eps": 1e-8, "rope_theta": 1e5, "head_dim": 128},
        qkv_bias="attention_bias",
        mlp_bias="mlp_bias",
        norm_rounds_once=True,
        interleaved_rope=True,
        models="Helium",
    ),
    "Exaone4ForCausalLM": Architecture(
        {"rms_norm_eps": 1e-5, "sliding_window": 4096},
        qk_norm="head",
        input_norm="",
        attention_norm="post_attention_layernorm",
        mlp_norm="",
        output_norm="post_feedforward_layernorm",
        windows=4,
        rotates="sliding",
        models="EXAONE 4",
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
        experts=ExpertNames(shared_size="shared_expert_intermediate_size", shared_gate=True),
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
        experts=_QWEN_EXPERTS,
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
        experts=_QWEN_EXPERTS,
        models="Qwen3.5-MoE (text)",
    ),
    "Qwen3VLMoeForConditionalGeneration": Architecture(
        {**_SPARSE, "num_experts_per_tok": 4, "norm_topk_prob": True, "rope_theta": 5e5},
        **_ATTENTION_BIASES,
        qk_norm="head",
        experts=ExpertNames(stacked=StackedExperts(transposed=None)),
        models="Qwen3-VL-MoE",
    ),
    "FlexOlmoForCausalLM": Architecture(
        {"rope_theta": 5e5, "norm_topk_prob": False, "num_experts_per_tok": 5},
        **_OLMO,
        experts=ExpertNames(size="intermediate_size"),
        models="FlexOlmo",
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
            "num_local_experts",
            "intermediate_size",
            router="router",
            biased=True,
            stacked=StackedExperts(interleaved=True),
        ),
    ),
    "DeepseekV2ForCausalLM": Architecture(
        {
            **_LATENT,
            "first_k_dense_replace": 0,
            "topk_method": "greedy",
            "routed_scaling_factor": 1.0,
            "num_experts_per_tok": 6,
            "n_shared_experts": 2,
            "rms_norm_eps": 1e-6,
        },
        latent=True,
        interleaved_rope=True,
        models="DeepSeek-V2",
        experts=ExpertNames(
            "n_routed_experts",
            normed=False,
            group_top=1,
            float32_router=True,
            shared="shared_experts",
            shared_size="n_shared_experts",
        ),
    ),
    "DeepseekV3ForCausalLM": Architecture(
        {
            **_LATENT,
            **_CORRECTED_DEFAULTS,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5,
            "rope_interleave": True,
        },
        latent=True,
        interleaved_rope=True,
        models="DeepSeek-V3 and R1, Kimi K2",
        experts=ExpertNames(**_CORRECTED),
    ),
    "Glm4MoeLiteForCausalLM": Architecture(
        {
            **_LATENT,
            **_CORRECTED_DEFAULTS,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "mlp_layer_types": None,
            "routed_scaling_factor": 1.8,
            "num_experts_per_tok": 4,
            "rms_norm_eps": 1e-5,
            "rope_interleave": True,
        },
        latent=True,
        interleaved_rope=True,
        models="GLM-4.7-Flash",
        experts=ExpertNames(**_CORRECTED),
    ),
    "Glm4MoeForCausalLM": Architecture(
        {
            **_CORRECTED_DEFAULTS,
            "head_dim": 128,
            "first_k_dense_replace": 1,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": False,
            "num_nextn_predict_layers": 0,
        },
        qkv_bias="attention_bias",
        qk_norm="head",
        models="GLM-4.5, GLM-4.6, GLM-4.7",
        experts=ExpertNames(**_CORRECTED),
    ),
    "Ernie4_5_MoeForCausalLM": Architecture(
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "moe_num_experts": 64,
            "moe_k": 6,
            "moe_intermediate_size": 1536,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
            "use_bias": False,
        },
        interleaved_rope=True,
        models="ERNIE 4.5 (MoE)",
        experts=ExpertNames(
            "moe_num_experts",
            taken="moe_k",
            normed=True,
            correction="moe_statics.e_score_correction_bias",
            float32_router=True,
            shared="shared_experts",
            shared_size="moe_num_shared_experts",
        ),
    ),
    "MiniMaxM2ForCausalLM": Architecture(
        {"head_dim": 128, "rope_theta": 5e6, "num_experts_per_tok": 8, **_PARTLY_ROTATED},
        qk_norm="row",
        models="MiniMax-M2",
        experts=ExpertNames(
            "num_local_experts",
            "intermediate_size",
            "block_sparse_moe",
            ("w1", "w3"),
            "w2",
            normed=True,
            sigmoid=True,
            correction="e_score_correction_bias",
        ),
    ),
    "HunYuanDenseV1ForCausalLM": Architecture(
        {"rms_norm_eps": 1e-5}, **_HUNYUAN, models="Hunyuan (dense)"
    ),
    "HunYuanMoEV1ForCausalLM": Architecture(
        {"rms_norm_eps": 1e-5, "moe_topk": 1},
        **_HUNYUAN,
        experts=ExpertNames(
            size="intermediate_size",
            router="gate.wg",
            taken="moe_topk",
            scale="",
            normed=True,
            float32_router=True,
            shared="shared_mlp",
            shared_size="intermediate_size",
        ),
        models="Hunyuan-A13B",
    ),
    "HYV3ForCausalLM": Architecture(
        {
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 11158840.0,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "router_scaling_factor": 2.826,
            "mlp_layer_types": None,
            "num_nextn_predict_layers": 0,
        },
        **_ALL_BIASES,
        qk_norm="head",
        experts=ExpertNames(
            router="router.gate",
            normed=True,
            sigmoid=True,
            scale="router_scaling_factor",
            correction="expert_bias",
            float32_router=True,
            shared="shared_mlp",
            shared_size="num_shared_experts",
        ),
        models="Hunyuan 3",
    ),
    "Dots1ForCausalLM": Architecture(
        {
            **_CORRECTED_DEFAULTS,
            "sliding_window": 4096,
            "max_window_layers": 62,
            "first_k_dense_replace": 0,
            "n_routed_experts": 128,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "norm_topk_prob": False,
        },
        **_ATTENTION_BIASES,
        qk_norm="head",
        windows="from",
        experts=ExpertNames(**_CORRECTED),
        models="dots.llm1",
    ),
    "SolarOpenForCausalLM": Architecture(
        {
            **_CORRECTED_DEFAULTS,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        qkv_bias="attention_bias",
        mlp_size="moe_intermediate_size",  # all layers have experts
        experts=ExpertNames(**_CORRECTED),
        models="Solar Open",
    ),
    "ExaoneMoeForCausalLM": Architecture(
        {
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "mlp_layer_types": None,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_group": 1,
            "topk_group": 1,
        },
        qk_norm="head",
        windows=4,
        rotates="sliding",
        experts=ExpertNames(
            **{
                **_CORRECTED,
                "count": "num_experts",
                "correction": "e_score_correction_bias",
                "shared_size": "num_shared_experts",
            }
        ),
        models="K-EXAONE",
    ),
    "Ernie4_5ForCausalLM": Architecture(
        {
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        },
        interleaved_rope=True,
        models="ERNIE 4.5",
    ),
    "GraniteForCausalLM": Architecture(_GRANITE_DEFAULTS, **_ALL_BIASES, models="Granite"),
    "GraniteMoeForCausalLM": Architecture(
        {**_GRANITE_DEFAULTS, "norm_topk_prob": True, "num_experts_per_tok": 2},
        **_ATTENTION_BIASES,
        experts=ExpertNames(
            "num_local_experts",
            "intermediate_size",
            "block_sparse_moe",
            router="router.layer",
            stacked=StackedExperts("input_linear.weight", "output_linear.weight", transposed=False),
        ),
        models="Granite 3 MoE",
    ),
}

_MISTRAL = {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}
WRAPPERS: dict[str, Wrapper] = {
    "Gemma3ForConditionalGeneration": Wrapper(
        {"gemma3_text": "Gemma3ForCausalLM"}, models="Gemma 3"
    ),
    "Gemma4ForConditionalGeneration": Wrapper(
        {"gemma4_text": "Gemma4ForCausalLM"}, models="Gemma 4"
    ),
    "Gemma4UnifiedForConditionalGeneration": Wrapper(
        {"gemma4_unified_text": "Gemma4ForCausalLM"}, models="Gemma 4 (12B)"
    ),
    "Llama4ForConditionalGeneration": Wrapper(
        {"llama4_text": "Llama4ForCausalLM"}, models="Llama 4"
    ),
    "Mistral3ForConditionalGeneration": Wrapper(
        _MISTRAL, models="Mistral Small 3.1 and 3.2, Ministral 3"
    ),
    "LlavaForConditionalGeneration": Wrapper(
        {"llama": "LlamaForCausalLM", **_MISTRAL}, models="Pixtral"
    ),
    "SmolVLMForConditionalGeneration": Wrapper({"llama": "LlamaForCausalLM"}, models="SmolVLM"),
    "Idefics3ForConditionalGeneration": Wrapper({"llama": "LlamaForCausalLM"}, models="Idefics 3"),
    "Qwen2VLForConditionalGeneration": Wrapper(
        {"qwen2_vl_text": "Qwen2ForCausalLM"}, models="Qwen2-VL"
    ),
    "Qwen2_5_VLForConditionalGeneration": Wrapper(
        {"qwen2_5_vl_text": "Qwen2ForCausalLM"}, models="Qwen2.5-VL"
    ),
    "Qwen3VLForConditionalGeneration": Wrapper(
        {"qwen3_vl_text": "Qwen3ForCausalLM"}, models="Qwen3-VL"
    ),
    "Qwen3VLMoeForConditionalGeneration": Wrapper(
        {"qwen3_vl_moe_text": "Qwen3VLMoeForConditionalGeneration"}, models="Qwen3-VL-MoE"
    ),
    "Qwen3_5ForConditionalGeneration": Wrapper(
        {"qwen3_5_text": "Qwen3_5ForCausalLM"}, models="Qwen3.5, Qwen3.6"
    ),
    "Qwen3_5MoeForConditionalGeneration": Wrapper(
        {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
        models="Qwen3.5-MoE, Qwen3.6-MoE",
    ),
    "InternVLForConditionalGeneration": Wrapper(
        {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}, models="InternVL 3"
    ),
}
_OLD_SIZES = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_QWEN_VL_DEFAULTS = {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "max_window_layers": 80}
TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {**_OLD_SIZES, "intermediate_size": 11008, "max_position_embeddings": 2048},
    "mistral": {
        **_OLD_SIZES,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
    },
    "gemma4_unified_text": {"hidden_size_per_layer_input": 0},
    "qwen2_vl_text": _QWEN_VL_DEFAULTS,
    "qwen2_5_vl_text": _QWEN_VL_DEFAULTS,
    "qwen3_vl_text": {"rope_theta": 5e5},
}
"""Values of keys that a text part may lack, by its `model_type`; they count before those of its
architecture."""

REFUSED: dict[str, str] = {
    "Gemma3nForConditionalGeneration": "embeddings for each layer, and alternating updates",
    "Gemma3nForCausalLM": "embeddings for each layer, and alternating updates",
    "Cohere2ForCausalLM": "layer norms, and attention beside the MLP",
    "ArceeForCausalLM": "an MLP without gate",
    "NanoChatForCausalLM": "an MLP without gate",
    "ApertusForCausalLM": "an MLP without gate",
    "PhimoeForCausalLM": "layer norms",
    "Lfm2ForCausalLM": "short convolutions",
    "Lfm2MoeForCausalLM": "short convolutions",
    "DeepseekV32ForCausalLM": "sparse attention, whose indexer stores keys beside latent KV",
    "GlmMoeDsaForCausalLM": "sparse attention, whose indexer stores keys beside latent KV",
    "DeepseekV4ForCausalLM": "sparse attention over compressed KV, and hyper-connections",
}
"""Well-known architectures that are not supported, and what the decoder lacks for them."""
ENCODERS = (
    *("Bert", "Roberta", "XLMRoberta", "Camembert", "DistilBert", "Albert", "Electra", "MPNet"),
    *("Deberta", "ModernBert", "NomicBert", "JinaBert", "GteModel", "NewModel", "NewFor"),
    *("EuroBert", "NeoBERT", "ErnieModel", "ErnieForSequence", "T5Encoder", "Gemma3TextModel"),
)
"""Beginnings of the names of encoders, whose attention is in both directions."""
