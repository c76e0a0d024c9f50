"""A model's configuration: config.json, checked and in one form for all architectures.

Supports the architectures of `baton.engine.models.architectures`, as written by Hugging Face
transformers 4 and 5. Settings that `baton.engine.models.decoder` does not implement are refused by
name. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from baton.config import EngineConfig
from baton.engine.checkpoint.fields import (
    BOOLEAN,
    COUNT,
    MAX_SIZE,
    NOT_NEGATIVE,
    NUMBER,
    NUMBERS,
    Check,
    Fields,
    one_of,
    whole,
)
from baton.engine.checkpoint.tensors import read_json
from baton.engine.kernels.activation import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation
from baton.engine.kernels.delta_rule import DeltaRuleShape
from baton.engine.models.architectures import (
    ARCHITECTURES,
    FULL,
    LINEAR,
    REFUSED,
    SLIDING,
    WRAPPERS,
    Architecture,
)
from baton.engine.models.rope_config import Rope, parse_ropes
from baton.engine.quantization.checkpoint_configs import parse_quantization_config
from baton.engine.quantization.config import QuantizationConfig
from baton.errors import CheckpointError, ConfigError

MAX_LAYERS = 1024
MAX_EXPERTS, MAX_PER_TOKEN = 4096, 64


_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


# Keys of a multimodal config's text part that published ones have outside of it.
_OF_WHOLE = ("dtype", "torch_dtype", "eos_token_id", "vocab_size")
_MROPE = ("mrope_section", "mrope_interleaved")


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of the MLP.

    count: number of experts · per_token: number that a token takes · size: intermediate size of an
    expert · normed: whether shares of the taken experts add up to 1 · layers: whether each layer
    has experts, or an MLP · shared_size: intermediate size of the expert that all tokens take; 0:
    none · mxfp4: whether the checkpoint has experts in MXFP4.
    """

    count: int
    per_token: int
    size: int
    normed: bool
    layers: tuple[bool, ...]
    shared_size: int = 0
    mxfp4: bool = False
    stacked: bool = False  # whether the checkpoint has them together, whatever its architecture

    @property
    def counts(self) -> tuple[int, int]:
        """`(layers with experts, experts)`: the shape of `expert_tokens`."""
        return sum(self.layers), self.count


@dataclass(frozen=True)
class DeltaRuleConfig:
    """Linear attention by the gated delta rule. layers: whether each layer has it."""

    layers: tuple[bool, ...]
    shape: DeltaRuleShape

    @property
    def state_layers(self) -> tuple[int | None, ...]:
        """Each layer's index among those with a state; None for the others."""
        return _numbered(self.layers)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer; sizes count elements, contexts and windows count tokens.

    windows: for each layer, the number of tokens that a token attends to, itself included, or None
    for all · ropes: the rotary embedding of each layer, or None · wrapper: the multimodal
    architecture whose text part this is, or empty.
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
    ropes: tuple[Rope | None, ...]
    windows: tuple[int | None, ...]
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    max_context: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    score_scale: float  # of attention scores
    activation: Activation = "silu"
    attention_softcap: float = 0.0  # scores s become c * tanh(s / c); 0: off
    logit_softcap: float = 0.0  # as `attention_softcap`, of logits
    logit_scale: float = 1.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of the outputs of attention and MLP
    experts: ExpertsConfig | None = None
    delta_rule: DeltaRuleConfig | None = None
    quantization: QuantizationConfig | None = None
    wrapper: str = ""

    @classmethod
    def load(cls, path: Path) -> ModelConfig:
        """Reads a model directory, or a bare config file (for random weights).

        Raises CheckpointError naming the file, the key, its value and what is supported.
        """
        file = path / "config.json" if path.is_dir() else path
        if path.suffix == ".gguf" or (not file.exists() and any(path.glob("*.gguf"))):
            raise CheckpointError(
                f"{path}: GGUF is not supported yet: give a directory with config.json and "
                "safetensors weights"
            )
        whole_model = Fields(file, read_json(file))
        named = _architecture(whole_model)
        architecture, fields = _text_part(whole_model, named)
        arch = ARCHITECTURES[architecture]
        fields = fields._replace(values={**arch.defaults, **fields.values})
        _check_unsupported(fields, arch)

        def read_if_known(key: str, check: Check, otherwise: Any) -> Any:
            """Reads a key that only some architectures have."""
            return fields.read(key, check, otherwise) if key in arch.defaults else otherwise

        def bias(key: bool | str) -> bool:
            return bool(fields.read(key, BOOLEAN, False)) if isinstance(key, str) else key

        num_heads, num_kv_heads, head_size = _heads(fields, arch)
        hidden_size = fields.read("hidden_size", COUNT)
        num_layers = fields.read("num_hidden_layers", whole(1, MAX_LAYERS))
        rotated = _rotated(fields, arch, num_layers)
        windows = _windows(fields, arch, rotated)
        if arch.rotates == "sliding" and any(windows):
            rotated = tuple(map(bool, windows))
        rope, sliding_rope, max_context = parse_ropes(fields, arch, head_size)
        layer_ropes = (sliding_rope if window else rope for window in windows)
        query_scalar = read_if_known("query_pre_attn_scalar", NUMBER, head_size)
        dtype_key = "torch_dtype" if fields.values.get("dtype") is None else "dtype"
        embedding_scale = read_if_known("embedding_multiplier", NUMBER, 1.0)
        experts = _experts(fields, arch, num_layers)
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
            ropes=tuple(
                rope if rotates else None
                for rope, rotates in zip(layer_ropes, rotated, strict=True)
            ),
            windows=windows,
            tie_embeddings=fields.read("tie_word_embeddings", BOOLEAN, False),
            qkv_bias=bias(arch.qkv_bias),
            o_bias=bias(arch.o_bias),
            mlp_bias=bias(arch.mlp_bias),
            max_context=max_context,
            eos_token_ids=_eos_token_ids(fields),
            dtype=fields.read(dtype_key, one_of("bfloat16", "float32", "float16"), "float32"),
            activation=_activation(fields, arch),
            score_scale=float(read_if_known("attention_multiplier", NUMBER, query_scalar**-0.5)),
            attention_softcap=float(read_if_known("attn_logit_softcapping", NOT_NEGATIVE, 0.0)),
            logit_softcap=float(read_if_known("final_logit_softcapping", NOT_NEGATIVE, 0.0)),
            logit_scale=1 / float(read_if_known("logits_scaling", NUMBER, 1.0)),
            embedding_scale=hidden_size**0.5 if arch.scaled_embedding else float(embedding_scale),
            residual_scale=float(read_if_known("residual_multiplier", NUMBER, 1.0)),
            experts=experts,
            delta_rule=_delta_rule(fields, arch, num_layers, num_kv_heads),
            quantization=None
            if experts is not None and experts.mxfp4
            else parse_quantization_config(whole_model),
            wrapper=named if named in WRAPPERS else "",
        )

    def check_settings(self, settings: EngineConfig) -> None:
        """Raises ConfigError for options that a model with states cannot have."""
        if self.delta_rule is None:
            return
        if settings.speculate:
            raise ConfigError(
                f"--speculate: {self.architecture} has linear attention, whose states cannot go "
                "back to before a rejected token; leave the option out"
            )
        if settings.lora_slots:
            raise ConfigError(
                f"--max-loras: {self.architecture} has linear attention, which adapters are not "
                "supported for; leave --lora and --max-loras out"
            )

    @property
    def arch(self) -> Architecture:
        """The architecture's differences from Llama."""
        return ARCHITECTURES[self.architecture]

    @property
    def kv_layers(self) -> tuple[int | None, ...]:
        """Each layer's index in the KV pool; None for those that keep a state instead."""
        if self.delta_rule is None:
            return tuple(range(self.num_layers))
        return _numbered(tuple(not linear for linear in self.delta_rule.layers))

    @property
    def num_kv_layers(self) -> int:
        """Number of layers that keep KV."""
        return sum(index is not None for index in self.kv_layers)

    @property
    def head_order(self) -> list[int] | None:
        """The checkpoint's index of each element of a query or key head; None: the same.

        The decoder has a rotated pair half a head apart, and in each half the elements that are not
        rotated last.
        """
        rope = next((rope for rope in self.ropes if rope is not None), None)
        size = self.head_size if rope is None else rope.size or self.head_size
        if size == self.head_size and not self.arch.interleaved_rope:
            return None
        first, second = range(size // 2), range(size // 2, size)
        if self.arch.interleaved_rope:
            first, second = range(0, size, 2), range(1, size, 2)
        rest = range(size, self.head_size)
        half = len(rest) // 2
        return [*first, *rest[:half], *second, *rest[half:]]


def _architecture(fields: Fields) -> str:
    """The first of `architectures`, which is supported."""
    named = fields.values.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else named
    if isinstance(architecture, str) and (
        architecture in ARCHITECTURES or architecture in WRAPPERS
    ):
        return architecture
    families = ", ".join(name.partition("For")[0] for name in (*ARCHITECTURES, *WRAPPERS))
    lacking = REFUSED.get(architecture) if isinstance(architecture, str) else None
    why = f" (it needs {lacking})" if lacking else ""
    raise fields.error("architectures", named, f"those of {families}", why)


def _text_part(fields: Fields, named: str) -> tuple[str, Fields]:
    """The architecture of the text part, and its keys; those of a text model are all it has."""
    if named not in WRAPPERS:
        return named, fields
    wrapper, outer = WRAPPERS[named], fields.values
    text, kind = fields, next(iter(wrapper.text))
    if "text_config" in outer:  # Qwen2-VL's older ones have no part of it
        text = fields.inside("text_config")
        kind = text.read("model_type", one_of(*wrapper.text), kind)
    shared = {key: outer[key] for key in _OF_WHOLE if outer.get(key) is not None}
    given = {
        key: value for key, value in text.values.items() if value is not None or key not in shared
    }
    values = {**wrapper.defaults, **shared, **given}
    if "tie_word_embeddings" in outer:
        values["tie_word_embeddings"] = outer["tie_word_embeddings"]
    return wrapper.text[kind], text._replace(values=_without_mrope(values))


def _without_mrope(values: dict[str, Any]) -> dict[str, Any]:
    """Removes the axes of images from rotary embedding: of text all have the same position."""
    found = dict(values)
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := found.get(key), dict):
            rope = {name: value for name, value in rope.items() if name not in _MROPE}
            for name in ("rope_type", "type"):
                if rope.get(name) == "mrope":
                    rope[name] = "default"
            found[key] = rope
    return found


def _check_unsupported(fields: Fields, arch: Architecture) -> None:
    """Raises CheckpointError for settings that the decoder does not implement."""
    fields.read("pretraining_tp", one_of(1), 1)
    fields.read("use_bidirectional_attention", one_of(False), False)
    fields.read("is_causal", one_of(True), True)  # false in models made for embeddings
    fields.read("clip_qkv", Check(lambda value: value is None, "null"))
    if "attn_logit_softcapping" not in arch.defaults:  # nor does transformers in Gemma 3
        fields.read("attn_logit_softcapping", Check(lambda value: not value, "null"))


def _heads(fields: Fields, arch: Architecture) -> tuple[int, int, int]:
    """Numbers of query and KV heads, and the size of a head."""
    num_heads = fields.read("num_attention_heads", COUNT)
    num_kv_heads = fields.read("num_key_value_heads", COUNT, num_heads)
    default_size = fields.read("hidden_size", COUNT) // num_heads
    head_size = fields.read("head_dim", COUNT, arch.defaults.get("head_dim", default_size))
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", num_kv_heads, f"a divisor of {num_heads} heads")
    if head_size % 2:
        raise fields.error("head_dim", head_size, "an even number")
    return num_heads, num_kv_heads, head_size


def _activation(fields: Fields, arch: Architecture) -> Activation:
    key = "hidden_activation" if "hidden_activation" in arch.defaults else "hidden_act"
    activation = _ACTIVATIONS[fields.read(key, one_of(*_ACTIVATIONS), "silu")]
    if "swiglu_limit" not in arch.defaults:
        return activation
    fields.read("swiglu_alpha", one_of(SWIGLU_ALPHA))
    fields.read("swiglu_limit", one_of(SWIGLU_LIMIT))
    return "swigluoai"


def _rotated(fields: Fields, arch: Architecture, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has rotary embedding."""
    if "no_rope_layers" not in arch.defaults:
        return (True,) * num_layers
    interval = fields.read("no_rope_layer_interval", COUNT)
    given = fields.values["no_rope_layers"]
    if given is None:
        return tuple((index + 1) % interval != 0 for index in range(num_layers))
    if not isinstance(given, list) or len(given) != num_layers or not set(given) <= {0, 1}:
        raise fields.error("no_rope_layers", given, f"{num_layers} times 0 or 1")
    return tuple(map(bool, given))


def _windows(
    fields: Fields, arch: Architecture, rotated: tuple[bool, ...]
) -> tuple[int | None, ...]:
    """The attention window of each layer."""
    count, kind = len(rotated), arch.windows
    key = "use_sliding_window"
    is_on = key not in arch.defaults or fields.read(key, BOOLEAN, False)
    window = None
    if kind != "none" and is_on and fields.values.get("sliding_window") is not None:
        window = fields.read("sliding_window", COUNT)
    kinds = fields.values.get("layer_types")
    if kinds is not None and kind not in ("none", "always"):
        known = (FULL, SLIDING) if window else (FULL,)
        is_list = isinstance(kinds, list) and len(kinds) == count
        if not is_list or not all(name in known for name in kinds):
            raise fields.error("layer_types", kinds, f"{count} times {' or '.join(known)}")
        slides = [name == SLIDING for name in kinds]
    elif isinstance(kind, int):
        period = fields.read("sliding_window_pattern", COUNT, kind)
        slides = [(index + 1) % period != 0 for index in range(count)]
    elif kind == "unrotated":
        slides = [not rotates for rotates in rotated]
    elif kind in ("from", "alternate"):
        first = fields.read("max_window_layers", whole(0, MAX_SIZE))
        slides = [index >= first for index in range(count)]
        if kind == "alternate":
            slides = [index % 2 == 0 and not slide for index, slide in enumerate(slides)]
    else:
        slides = [True] * count
    return tuple(window if slide else None for slide in slides)


def _delta_rule(
    fields: Fields, arch: Architecture, num_layers: int, num_kv_heads: int
) -> DeltaRuleConfig | None:
    if not arch.delta_rule:
        return None
    kinds = fields.values.get("layer_types")
    if kinds is None:
        period = fields.read("full_attention_interval", COUNT)
        kinds = [FULL if (index + 1) % period == 0 else LINEAR for index in range(num_layers)]
    known = isinstance(kinds, list) and all(kind in (FULL, LINEAR) for kind in kinds)
    if not known or len(kinds) != num_layers or FULL not in kinds:
        supported = f"{num_layers} times {FULL} or {LINEAR}, at least once the former"
        raise fields.error("layer_types", kinds, supported)
    key_heads = fields.read("linear_num_key_heads", COUNT)
    value_heads = fields.read("linear_num_value_heads", COUNT)
    if key_heads % num_kv_heads:  # a state is divided as KV is
        supported = f"a multiple of {num_kv_heads} KV heads"
        raise fields.error("linear_num_key_heads", key_heads, supported)
    if value_heads % key_heads:
        supported = f"a multiple of {key_heads} key heads"
        raise fields.error("linear_num_value_heads", value_heads, supported)
    return DeltaRuleConfig(
        layers=tuple(kind == LINEAR for kind in kinds),
        shape=DeltaRuleShape(
            key_heads,
            value_heads,
            key_size=fields.read("linear_key_head_dim", COUNT),
            value_size=fields.read("linear_value_head_dim", COUNT),
            kernel=fields.read("linear_conv_kernel_dim", whole(2, 16)),
        ),
    )


def _numbered(chosen: tuple[bool, ...]) -> tuple[int | None, ...]:
    """The index of each chosen layer among them; None for the others."""
    before = accumulate(chosen, initial=0)
    return tuple(index if is_one else None for index, is_one in zip(before, chosen, strict=False))


def _experts(fields: Fields, arch: Architecture, num_layers: int) -> ExpertsConfig | None:
    if arch.experts is None:
        return None
    # transformers 5 writes one name of their number for all.
    given = [key for key in (arch.experts.count, "num_local_experts") if key in fields.values]
    count = fields.read(given[0] if given else arch.experts.count, whole(1, MAX_EXPERTS))
    layers = [True] * num_layers
    if "decoder_sparse_step" in arch.defaults:
        step = fields.read("decoder_sparse_step", COUNT)
        dense = fields.read("mlp_only_layers", NUMBERS, [])
        layers = [(index + 1) % step == 0 and index not in dense for index in range(num_layers)]
    shared = "shared_expert_intermediate_size"
    stored = fields.values.get("quantization_config") if arch.experts.stacked else None
    if stored is not None:
        fields.inside("quantization_config").read("quant_method", one_of("mxfp4"))
    return ExpertsConfig(
        count=count,
        per_token=fields.read("num_experts_per_tok", whole(1, min(count, MAX_PER_TOKEN))),
        size=fields.read(arch.experts.size, COUNT),
        normed=fields.read("norm_topk_prob", BOOLEAN, False),
        layers=tuple(layers),
        shared_size=fields.read(shared, COUNT) if shared in arch.defaults else 0,
        mxfp4=stored is not None,
    )


def _eos_token_ids(fields: Fields) -> tuple[int, ...]:
    """End-of-sequence tokens: of generation_config.json, else of config.json."""
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
