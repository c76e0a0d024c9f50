"""A GGUF file as a model directory of transformers: config.json's keys, and tensors by its names.

Values that the file leaves to llama.cpp are those of its graphs (`src/models/` there). Torch-free.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.checkpoint_files import open_regular
from baton.errors import CheckpointError
from baton.gguf.reader import TYPES, GgufFile, GgufTensor
from baton.gguf.tokenizer import eos_token_ids

_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_EXPERTS = re.compile(r"ffn_(gate|up|down)_exps")
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

# Names of modules: of the model, and of a layer.
_MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in ("q", "k", "v", "qkv")},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    **{f"ffn_{name}_shexp": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_GEMMA_MODULES = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class GgufArchitecture:
    """What differs for an architecture of GGUF files.

    name: transformers' · modules: names of a layer's modules that differ · experts: pattern of an
    expert's module, of a number and gate, up or down · pairs: whether the rows of q and k have
    rotated pairs as neighbours · config: further keys of config.json.
    """

    name: str
    modules: Mapping[str, str] = field(default_factory=dict)
    experts: str = "mlp.experts.{}.{}_proj"
    pairs: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)


ARCHITECTURES = {
    "llama": GgufArchitecture("LlamaForCausalLM", pairs=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM"),
    "qwen2moe": GgufArchitecture("Qwen2MoeForCausalLM"),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM"),
    "qwen3moe": GgufArchitecture("Qwen3MoeForCausalLM", config={"norm_topk_prob": True}),
    "gemma2": GgufArchitecture("Gemma2ForCausalLM", _GEMMA_MODULES),
    "gemma3": GgufArchitecture("Gemma3ForCausalLM", _GEMMA_MODULES),
    "phi3": GgufArchitecture("Phi3ForCausalLM", {"ffn_up": "mlp.gate_up_proj"}),
}
_MIXTRAL = GgufArchitecture(  # it has llama's name
    "MixtralForCausalLM",
    {"ffn_gate_inp": "block_sparse_moe.gate"},
    "block_sparse_moe.experts.{}.{}",
    pairs=True,
    config={"sliding_window": None},
)
_MIXTRAL_PARTS = {"gate": "w1", "up": "w3", "down": "w2"}

# By key of config.json, after the architecture's name; absent ones have config.json's defaults.
_KEYS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "rope_local_base_freq": "rope.freq_base_swa",
}
# Of yarn: keys of config.json by those behind `rope.scaling.`, as llama.cpp's converter has them;
# and values of others that change nothing.
_YARN_KEYS = {
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_YARN_ONLY = {"attn_factor": 1, "yarn_ext_factor": 1, "yarn_log_multiplier": 0}
# Layers of the models whose scores are scaled by the hidden size for each head, not by the head's.
_SCALED_BY_HIDDEN = {"gemma2": 46, "gemma3": 62}


def gguf_architecture(file: GgufFile) -> GgufArchitecture:
    """The entry of the file's architecture. Raises CheckpointError for one that is not known."""
    name = file.architecture
    if name not in ARCHITECTURES:
        raise file.error("general.architecture", ", ".join(ARCHITECTURES))
    if name == "llama" and file.metadata.get("llama.expert_count"):
        return _MIXTRAL
    return ARCHITECTURES[name]


def config_values(file: GgufFile) -> dict[str, Any]:
    """The keys of config.json. Raises CheckpointError naming a key or a tensor."""
    arch, prefix = gguf_architecture(file), file.architecture

    def value(end: str) -> Any:
        return file.metadata.get(f"{prefix}.{end}")

    found = {key: value(end) for key, end in _KEYS.items() if value(end) is not None}
    if found.get("sliding_window") == 0:  # so the converter says that there is none
        found["sliding_window"] = None
    if "head_dim" not in found and value("rope.dimension_count") and prefix != "phi3":
        found["head_dim"] = value("rope.dimension_count")
    for key in list(_KEYS.values())[:5]:
        file.number(f"{prefix}.{key}")
    if prefix == "phi3" and (rotated := value("rope.dimension_count")):
        heads = file.number("phi3.attention.head_count")
        found["partial_rotary_factor"] = rotated * heads / file.number("phi3.embedding_length")
    if (layers := _SCALED_BY_HIDDEN.get(prefix)) is not None:
        scaled = found.get("num_hidden_layers") == layers
        heads = file.number(f"{prefix}.attention.head_count")
        size = file.number(f"{prefix}.embedding_length") // max(heads, 1)
        found["query_pre_attn_scalar"] = size if scaled else found.get("head_dim", size)
    if prefix == "qwen2moe" and "shared_expert_intermediate_size" not in found:
        gate = file.tensor("blk.0.ffn_gate_shexp.weight")
        found["shared_expert_intermediate_size"] = gate.shape[0]
    if prefix.startswith("qwen"):
        found["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    elif "blk.0.attn_output.bias" in file.tensors:
        found["attention_bias"] = True
    kinds = {tensor.type for tensor in file.tensors.values() if len(tensor.shape) > 1}
    modules = sorted(
        name.removesuffix(".weight")
        for name, tensor in named_tensors(file).items()
        if TYPES[tensor.type].elements > 1
    )
    return {
        **arch.config,
        **found,
        **_rope(file, found),
        "architectures": [arch.name],
        "vocab_size": file.vocab_size,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": sorted(eos_token_ids(file)) or None,
        "torch_dtype": "float32" if kinds == {"F32"} else "bfloat16",
        "rope_interleave": arch.pairs,
        "norm_plus_one": False,
        "quantization_config": {"quant_method": "gguf", "modules": modules} if modules else None,
    }


def _rope(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """What config.json says of longer contexts."""
    prefix = f"{file.architecture}.rope.scaling"
    kind = file.metadata.get(f"{prefix}.type", "none")
    original = file.metadata.get(f"{prefix}.original_context_length")
    context = config.get("max_position_embeddings")
    frequencies, long, short = (_numbers(file, name) for name in _ROPE_TENSORS)
    scaling: dict[str, Any] = {"rope_type": kind}
    if frequencies or long or short:
        # Divisors of the frequencies. Llama 3's were computed when the file was made.
        scaling = {
            "rope_type": "longrope",
            "factor": 1.0,
            "long_factor": frequencies or long,
            "short_factor": frequencies or short,
            "attention_factor": file.metadata.get(f"{prefix}.attn_factor", 1.0),
        }
        original = original or context
    elif kind == "none":
        return {}
    else:
        scaling["factor"] = file.metadata.get(f"{prefix}.factor")
    if scaling["rope_type"] == "yarn":
        for key, only in _YARN_ONLY.items():
            if file.metadata.get(f"{prefix}.{key}", only) != only:
                raise file.error(f"{prefix}.{key}", str(only))
        scaling |= {key: file.metadata.get(f"{prefix}.{end}") for end, key in _YARN_KEYS.items()}
    if original is None:
        return {"rope_scaling": scaling}
    scaling["original_max_position_embeddings"] = original
    return {"rope_scaling": scaling, "original_max_position_embeddings": original}


def _numbers(file: GgufFile, name: str) -> list[float]:
    """The elements of a small tensor of float32; none where it is absent."""
    if (tensor := file.tensors.get(name)) is None:
        return []
    if tensor.type != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > 1024:
        raise CheckpointError(f"{tensor.file}: tensor {name} is no vector of up to 1024 F32")
    with open_regular(tensor.file) as stream:
        stream.seek(tensor.offset)
        return list(struct.unpack(f"<{tensor.shape[0]}f", stream.read(tensor.num_bytes)))


def named_tensors(file: GgufFile) -> dict[str, GgufTensor]:
    """All tensors by transformers' names, with a tensor for each expert.

    A name that is not known stays as it is.
    """
    arch = gguf_architecture(file)
    found: dict[str, GgufTensor] = {}
    for name, tensor in file.tensors.items():
        if name not in _ROPE_TENSORS:
            found.update(_renamed(arch, name, tensor))
    return found


def _renamed(
    arch: GgufArchitecture, name: str, tensor: GgufTensor
) -> Iterator[tuple[str, GgufTensor]]:
    module, _, kind = name.rpartition(".")
    if module in _MODULES:
        yield f"{_MODULES[module]}.{kind}", tensor
        return
    parts = _LAYER.fullmatch(name)
    if parts is None:
        yield name, tensor
        return
    layer, inner, kind = parts.groups()
    prefix = f"model.layers.{layer}"
    if (experts := _EXPERTS.fullmatch(inner)) and len(tensor.shape) == 3:
        part = _MIXTRAL_PARTS[experts[1]] if arch is _MIXTRAL else experts[1]
        size = tensor.num_bytes // tensor.shape[0]
        for number in range(tensor.shape[0]):
            place = tensor._replace(shape=tensor.shape[1:], offset=tensor.offset + number * size)
            yield f"{prefix}.{arch.experts.format(number, part)}.{kind}", place
        return
    named = arch.modules.get(inner) or _LAYER_MODULES.get(inner)
    if inner == "ffn_gate_inp_shexp" and len(tensor.shape) == 1:
        tensor = tensor._replace(shape=(1, *tensor.shape))
    yield (f"{prefix}.{named}.{kind}" if named else name), tensor
