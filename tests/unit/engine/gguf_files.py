"""Small GGUF files for tests, written by llama.cpp's package `gguf` from transformers' models."""

import gguf
import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.unit.engine.checkpoints import make_model

NAMES = {
    "LlamaForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
}
# Transformers' names of what gguf's table of names does not have in one piece.
_STACKED = {
    "mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
    "mlp.experts.down_proj": ("ffn_down_exps",),
}
_CONTROL = 3


def write_gguf(file, architecture, kind="F32", types=None, metadata=None, tensors=None, split=0,
               has_empty_first=False, **overrides):  # fmt: skip
    """Writes `make_model`'s model as llama.cpp's converter does; returns the model.

    kind: of matrices whose inputs are whole blocks, others are F32 · types: other kinds, by a part
    of the tensor's name · metadata: further keys, or None for keys to leave out · tensors: further
    ones · split: tensors in each of several files · has_empty_first: a first one has none.
    """
    model = make_model(architecture, **overrides)
    tensors = {**dict(_tensors(model, NAMES[architecture])), **(tensors or {})}
    writer = gguf.GGUFWriter(
        file, NAMES[architecture], split_max_tensors=split, use_temp_file=False,
        small_first_shard=has_empty_first,
    )  # fmt: skip
    keys = {**_metadata(model.config, NAMES[architecture]), **byte_tokens(model.config.vocab_size)}
    for key, value in {**keys, **(metadata or {})}.items():
        if value is not None:
            _add(writer, key, value)
    for name, values in tensors.items():
        wanted = next((one for part, one in (types or {}).items() if part in name), kind)
        add_tensor(writer, name, values, wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def add_tensor(writer, name, values, kind):
    """Adds a tensor in a type, or in F32 where it has no whole blocks or is a vector."""
    wanted = gguf.GGMLQuantizationType[kind]
    block, _ = gguf.GGML_QUANT_SIZES[wanted]
    if values.ndim == 1 or values.shape[-1] % block or "ffn_gate_inp" in name:
        wanted = gguf.GGMLQuantizationType.F32
    writer.add_tensor(name, quantized(values, wanted), raw_dtype=wanted)


def quantized(values, kind):
    """float32 `[..., n]` → the bytes of a type; of K types, random blocks of the values' size."""
    return random_blocks(values, kind) if "_K" in kind.name else gguf.quantize(values, kind)


def random_blocks(values, kind):
    """Blocks of a K type, which the package does not make: random numbers in all fields."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    shape = (*values.shape[:-1], values.shape[-1] // elements, size)
    blocks = np.random.default_rng(int(values.size)).integers(0, 256, shape, dtype=np.uint8)
    # So that weights are of the usual size: scales are up to 63 or 127, and numbers up to 63.
    unit = {"Q4_K": 3e-4, "Q5_K": 1.5e-4}.get(kind.name, 8e-5)
    places = {"Q4_K": (0, 2), "Q5_K": (0, 2)}.get(kind.name, (size - 2,))
    for place, times in zip(places, (1, 8), strict=False):
        halves = np.full((*shape[:-1], 1), unit * times, dtype=np.float16)
        blocks[..., place : place + 2] = halves.view(np.uint8)
    return blocks.reshape(*shape[:-2], -1)


def byte_tokens(vocab_size):
    """A byte-level vocabulary: <s>, </s>, the bytes, and further words that no text has."""
    tokens = ["<s>", "</s>", *bytes_to_unicode().values()]
    tokens += [f"w{number}" for number in range(vocab_size - len(tokens))]
    kinds = [_CONTROL] * 2 + [1] * (vocab_size - 2)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


def llama3_factors(rope, head_size):
    """The divisors of frequencies that llama.cpp's converter computes for Llama 3."""
    frequencies = rope["rope_theta"] ** (-np.arange(0, head_size, 2) / head_size)
    wavelengths, original = 2 * np.pi / frequencies, rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    share = (original / wavelengths - low) / (high - low)
    between = 1 / ((1 - share) / rope["factor"] + share)
    factors = np.where(wavelengths > original / low, rope["factor"], between)
    return np.where(wavelengths < original / high, 1, factors).astype(np.float32)


def _add(writer, key, value):
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value:
        writer.add_array(key, value)


def _metadata(config, name):
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    found = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": config.head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": config.head_dim,
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
    }
    if name.startswith("gemma"):
        found["attention.sliding_window"] = config.sliding_window
    if experts := getattr(config, "num_local_experts", getattr(config, "num_experts", None)):
        found |= {"expert_count": experts, "expert_used_count": config.num_experts_per_tok}
        found["expert_feed_forward_length"] = getattr(config, "moe_intermediate_size", None)
        size = getattr(config, "shared_expert_intermediate_size", None)
        found["expert_shared_feed_forward_length"] = size
    return {f"{name}.{key}": value for key, value in found.items()}


def _tensors(model, name):
    """The tensors, by GGUF's names, in the order and form of GGUF files."""
    config = model.config
    arch = next(key for key, one in gguf.MODEL_ARCH_NAMES.items() if one == name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values, stacked = tensor.float().numpy(), key.split(".", 3)[-1]
        if stacked in _STACKED:
            parts = _STACKED[stacked]
            for part, part_values in zip(parts, np.split(values, len(parts), 1), strict=True):
                yield f"blk.{key.split('.')[2]}.{part}.weight", part_values
            continue
        if name == "llama" and key.endswith(("q_proj.weight", "k_proj.weight")):
            values = _paired(values, config.head_dim)
        if name == "llama" and key.endswith(("q_proj.bias", "k_proj.bias")):
            values = _paired(values[:, None], config.head_dim)[:, 0]
        if name.startswith("gemma") and key.endswith("norm.weight"):
            values = values + 1
        module, _, end = key.rpartition(".")
        found = names.get_name(module)
        assert found is not None, key
        yield f"{found}.{end}", np.ascontiguousarray(values)


def _paired(values, head_size):
    """Rows of q or k with rotated pairs as neighbours."""
    heads = values.reshape(-1, 2, head_size // 2, values.shape[-1])
    return heads.swapaxes(1, 2).reshape(values.shape)
