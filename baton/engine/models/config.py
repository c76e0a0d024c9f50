"""What a model is: the Llama family's config.json, read once, checked, and made uniform.

Supported are LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM and Qwen3ForCausalLM, as
Hugging Face transformers writes them (before and since version 5). Whatever would change the
computation in a way that `baton.engine.models.decoder` does not follow is refused here, by name.
Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from baton.engine.models.fields import (
    BOOLEAN,
    COUNT,
    MAX_SIZE,
    NUMBER,
    Fields,
    one_of,
    whole,
)
from baton.engine.models.quantization import QuantizationConfig, Shapes, Stored
from baton.engine.weights.checkpoint import StoredTensor, read_json
from baton.errors import CheckpointError

LLAMA, MISTRAL, QWEN2, QWEN3 = ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
MAX_LAYERS = 1024
EMBEDDING, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding. What follows `factor` is for llama3 scaling only."""

    theta: float
    scaling: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer; sizes count elements, contexts and windows count tokens.

    `windows` has, for each layer, how many tokens a token sees, itself included, or None for all.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    rms_eps: float
    rope: Rope
    windows: tuple[int | None, ...]
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    max_context: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    quantization: QuantizationConfig | None = None

    @classmethod
    def load(cls, path: Path) -> ModelConfig:
        """Reads a model directory, or a bare config file (for random weights).

        Raises CheckpointError naming the file, the key, its value and what is supported.
        """
        file = path / "config.json" if path.is_dir() else path
        fields = Fields(file, read_json(file))
        named = fields.values.get("architectures")
        architecture = named[0] if isinstance(named, list) and named else named
        if architecture not in ARCHITECTURES:
            raise fields.error("architectures", named, ", ".join(ARCHITECTURES))
        # What would change the computation and is followed nowhere.
        fields.read("hidden_act", one_of("silu", "swish"), "silu")
        fields.read("pretraining_tp", one_of(1), 1)
        fields.read("partial_rotary_factor", one_of(1), 1)
        num_heads = fields.read("num_attention_heads", COUNT)
        hidden_size = fields.read("hidden_size", COUNT)
        num_kv_heads = fields.read("num_key_value_heads", COUNT, num_heads)
        head_size = fields.read(
            "head_dim", COUNT, 128 if architecture == QWEN3 else hidden_size // num_heads
        )
        if num_heads % num_kv_heads:
            supported = f"a divisor of {num_heads} heads"
            raise fields.error("num_key_value_heads", num_kv_heads, supported)
        if head_size % 2:
            raise fields.error("head_dim", head_size, "an even number")
        num_layers = fields.read("num_hidden_layers", whole(1, MAX_LAYERS))
        attention_bias = fields.read("attention_bias", BOOLEAN, False)
        attention_bias &= architecture in (LLAMA, QWEN3)
        dtype_key = "torch_dtype" if fields.values.get("dtype") is None else "dtype"
        return cls(
            architecture=architecture,
            vocab_size=fields.read("vocab_size", COUNT),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            intermediate_size=fields.read("intermediate_size", COUNT),
            rms_eps=float(fields.read("rms_norm_eps", NUMBER, 1e-6)),
            rope=_rope(fields),
            windows=_windows(fields, architecture, num_layers),
            tie_embeddings=fields.read("tie_word_embeddings", BOOLEAN, False),
            qkv_bias=architecture == QWEN2 or attention_bias,
            o_bias=attention_bias,
            mlp_bias=architecture == LLAMA and fields.read("mlp_bias", BOOLEAN, False),
            qk_norm=architecture == QWEN3,
            max_context=fields.read("max_position_embeddings", COUNT),
            eos_token_ids=_eos_token_ids(fields),
            dtype=fields.read(dtype_key, one_of("bfloat16", "float32", "float16"), "float32"),
            quantization=QuantizationConfig.parse(fields),
        )

    def layer_tensors(self, index: int) -> dict[str, Shapes]:
        """Of a layer: what each field of its `LayerWeights` is joined of; none that is absent."""
        hidden, head, inner = self.hidden_size, self.head_size, self.intermediate_size
        q, kv = self.num_heads * head, self.num_kv_heads * head
        layer, attention = f"model.layers.{index}", f"model.layers.{index}.self_attn"
        tensors: dict[str, Shapes] = {
            "input_norm": {f"{layer}.input_layernorm.weight": (hidden,)},
            "post_norm": {f"{layer}.post_attention_layernorm.weight": (hidden,)},
        }
        if self.qk_norm:
            tensors["q_norm"] = {f"{attention}.q_norm.weight": (head,)}
            tensors["k_norm"] = {f"{attention}.k_norm.weight": (head,)}
        for field, outputs, inputs, biased in (
            (
                "qkv",
                {"self_attn.q": q, "self_attn.k": kv, "self_attn.v": kv},
                hidden,
                self.qkv_bias,
            ),
            ("o", {"self_attn.o": hidden}, q, self.o_bias),
            ("gate_up", {"mlp.gate": inner, "mlp.up": inner}, hidden, self.mlp_bias),
            ("down", {"mlp.down": hidden}, inner, self.mlp_bias),
        ):
            parts = {f"{layer}.{name}_proj": size for name, size in outputs.items()}
            tensors[field] = {f"{name}.weight": (size, inputs) for name, size in parts.items()}
            if biased:
                tensors[f"{field}_bias"] = {f"{name}.bias": (size,) for name, size in parts.items()}
        return tensors

    def _parts(self) -> Iterator[Shapes]:
        """Every tensor; those that are joined to one together. A tied `lm_head` is none."""
        yield {EMBEDDING: (self.vocab_size, self.hidden_size)}
        for index in range(self.num_layers):
            yield from self.layer_tensors(index).values()
        yield {FINAL_NORM: (self.hidden_size,)}
        if not self.tie_embeddings:
            yield {LM_HEAD: (self.vocab_size, self.hidden_size)}

    @property
    def checkpoint_tensors(self) -> dict[str, Stored]:
        """What a checkpoint has to hold. Raises CheckpointError for what its format cannot."""
        found: dict[str, Stored] = {}
        for parts in self._parts():
            for name, shape in parts.items():
                if self.is_quantized(parts):
                    assert self.quantization is not None
                    found |= self.quantization.tensors(name.removesuffix(".weight"), shape)
                else:
                    found[name] = Stored(shape)
        return found

    def is_quantized(self, parts: Shapes) -> bool:
        """Whether the checkpoint holds this matrix quantised. Raises CheckpointError if in part."""
        if self.quantization is None or EMBEDDING in parts:
            return False
        modules = [name.removesuffix(".weight") for name, shape in parts.items() if len(shape) == 2]
        found = {module: self.quantization.holds(module) for module in modules}
        if len(set(found.values())) > 1:
            raise CheckpointError(
                f"quantization_config ignores some of {', '.join(found)}: they are multiplied "
                "together, and have to be quantised all or none"
            )
        return any(found.values())

    @property
    def num_parameters(self) -> int:
        """Weights and biases; tied embeddings count once."""
        return sum(math.prod(shape) for parts in self._parts() for shape in parts.values())


def _rope(fields: Fields) -> Rope:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    key = "rope_parameters" if fields.values.get("rope_parameters") else "rope_scaling"
    inside = fields.inside(key)
    inside.read("partial_rotary_factor", one_of(1), 1)
    theta = float(inside.read("rope_theta", NUMBER, fields.read("rope_theta", NUMBER, 10000.0)))
    old_name = inside.values.get("type", "default")
    kind = inside.read("rope_type", one_of("default", "linear", "llama3"), old_name)
    if kind == "default":
        return Rope(theta)
    factor = float(inside.read("factor", NUMBER))
    if kind == "linear":
        return Rope(theta, "linear", factor)
    low, high = (float(inside.read(f"{end}_freq_factor", NUMBER)) for end in ("low", "high"))
    # Where the original context is not given, transformers takes the current one.
    current = fields.read("max_position_embeddings", COUNT)
    original = inside.read("original_max_position_embeddings", NUMBER, current)
    return Rope(theta, "llama3", factor, low, high, int(original))


def _windows(fields: Fields, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """Of each layer."""
    if architecture == LLAMA:
        return (None,) * num_layers
    if architecture == MISTRAL:
        # transformers reads an absent key as 4096, and null as no window.
        if fields.values.get("sliding_window", 4096) is None:
            return (None,) * num_layers
        return (fields.read("sliding_window", COUNT, 4096),) * num_layers
    window = None
    if fields.read("use_sliding_window", BOOLEAN, False):
        window = fields.read("sliding_window", COUNT, 4096)
    kinds = fields.values.get("layer_types")
    if kinds is None:  # then they slide from max_window_layers on
        first = fields.read("max_window_layers", whole(0, MAX_SIZE), 28)
        return tuple(window if index >= first else None for index in range(num_layers))
    known = (FULL, SLIDING) if window else (FULL,)
    is_list = isinstance(kinds, list) and len(kinds) == num_layers
    if not is_list or not all(kind in known for kind in kinds):
        raise fields.error("layer_types", kinds, f"{num_layers} times {' or '.join(known)}")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _eos_token_ids(fields: Fields) -> tuple[int, ...]:
    """Tokens that end a text: those of generation_config.json, else those of config.json."""
    sources = [fields]
    generation = fields.file.with_name("generation_config.json")
    if fields.file.name == "config.json" and generation.is_file():
        sources.insert(0, Fields(generation, read_json(generation)))
    for source in sources:
        value = source.values.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(token) is int and 0 <= token <= MAX_SIZE for token in ids):
            raise source.error("eos_token_id", value, "a token id or a list of them")
        return tuple(ids)
    return ()


def check_tensors(path: Path, config: ModelConfig, stored: Mapping[str, StoredTensor]) -> None:
    """Raises CheckpointError unless what is `stored` in `path` is what the config describes."""
    expected = config.checkpoint_tensors
    for name, (shape, dtypes, optional) in expected.items():
        if name not in stored:
            if optional:
                continue
            raise CheckpointError(f"{path} lacks tensor {name}, which its config.json implies")
        found = stored[name]
        if found.dtype not in dtypes:
            raise CheckpointError(
                f"{found.file}: tensor {name} has dtype {found.dtype}; supported: "
                f"{', '.join(dtypes)}"
            )
        if found.shape != shape:
            raise CheckpointError(
                f"{found.file}: tensor {name} has shape {list(found.shape)}; config.json implies "
                f"{list(shape)}"
            )
    for name in sorted(stored.keys() - expected.keys()):
        # Tables that old exports saved, and a copy of the embedding, carry nothing of their own.
        tied_copy = config.tie_embeddings and name == LM_HEAD
        if not tied_copy and not name.endswith("rotary_emb.inv_freq"):
            raise CheckpointError(
                f"{stored[name].file}: tensor {name} is not part of {config.architecture} as "
                "config.json describes it"
            )
