"""Small random Hugging Face checkpoints for tests, written by transformers itself."""

import json
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from tests.unit.engine.model_cases import MROPE

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "attention_multiplier": 0.25,  # Granite's; other models do not read it
}

VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "head_dim": 16,
    "embed_dim": 32,
    "image_size": 28,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
}
# Of models with linear attention, beside SMALL.
SMALL_DELTA_RULE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
}
_ROUTED: dict[str, Any] = {
    "moe_intermediate_size": 48,
    "num_experts_per_tok": 3,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
}
_GEMMA4: dict[str, Any] = {
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 320,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
_LLAMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "intermediate_size_mlp": 80,
    "interleave_moe_layer_step": 2,
    "num_local_experts": 4,
    "attention_chunk_size": 24,
    "floor_scale": 16,
}
# Of architectures whose own defaults are too large for a test.
SIZES: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {**_LATENT, **_ROUTED},
    "DeepseekV3ForCausalLM": {**_LATENT, **_ROUTED, "n_group": 4, "topk_group": 2},
    "Glm4MoeLiteForCausalLM": {**_LATENT, **_ROUTED},
    "Glm4MoeForCausalLM": {**_ROUTED, "use_qk_norm": True},
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": _GEMMA4,
    "Gemma4UnifiedForConditionalGeneration": {"global_head_dim": 32, "attention_k_eq_v": True},
    "Llama4ForCausalLM": _LLAMA4,
    "Llama4ForConditionalGeneration": _LLAMA4,
    "HunYuanMoEV1ForCausalLM": {"num_experts": 5, "moe_topk": 3},
    "HYV3ForCausalLM": {
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 3,
    },
    "Dots1ForCausalLM": {**_ROUTED, "n_shared_experts": 1, "num_hidden_layers": 3},
    "SolarOpenForCausalLM": _ROUTED,
    "ExaoneMoeForCausalLM": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "n_group": 4,
        "topk_group": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Ernie4_5_MoeForCausalLM": {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 48},
    "MiniMaxM2ForCausalLM": {"num_local_experts": 6, "num_experts_per_tok": 3},
}


def make_model(architecture, seed=0, dtype=torch.float32, **overrides):
    """A small transformers model with seeded weights; overrides are config keys.

    Those of a multimodal model are of its text part.
    """
    model_class = getattr(transformers, architecture)
    sizes = SMALL_DELTA_RULE if architecture.startswith(("Qwen3Next", "Qwen3_5")) else {}
    values = {**SMALL, **sizes, **SIZES.get(architecture, {}), **overrides}
    config_class = model_class.config_class
    if "text_config" in config_class.sub_configs:
        if "Qwen" in architecture:
            values = {"rope_parameters": dict(MROPE), **values}  # which transformers changes
        tied = values.pop("tie_word_embeddings", False)
        values = {"text_config": values, "vision_config": VISION, "tie_word_embeddings": tied}
    model = model_class(config_class(**values))
    if dtype != torch.float32:  # Llama 4's images have complex numbers
        model = model.to(dtype)
    generator = torch.Generator().manual_seed(seed)
    drawn_too = ("correction_bias", "layer_scalar")
    buffers = [one for one in model.named_buffers() if one[0].endswith(drawn_too)]
    for name, parameter in [*model.named_parameters(), *buffers]:
        # Norms and biases too, so that a test sees when one is left out.
        drawn = torch.randn(parameter.shape, generator=generator)
        if name.endswith(("norm.weight", "norm_1.weight", "norm_2.weight", "layer_scalar")):
            # transformers starts those that are stored less 1 at 0.
            drawn = parameter.data.mean().round() + 0.2 * drawn
        elif name.endswith("gate_up_proj_bias"):  # gpt-oss limits what it makes of them
            drawn = 6 * drawn
        elif name.endswith("sinks"):
            pass
        elif name.endswith("bias"):
            drawn = 0.3 * drawn
        elif "embed" not in name:
            drawn = drawn / parameter.shape[-1] ** 0.5
        parameter.data.copy_(drawn)
    return model


def make_checkpoint(
    directory,
    architecture="LlamaForCausalLM",
    *,
    seed=0,
    dtype=torch.float32,
    tokenizer=False,
    max_shard_size="1GB",
    **overrides,
):
    """Saves `make_model`'s model in `directory`; the transformers model as loaded from there.

    `tokenizer` adds a byte-level tokenizer.json: <s>, </s>, then one token for each byte.
    """
    model = make_model(architecture, seed, dtype, **overrides)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    if tokenizer:
        byte_tokenizer().save(str(directory / "tokenizer.json"))
    return load_reference(directory, dtype)


def load_reference(directory, dtype=torch.float32):
    """The checkpoint as transformers loads and runs it, eager attention, in eval mode."""
    (architecture,) = transformers.AutoConfig.from_pretrained(directory).architectures
    named = architecture.endswith(("ForConditionalGeneration", "ForSequenceClassification"))
    model_class = getattr(transformers, architecture) if named else AutoModelForCausalLM
    return model_class.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()


@torch.inference_mode()
def assert_greedy(reference, tokens, prompt_tokens, bias=()):
    """transformers, given the same text, has each token behind the prompt as the likeliest."""
    logits = reference(torch.tensor([tokens])).logits[0].float()
    for token, added in dict(bias).items():
        logits[:, token] += added
    assert tokens[prompt_tokens:] == logits[prompt_tokens - 1 : -1].argmax(-1).tolist()


def byte_tokenizer():
    """Token 0 is <s>, 1 is </s>, and 2..257 are the bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1} | {symbol: i for i, symbol in enumerate(alphabet, start=2)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def add_predicting_layer(directory, seed=5, mixed=None):
    """Adds a layer for multi-token prediction to a checkpoint, whose config names one or which has
    linear attention.

    It is random, or with `mixed` often right: attention and MLPs of all layers are scaled by it, so
    that a token follows mostly from the one before, in the model and in the layer.
    """
    config = json.loads((directory / "config.json").read_text())
    last, own = (f"model.layers.{config['num_hidden_layers'] - at}." for at in (1, 0))
    tensors, size = load_file(file := directory / "model.safetensors"), config["hidden_size"]
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(shape, generator=generator)

    if mixed is not None:
        outputs = ".o_proj.", ".down_proj.", ".linear_attn.out_proj."
        for name in (name for name in tensors if any(one in name for one in outputs)):
            tensors[name] *= mixed
        tensors["lm_head.weight"] *= 4  # so that sampled tokens are often the likeliest
    for name in [name for name in tensors if name.startswith(last)]:
        tensor = tensors[name]
        changed = tensor * (1 + 0.2 * noise(*tensor.shape))
        tensors[name.replace(last, own)] = changed.to(tensor.dtype)
    begin = {"eh_proj": noise(size, 2 * size) / (2 * size) ** 0.5}
    begin |= {name: 1 + 0.2 * noise(size) for name in ("enorm", "hnorm", "shared_head.norm")}
    if mixed is not None:
        begin = {"eh_proj": torch.eye(size, 2 * size), "enorm": torch.ones(size)} | {
            "hnorm": begin["hnorm"], "shared_head.norm": tensors["model.norm.weight"].clone()
        }  # fmt: skip
    tensors |= {f"{own}{name}.weight": tensor for name, tensor in begin.items()}
    if config["model_type"].startswith("qwen3_"):
        tensors = {_qwen_name(name, own): tensor for name, tensor in tensors.items()}
    else:
        copies = ("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")
        for name, copied in copies:
            tensors[f"{own}{name}.weight"] = tensors[f"{copied}.weight"].clone()
    save_file(tensors, file, {"format": "pt"})


def _qwen_name(name, own):
    """As Qwen3-Next and Qwen3.5 name the tensors of that layer."""
    if not name.startswith(own):
        return name
    others = {
        "eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden",
        "shared_head.norm": "norm",
    }  # fmt: skip
    module = name.removeprefix(own).removesuffix(".weight")
    return f"mtp.{others.get(module, f'layers.0.{module}')}.weight"
