"""The models that tests run, of which docs/models.md has a table. Torch-free.

An architecture's options are keys of config.json, beside the sizes of
`tests.unit.engine.checkpoints`.
"""

from typing import Any, NamedTuple

from baton.engine.models.architectures import ARCHITECTURES, WRAPPERS

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 32,
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
FEW_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 3}
WINDOW = {"sliding_window": 20}
WINDOW_LAST = {**WINDOW, "layer_types": ["full_attention", "sliding_attention"]}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR_ROPE = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}
MROPE = {**DEFAULT_ROPE, "mrope_section": [2, 3, 3]}
PARTIAL = {**DEFAULT_ROPE, "partial_rotary_factor": 0.75}
DYNAMIC_ROPE = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0}
GEMMA4 = {**WINDOW, "num_key_value_heads": 4, "num_kv_shared_layers": 0, "attention_k_eq_v": True}
# As they are, beside the variants of architectures below.
PLAIN = (
    *("LlamaForCausalLM", "Llama4ForCausalLM", "Qwen2ForCausalLM", "Olmo2ForCausalLM"),
    *("Glm4ForCausalLM", "Qwen3NextForCausalLM", "GlmForCausalLM", "HeliumForCausalLM"),
    *("Llama4ForConditionalGeneration", "LlavaForConditionalGeneration"),
    *("SmolVLMForConditionalGeneration", "Idefics3ForConditionalGeneration"),
    *("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
    *("InternVLForConditionalGeneration", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"),
    *("Ernie4_5_MoeForCausalLM", "MiniMaxM2ForCausalLM", "HunYuanDenseV1ForCausalLM"),
    *("HYV3ForCausalLM", "Ernie4_5ForCausalLM"),
)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in PLAIN},
    "llama one kv head": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "llama no gqa": ("LlamaForCausalLM", {"num_key_value_heads": 4}),
    "llama wide heads": ("LlamaForCausalLM", {"head_dim": 32}),
    "llama tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama llama3 rope": ("LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    "llama linear rope": ("LlamaForCausalLM", {"rope_parameters": LINEAR_ROPE}),
    "llama odd sizes": (
        "LlamaForCausalLM",
        {"hidden_size": 92, "intermediate_size": 103, "vocab_size": 301},
    ),
    "llama4 of several experts, without norms": (
        "Llama4ForCausalLM",
        {
            "num_experts_per_tok": 2,
            "moe_layers": [0, 3],
            "use_qk_norm": False,
            "no_rope_layers": [0, 1, 1, 1],
            "attention_chunk_size": 17,
        },
    ),
    "mistral window": ("MistralForCausalLM", {"sliding_window": 24}),
    "mistral no window": ("MistralForCausalLM", {"sliding_window": None}),
    "qwen2 tied": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2 window from layer 1": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, **WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 24}),
    "qwen3 biases": ("Qwen3ForCausalLM", {"attention_bias": True}),
    "qwen3 layer types": (
        "Qwen3ForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 17,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "llama yarn": ("LlamaForCausalLM", {"rope_parameters": YARN}),
    "llama yarn with mscale": (
        "LlamaForCausalLM",
        {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4, "truncate": False}},
    ),
    # As transformers turns a prompt of the longest context: 25 tokens times 3.
    "llama dynamic": (
        "LlamaForCausalLM",
        {"max_position_embeddings": 25, "rope_parameters": DYNAMIC_ROPE},
    ),
    "gemma2": ("Gemma2ForCausalLM", {**GEMMA, **WINDOW, "query_pre_attn_scalar": 24}),
    "gemma2 other caps": (
        "Gemma2ForCausalLM",
        {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": None},
    ),
    "gemma3": ("Gemma3ForCausalLM", {**GEMMA, **WINDOW, "num_hidden_layers": 7}),
    "gemma3 scaled": (
        "Gemma3ForCausalLM",
        {
            **GEMMA,
            **WINDOW_LAST,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": DEFAULT_ROPE,
            },
        },
    ),
    "gemma4": ("Gemma4ForCausalLM", {**WINDOW, "final_logit_softcapping": 30.0}),
    "gemma4 of large sizes": (
        "Gemma4ForCausalLM",
        {
            **GEMMA4,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
        },
    ),
    "gemma4, four full layers in the place of one": (
        "Gemma4ForCausalLM",
        {
            **GEMMA4,
            "num_global_key_value_heads": 1,
            "global_head_dim": 16,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", *["full_attention"] * 3],
        },
    ),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": 24}),
    "phi3 partly turned": ("Phi3ForCausalLM", {"rope_parameters": PARTIAL}),
    "phi3 longrope": ("Phi3ForCausalLM", {"rope_parameters": LONG}),
    "phi3 longrope, short": (
        "Phi3ForCausalLM",
        {
            "max_position_embeddings": 80,
            "rope_parameters": {**LONG, "original_max_position_embeddings": 80},
        },
    ),
    "smollm3": ("SmolLM3ForCausalLM", {"num_hidden_layers": 4}),
    "smollm3 windows": (
        "SmolLM3ForCausalLM",
        {"no_rope_layers": [0, 1], "use_sliding_window": True, **WINDOW},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 24},
    ),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "sliding_window": 24}),
    "qwen2 moe": (
        "Qwen2MoeForCausalLM",
        {**EXPERTS, "shared_expert_intermediate_size": 80},
    ),
    "qwen2 moe without biases": (
        "Qwen2MoeForCausalLM",
        {**EXPERTS, "shared_expert_intermediate_size": 80, "qkv_bias": False},
    ),
    "qwen3 moe window": (
        "Qwen3MoeForCausalLM",
        {**EXPERTS, "use_sliding_window": True, **WINDOW},
    ),
    "qwen3 moe": (
        "Qwen3MoeForCausalLM",
        {
            **EXPERTS,
            "norm_topk_prob": True,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3 next odd sizes": (
        "Qwen3NextForCausalLM",
        {"linear_value_head_dim": 24, "linear_conv_kernel_dim": 3, "mlp_only_layers": [1]},
    ),
    "qwen3.5": ("Qwen3_5ForCausalLM", {"linear_num_value_heads": 4}),
    "qwen3.5 moe": ("Qwen3_5MoeForCausalLM", {"linear_value_head_dim": 32, "head_dim": 32}),
    "olmoe": ("OlmoeForCausalLM", FEW_EXPERTS),
    "seed-oss": ("SeedOssForCausalLM", {"attention_out_bias": True, "mlp_bias": True}),
    "ministral": ("MinistralForCausalLM", WINDOW_LAST),
    "ministral3": ("Ministral3ForCausalLM", WINDOW),
    "exaone4": ("Exaone4ForCausalLM", WINDOW_LAST),
    "exaone4 without windows": (
        "Exaone4ForCausalLM",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "olmo3": ("Olmo3ForCausalLM", {**WINDOW, "num_hidden_layers": 4}),
    "olmo3 yarn": (
        "Olmo3ForCausalLM",
        {
            **WINDOW_LAST,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": DEFAULT_ROPE},
        },
    ),
    "flex olmo": ("FlexOlmoForCausalLM", FEW_EXPERTS),
    "granite moe": (
        "GraniteMoeForCausalLM",
        {"num_local_experts": 5, "num_experts_per_tok": 3, "residual_multiplier": 0.22},
    ),
    "gemma3 of images": ("Gemma3ForConditionalGeneration", {**GEMMA, **WINDOW}),
    "gemma4 of images": (
        "Gemma4ForConditionalGeneration",
        {**WINDOW, "use_bidirectional_attention": "vision"},
    ),
    "gemma4 unified": (
        "Gemma4UnifiedForConditionalGeneration",
        {**WINDOW, "num_key_value_heads": 4, "num_global_key_value_heads": 2},
    ),
    "mistral of images": ("Mistral3ForConditionalGeneration", {"sliding_window": None}),
    "qwen3-vl": (
        "Qwen3VLForConditionalGeneration",
        {"rope_parameters": {**MROPE, "mrope_interleaved": True}},
    ),
    "qwen3-vl tied": ("Qwen3VLForConditionalGeneration", {"tie_word_embeddings": True}),
    "qwen3-vl moe": ("Qwen3VLMoeForConditionalGeneration", EXPERTS),
    "deepseek v2": ("DeepseekV2ForCausalLM", {"routed_scaling_factor": 1.5}),
    "deepseek v2 lite": ("DeepseekV2ForCausalLM", {"q_lora_rank": None, "n_shared_experts": 1}),
    "deepseek v2 in groups": (
        "DeepseekV2ForCausalLM",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek v2, rows of the published size": (
        "DeepseekV2ForCausalLM",
        {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128},
    ),
    "deepseek v3 yarn": (
        "DeepseekV3ForCausalLM",
        {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}},
    ),
    "deepseek v3 plain queries, shares not normed": (
        "DeepseekV3ForCausalLM",
        {"q_lora_rank": None, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
    ),
    # Norms within its attention do not have the model's epsilon.
    "glm4 moe lite": ("Glm4MoeLiteForCausalLM", {"rms_norm_eps": 0.1}),
    "glm4 moe without norms": (
        "Glm4MoeForCausalLM",
        {"use_qk_norm": False, "attention_bias": True},
    ),
    "ernie moe in some layers": (
        "Ernie4_5_MoeForCausalLM",
        {"num_hidden_layers": 4, "moe_layer_interval": 2, "moe_layer_end_index": 2},
    ),
    "minimax m2 partly turned": (
        "MiniMaxM2ForCausalLM",
        {"rope_parameters": {**PARTIAL, "partial_rotary_factor": 0.5}},
    ),
    "hunyuan of a stretched base": (
        "HunYuanDenseV1ForCausalLM",
        {"rope_parameters": {**DYNAMIC_ROPE, "alpha": 50.0, "factor": 1.0}},
    ),
    "hunyuan moe": ("HunYuanMoEV1ForCausalLM", {"attention_bias": True}),
    "dots1": ("Dots1ForCausalLM", {"max_window_layers": 1, **WINDOW}),
    "solar open": ("SolarOpenForCausalLM", {"attention_bias": True}),
    "exaone moe": ("ExaoneMoeForCausalLM", WINDOW),
    "granite": (
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 4.0,
        },
    ),
}
ABSENT = object()
SHORT_GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2}
PHI_LONG = {key: value for key, value in LONG.items() if key != "rope_theta"}
# What transformers reads in config.json and does not write itself: changes of what it wrote.
EDITED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2 moe windows": (
        "Qwen2MoeForCausalLM",
        {
            **EXPERTS,
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            **WINDOW,
            "max_window_layers": 2,
        },
        {"layer_types": ABSENT},
    ),
    # transformers takes it for a Ministral then.
    "mistral layer types": ("MistralForCausalLM", WINDOW, WINDOW_LAST),
    "mixtral layer types, which it does not read": (
        "MixtralForCausalLM",
        {"num_local_experts": 4, **WINDOW},
        {"layer_types": ["full_attention", "sliding_attention"]},
    ),
    "mixtral defaults": (
        "MixtralForCausalLM",
        {"num_local_experts": 4},
        {"rope_parameters": ABSENT, "rms_norm_eps": ABSENT},
    ),
    "gpt-oss without rope": (
        "GptOssForCausalLM",
        SHORT_GPT_OSS,
        {"rope_parameters": ABSENT, "rope_scaling": None},
    ),
    "rope_scaling added": (
        "Qwen3ForCausalLM",
        {},
        {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "original context of the model": (
        "LlamaForCausalLM",
        {},
        {"rope_parameters": YARN, "original_max_position_embeddings": 300},
    ),
    "minimax m2 as it is published": (
        "MiniMaxM2ForCausalLM",
        {},
        {"rope_parameters": ABSENT, "rope_theta": 5e6, "rotary_dim": 8},
    ),
    "hunyuan moe as it is published": (
        "HunYuanMoEV1ForCausalLM",
        {},
        {"routed_scaling_factor": False, "n_group": False, "topk_group": False},
    ),
    "phi3 original context": (
        "Phi3ForCausalLM",
        {},
        {
            "rope_parameters": ABSENT,
            "rope_scaling": PHI_LONG,
            "original_max_position_embeddings": ABSENT,
        },
    ),
}

# Of which 64 greedy tokens are compared, too.
GREEDY = (*ARCHITECTURES, *WRAPPERS)


class Kind(NamedTuple):
    """A kind of KV, and the model that stands for it where each kind is tested, not each model."""

    architecture: str
    options: dict[str, Any]


KINDS = {
    "all tokens": Kind("LlamaForCausalLM", {}),
    "windows": Kind("Gemma3ForCausalLM", {"sliding_window": 24, "num_hidden_layers": 6}),
    "chunks": Kind("Llama4ForCausalLM", {}),
    "latent": Kind("DeepseekV3ForCausalLM", {}),
    "states": Kind("Qwen3_5ForCausalLM", {}),
    # A rank's share of heads of either size is in one part of a block.
    "heads of two sizes": Kind(
        "Gemma4ForCausalLM",
        {
            "sliding_window": 24,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 2,
            "global_head_dim": 16,
            "attention_k_eq_v": True,
        },
    ),
}
# With LoRA adapters: each kind, and forms of projections and of their order.
ADAPTED: dict[str, dict[str, Any]] = {
    **{one.architecture: one.options for one in KINDS.values()},
    "Qwen2ForCausalLM": {},
    "Phi3ForCausalLM": {},
    "Glm4ForCausalLM": {},
    "Qwen3NextForCausalLM": {},
}
# With a layer that predicts further tokens.
PREDICTING = (
    *("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Qwen3_5ForCausalLM"),
    *("Glm4MoeLiteForCausalLM", "Qwen3NextForCausalLM"),
)
