"""What a model is: the Llama family's config.json, read once, checked, and made uniform.

Supported are LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM and Qwen3ForCausalLM, as
Hugging Face transformers writes them (before and since version 5). Whatever would change the
computation in a way that `baton.engine.models.decoder` does not follow is refused here, by name.
Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
        num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
        has_option = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
        attention_bias = has_option and fields.boolean("attention_bias")
        config = cls(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=fields.integer("num_key_value_heads", _default_kv_heads(fields)),
            head_size=fields.integer("head_dim", _default_head_size(fields)),
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
        _check_heads(fields, config)
        return config

    @property
    def num_parameters(self) -> int:
        """Weights and biases; tied embeddings count once."""
        q_size, kv_size = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        attention = self.hidden_size * (2 * q_size + 2 * kv_size)
        attention += self.qkv_bias * (q_size + 2 * kv_size) + self.o_bias * self.hidden_size
        mlp = 3 * self.hidden_size * self.intermediate_size
        mlp += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        norms = 2 * self.hidden_size + self.qk_norm * 2 * self.head_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * (attention + mlp + norms) + self.hidden_size + embeddings


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


def _default_kv_heads(fields: _Fields) -> int:
    return fields.integer("num_attention_heads")


def _default_head_size(fields: _Fields) -> int:
    if _architecture(fields) == "Qwen3ForCausalLM":
        return 128
    return fields.integer("hidden_size") // fields.integer("num_attention_heads")


def _check_heads(fields: _Fields, config: ModelConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise fields.error(
            "num_key_value_heads", config.num_kv_heads, f"a divisor of {config.num_heads} heads"
        )
    if config.head_size % 2:
        raise fields.error("head_dim", config.head_size, "an even number")


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
    value = fields.get(key)
    if value is None:
        return "float32"
    if value not in CHECKPOINT_DTYPES:
        raise fields.error(key, value, ", ".join(CHECKPOINT_DTYPES))
    return str(value)


@dataclass(frozen=True)
class Part:
    """One tensor of the checkpoint, and the shape that the config gives it."""

    name: str
    shape: tuple[int, ...]


def embedding(config: ModelConfig) -> Part:
    """A row for each token."""
    return Part("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))


def final_norm(config: ModelConfig) -> Part:
    """Behind the last layer."""
    return Part("model.norm.weight", (config.hidden_size,))


def lm_head(config: ModelConfig) -> Part:
    """Absent where embeddings are tied."""
    return Part("lm_head.weight", (config.vocab_size, config.hidden_size))


def layer_parts(config: ModelConfig, index: int) -> dict[str, Part]:
    """A layer's tensors in the checkpoint, by their name within the layer."""
    hidden, head = config.hidden_size, config.head_size
    q, kv, inner = config.num_heads * head, config.num_kv_heads * head, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    projections = (
        ("self_attn.q_proj", q, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q, config.o_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    for name, rows, columns, biased in projections:
        shapes[f"{name}.weight"] = (rows, columns)
        if biased:
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (head,)
    prefix = f"model.layers.{index}."
    return {name: Part(prefix + name, shape) for name, shape in shapes.items()}


def expected(config: ModelConfig) -> Iterator[Part]:
    """Every tensor that the checkpoint must have."""
    yield embedding(config)
    yield final_norm(config)
    if not config.tie_embeddings:
        yield lm_head(config)
    for index in range(config.num_layers):
        yield from layer_parts(config, index).values()


def check_tensors(path: Path, config: ModelConfig, stored: Mapping[str, StoredTensor]) -> None:
    """Raises CheckpointError unless what is `stored` in `path` is what the config describes."""
    for part in expected(config):
        if part.name not in stored:
            raise CheckpointError(f"{path} lacks tensor {part.name}, which its config.json implies")
        found = stored[part.name]
        if found.shape != part.shape:
            raise CheckpointError(
                f"{found.file}: tensor {part.name} has shape {list(found.shape)}; config.json "
                f"implies {list(part.shape)}"
            )
    unknown = stored.keys() - {part.name for part in expected(config)}
    for name in sorted(unknown):
        # Tables that old exports saved, and a copy of the embedding, carry nothing of their own.
        tied_copy = config.tie_embeddings and name == "lm_head.weight"
        if not tied_copy and not name.endswith("rotary_emb.inv_freq"):
            raise CheckpointError(
                f"{stored[name].file}: tensor {name} is not part of {config.architecture} as "
                "config.json describes it"
            )
