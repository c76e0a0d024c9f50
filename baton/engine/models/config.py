"""What a model is: the Llama family's config.json, read once, checked, and made uniform.

Supported are LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM and Qwen3ForCausalLM, as
Hugging Face transformers writes them (before and since version 5). Whatever would change the
computation in a way that `baton.engine.models.decoder` does not follow is refused here, by name.
Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from baton.engine.weights.checkpoint import StoredTensor, fingerprint, read_json
from baton.errors import CheckpointError, quoted

__all__ = ["ModelConfig", "Rope", "fingerprint"]

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
MAX_SIZE = 1 << 24  # of anything counted; the largest in use are contexts and vocabularies
MAX_LAYERS = 1024
CHECKPOINT_DTYPES = ("bfloat16", "float32", "float16")
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

    @classmethod
    def load(cls, path: Path) -> ModelConfig:
        """Reads a model directory, or a bare config file (for random weights).

        Raises CheckpointError naming the file, the key, its value and what is supported.
        """
        fields = _Fields(path / "config.json" if path.is_dir() else path)
        architecture = _architecture(fields)
        _refuse_unsupported(fields)
        num_heads = fields.integer("num_attention_heads")
        hidden_size = fields.integer("hidden_size")
        default_head = 128 if architecture == "Qwen3ForCausalLM" else hidden_size // num_heads
        num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
        has_option = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
        attention_bias = has_option and fields.boolean("attention_bias")
        config = cls(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=fields.integer("num_key_value_heads", num_heads),
            head_size=fields.integer("head_dim", default_head),
            intermediate_size=fields.integer("intermediate_size"),
            rms_eps=fields.number("rms_norm_eps", 1e-6),
            rope=_rope(fields),
            windows=_windows(fields, architecture, num_layers),
            tie_embeddings=fields.boolean("tie_word_embeddings"),
            qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
            o_bias=attention_bias,
            mlp_bias=architecture == "LlamaForCausalLM" and fields.boolean("mlp_bias"),
            qk_norm=architecture == "Qwen3ForCausalLM",
            max_context=fields.integer("max_position_embeddings"),
            eos_token_ids=_eos_token_ids(fields),
            dtype=_dtype(fields),
        )
        if num_heads % config.num_kv_heads:
            supported = f"a divisor of {num_heads} heads"
            raise fields.error("num_key_value_heads", config.num_kv_heads, supported)
        if config.head_size % 2:
            raise fields.error("head_dim", config.head_size, "an even number")
        return config

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the checkpoint, and its shape; a tied `lm_head` has none."""
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, hidden)}
        for index in range(self.num_layers):
            for name, shape in self._layer_shapes.items():
                shapes[f"model.layers.{index}.{name}"] = shape
        shapes[FINAL_NORM] = (hidden,)
        if not self.tie_embeddings:
            shapes[LM_HEAD] = (self.vocab_size, hidden)
        return shapes

    @property
    def num_parameters(self) -> int:
        """Weights and biases; tied embeddings count once."""
        return sum(map(math.prod, self.tensor_shapes.values()))

    @property
    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, head, inner = self.hidden_size, self.head_size, self.intermediate_size
        q, kv = self.num_heads * head, self.num_kv_heads * head
        projections = (
            ("self_attn.q_proj", q, hidden, self.qkv_bias),
            ("self_attn.k_proj", kv, hidden, self.qkv_bias),
            ("self_attn.v_proj", kv, hidden, self.qkv_bias),
            ("self_attn.o_proj", hidden, q, self.o_bias),
            ("mlp.gate_proj", inner, hidden, self.mlp_bias),
            ("mlp.up_proj", inner, hidden, self.mlp_bias),
            ("mlp.down_proj", hidden, inner, self.mlp_bias),
        )
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        for name, rows, columns, biased in projections:
            shapes[f"{name}.weight"] = (rows, columns)
            if biased:
                shapes[f"{name}.bias"] = (rows,)
        if self.qk_norm:
            shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (head,)
        return shapes


class _Fields:
    """A config file's keys, read with checks; every error names file, key and value."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.values = read_json(file)

    def error(self, key: str, value: object, supported: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {key} is {quoted(value)}; supported: {supported}")

    def get(self, key: str) -> Any:
        """The value, or None where the key is absent or null, which mean the same."""
        return self.values.get(key)

    def integer(self, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self.error(key, value, f"a whole number from 1 to {most}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key)
        return self.checked_number(key, default if value is None else value)

    def checked_number(self, key: str, value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1e30:
            raise self.error(key, value, "a number above 0, up to 1e30")
        return float(value)

    def boolean(self, key: str) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return bool(value)


def _architecture(fields: _Fields) -> str:
    named = fields.get("architectures")
    first = named[0] if isinstance(named, list) and named else named
    if first not in ARCHITECTURES:
        raise fields.error("architectures", named, ", ".join(ARCHITECTURES))
    return str(first)


def _refuse_unsupported(fields: _Fields) -> None:
    """Refuses settings that change the computation and are followed nowhere."""
    allowed: tuple[tuple[str, tuple[object, ...], str], ...] = (
        ("hidden_act", (None, "silu", "swish"), "silu"),
        ("quantization_config", (None,), "unquantized weights"),
        ("pretraining_tp", (None, 1), "1"),
        ("partial_rotary_factor", (None, 1), "1 (all dimensions rotate)"),
    )
    for key, values, supported in allowed:
        if fields.get(key) not in values:
            raise fields.error(key, fields.get(key), supported)


def _rope(fields: _Fields) -> Rope:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    key = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    parameters = fields.get(key) or {}
    if not isinstance(parameters, dict):
        raise fields.error(key, parameters, "an object")
    theta = parameters.get("rope_theta", fields.number("rope_theta", 10000.0))
    theta = fields.checked_number(f"{key}.rope_theta", theta)
    if parameters.get("partial_rotary_factor") not in (None, 1):
        raise fields.error(f"{key}.partial_rotary_factor", parameters["partial_rotary_factor"], "1")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind not in ("linear", "llama3"):
        raise fields.error(f"{key}.rope_type", kind, "default, linear, llama3")

    def number(name: str) -> float:
        return fields.checked_number(f"{key}.{name}", parameters.get(name))

    if kind == "linear":
        return Rope(theta, "linear", number("factor"))
    # Where the original context is not given, transformers takes the current one.
    parameters.setdefault(
        "original_max_position_embeddings", fields.integer("max_position_embeddings")
    )
    return Rope(
        theta,
        "llama3",
        number("factor"),
        number("low_freq_factor"),
        number("high_freq_factor"),
        int(number("original_max_position_embeddings")),
    )


def _windows(fields: _Fields, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    if architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    if architecture == "MistralForCausalLM":
        absent = "sliding_window" not in fields.values
        # transformers reads an absent key as 4096, and null as no window.
        explicit = not absent and fields.get("sliding_window") is None
        return (None if explicit else fields.integer("sliding_window", 4096),) * num_layers
    window = None
    if fields.boolean("use_sliding_window"):
        window = fields.integer("sliding_window", 4096)
    return tuple(
        window if kind == SLIDING else None
        for kind in _layer_types(fields, num_layers, window is not None)
    )


def _layer_types(fields: _Fields, num_layers: int, windowed: bool) -> list[str]:
    """Each layer's attention; Qwen's rule without `layer_types`: from max_window_layers on."""
    kinds = fields.get("layer_types")
    if kinds is None:
        first = (
            0 if fields.get("max_window_layers") == 0 else fields.integer("max_window_layers", 28)
        )
        return [SLIDING if windowed and i >= first else FULL for i in range(num_layers)]
    known = (FULL, SLIDING) if windowed else (FULL,)
    is_list = isinstance(kinds, list) and len(kinds) == num_layers
    if not is_list or not all(kind in known for kind in kinds):
        supported = f"{num_layers} times {' or '.join(known)}"
        raise fields.error("layer_types", kinds, supported)
    return list(kinds)


def _eos_token_ids(fields: _Fields) -> tuple[int, ...]:
    """Tokens that end a text: those of generation_config.json, else those of config.json."""
    sources = [fields]
    generation = fields.file.with_name("generation_config.json")
    if fields.file.name == "config.json" and generation.is_file():
        sources.insert(0, _Fields(generation))
    for source in sources:
        value = source.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(token) is int and 0 <= token <= MAX_SIZE for token in ids):
            raise source.error("eos_token_id", value, "a token id or a list of them")
        return tuple(ids)
    return ()


def _dtype(fields: _Fields) -> str:
    key = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    value = "float32" if fields.get(key) is None else fields.get(key)
    if value not in CHECKPOINT_DTYPES:
        raise fields.error(key, value, ", ".join(CHECKPOINT_DTYPES))
    return str(value)


def check_tensors(path: Path, config: ModelConfig, stored: Mapping[str, StoredTensor]) -> None:
    """Raises CheckpointError unless what is `stored` in `path` is what the config describes."""
    shapes = config.tensor_shapes
    for name, shape in shapes.items():
        if name not in stored:
            raise CheckpointError(f"{path} lacks tensor {name}, which its config.json implies")
        if stored[name].shape != shape:
            raise CheckpointError(
                f"{stored[name].file}: tensor {name} has shape {list(stored[name].shape)}; "
                f"config.json implies {list(shape)}"
            )
    for name in sorted(stored.keys() - shapes.keys()):
        # Tables that old exports saved, and a copy of the embedding, carry nothing of their own.
        tied_copy = config.tie_embeddings and name == LM_HEAD
        if not tied_copy and not name.endswith("rotary_emb.inv_freq"):
            raise CheckpointError(
                f"{stored[name].file}: tensor {name} is not part of {config.architecture} as "
                "config.json describes it"
            )
