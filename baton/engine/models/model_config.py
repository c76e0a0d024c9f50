"""A model's configuration: config.json, checked and in one form for all architectures.

Supports the architectures of `baton.engine.models.architectures`, as written by Hugging Face
transformers 4 and 5. Settings that `baton.engine.models.decoder` does not implement are refused by
name. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from baton.checkpoint_files import CLASSIFIER, label_names
from baton.config import EngineConfig, model_path
from baton.config.engine import MAX_LORA_RANK
from baton.engine.checkpoint.fields import (
    BOOLEAN,
    COUNT,
    MAX_SIZE,
    NOT_NEGATIVE,
    NUMBER,
    NUMBERS,
    OBJECT,
    Check,
    Fields,
    one_of,
    whole,
)
from baton.engine.checkpoint.gguf import config_values
from baton.engine.checkpoint.tensor_headers import read_json
from baton.engine.kernels.activation import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation
from baton.engine.kernels.delta_rule import MAX_PROPOSED, DeltaRuleShape
from baton.engine.kernels.moe_routing import Routing
from baton.engine.models.architectures import (
    ARCHITECTURES,
    CHUNKED,
    ENCODERS,
    FULL,
    LINEAR,
    REFUSED,
    SLIDING,
    TEXT_DEFAULTS,
    WRAPPERS,
    Architecture,
    ExpertNames,
    QkNorm,
)
from baton.engine.models.rope_config import Rope, parse_ropes
from baton.engine.quantization.checkpoint_configs import parse_quantization_config
from baton.engine.quantization.config import QuantizationConfig
from baton.errors import CheckpointError, ConfigError
from baton.gguf.reader import SUFFIX, GgufFile
from baton.kv_groups import LayerGroups

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

    count: number of experts · size: intermediate size of an expert · routing: how a token's experts
    are selected · layers: whether each layer has experts, or an MLP · shared_size: intermediate
    size of the expert that all tokens take; 0: none · mxfp4: whether the checkpoint has experts in
    MXFP4.
    """

    count: int
    size: int
    routing: Routing
    layers: tuple[bool, ...]
    shared_size: int = 0
    mxfp4: bool = False
    scales_inputs: bool = False  # shares multiply the inputs of experts, not their outputs
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
class LatentConfig:
    """Multi-head latent attention (MLA; DeepSeek-V2, https://arxiv.org/abs/2405.04434).

    Keys and values of all heads are made of one row a token: `kv_rank` elements, from which each
    head's key and value are projected, and `rope_size` rotated ones, which end all heads' keys.

    q_rank: size of the row that queries are projected from; 0: they are projected from the hidden
    state · nope_size: elements of a head's query and key that are not rotated · value_size: of a
    head's value.
    """

    q_rank: int
    kv_rank: int
    nope_size: int
    rope_size: int
    value_size: int

    @property
    def query_size(self) -> int:
        """Elements of a head's query."""
        return self.nope_size + self.rope_size


@dataclass(frozen=True)
class LayerHeads:
    """What of a layer's attention may differ between layers.

    head_size: also of queries · keys_as_values: values are projected as keys are · kv_layer: the
    layer whose K and V this one reads, which may be an earlier one.
    """

    num_kv_heads: int
    head_size: int
    keys_as_values: bool
    kv_layer: int


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer; sizes count elements, contexts and windows count tokens.

    With latent attention, num_kv_heads is 1 and head_size that of a latent row. Where layers differ
    (`layer_heads`), they are those of the layers that store most, and `layer` has each one's.

    windows: for each layer, the number of tokens that a token attends to, itself included, or None
    for all of the longest context · ropes: the rotary embedding of each layer, or None · wrapper:
    the multimodal architecture whose text part this is, or empty.
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
    latent: LatentConfig | None = None
    layer_heads: tuple[LayerHeads, ...] = ()  # of each layer, where they differ
    layer_input_size: int = 0  # of a token's embedding for each layer; 0: there are none
    query_scaling: tuple[float, float] | None = None  # see `query_scales`
    has_wide_mlps: bool = False  # twice as wide where a layer reads another one's K and V
    has_qk_norm: bool = True  # whether there are norms that the architecture may have
    predicting_layers: int = 0  # layers of the checkpoint that predict further tokens
    first_layer: int = 0  # number of its first layer in the checkpoint; see `predictor`
    quantization: QuantizationConfig | None = None
    wrapper: str = ""
    interleaved_rope: bool = False  # rotated pairs are neighbours in the checkpoint's q and k
    norm_plus_one: bool = False  # 1 is added to the checkpoint's norms
    num_labels: int = 0  # outputs of the classification head, which is there instead of `lm_head`

    @classmethod
    def load(cls, path: Path) -> ModelConfig:
        """Reads a model directory, a GGUF file, or a bare config file (for random weights).

        Raises CheckpointError naming the file, the key, its value and what is supported.
        """
        if path.suffix == SUFFIX:
            whole_model = Fields(path, config_values(GgufFile.load(path)))
        else:
            file = path / "config.json" if path.is_dir() else path
            if not file.exists() and (files := sorted(path.glob(f"*{SUFFIX}"))):
                raise CheckpointError(f"{file} is missing: give one of its GGUF files, {files[0]}")
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

        labels = label_names(whole_model.file, whole_model.values)
        num_labels = len(labels) if labels is not None else 0
        latent = _latent(fields) if arch.latent else None
        num_heads, num_kv_heads, head_size = _heads(fields, arch, latent)
        query_size = latent.query_size if latent else head_size
        hidden_size = fields.read("hidden_size", COUNT)
        num_layers = fields.read("num_hidden_layers", whole(1, MAX_LAYERS))
        rotated = _rotated(fields, arch, num_layers)
        windows = _windows(fields, arch, rotated)
        if arch.rotates == "sliding" and any(windows):
            rotated = tuple(map(bool, windows))
        layer_heads = _layer_heads(fields, arch, windows, (num_heads, num_kv_heads, head_size))
        sizes = [latent.rope_size if latent else head_size] * 2
        for index, one in enumerate(layer_heads):
            sizes[bool(windows[index])] = one.head_size
            if one.num_kv_heads * one.head_size > num_kv_heads * head_size:
                num_kv_heads, head_size = one.num_kv_heads, one.head_size
        _check_layer_heads(fields, layer_heads, num_kv_heads, head_size)
        rope, sliding_rope, max_context = parse_ropes(fields, arch, *sizes)
        layer_ropes = [sliding_rope if window else rope for window in windows]
        windows = tuple(one if one and one < max_context else None for one in windows)
        query_scalar = read_if_known("query_pre_attn_scalar", NUMBER, query_size)
        score_scale = read_if_known("attention_multiplier", NUMBER, query_scalar**-0.5)
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
            intermediate_size=fields.read(arch.mlp_size, COUNT),
            rms_eps=float(fields.read("rms_norm_eps", NUMBER, 1e-6)),
            ropes=tuple(
                rope if rotates else None
                for rope, rotates in zip(layer_ropes, rotated, strict=True)
            ),
            windows=windows,
            # A classification model has no output layer, and no output that needs one.
            tie_embeddings=num_labels > 0 or fields.read("tie_word_embeddings", BOOLEAN, False),
            qkv_bias=bias(arch.qkv_bias),
            o_bias=bias(arch.o_bias),
            mlp_bias=bias(arch.mlp_bias),
            max_context=max_context,
            eos_token_ids=_eos_token_ids(fields),
            dtype=fields.read(dtype_key, one_of("bfloat16", "float32", "float16"), "float32"),
            activation=_activation(fields, arch),
            score_scale=float(score_scale) * (rope.latent_score_scale if latent else 1.0),
            attention_softcap=float(read_if_known("attn_logit_softcapping", NOT_NEGATIVE, 0.0)),
            logit_softcap=float(read_if_known("final_logit_softcapping", NOT_NEGATIVE, 0.0)),
            logit_scale=1 / float(read_if_known("logits_scaling", NUMBER, 1.0)),
            embedding_scale=hidden_size**0.5 if arch.scaled_embedding else float(embedding_scale),
            residual_scale=float(read_if_known("residual_multiplier", NUMBER, 1.0)),
            experts=experts,
            delta_rule=_delta_rule(fields, arch, num_layers, num_kv_heads),
            latent=latent,
            layer_heads=layer_heads,
            layer_input_size=_layer_input_size(fields, arch),
            query_scaling=_query_scaling(fields, arch),
            has_wide_mlps=read_if_known("use_double_wide_mlp", BOOLEAN, False),
            has_qk_norm=read_if_known("use_qk_norm", BOOLEAN, True),
            predicting_layers=_predicting_layers(fields, arch),
            quantization=None
            if experts is not None and experts.mxfp4
            else parse_quantization_config(whole_model),
            wrapper=named if named in WRAPPERS else "",
            interleaved_rope=fields.read("rope_interleave", BOOLEAN, arch.interleaved_rope),
            norm_plus_one=fields.read("norm_plus_one", BOOLEAN, arch.norm_plus_one),
            num_labels=num_labels,
        )

    def check_settings(self, settings: EngineConfig) -> None:
        """Raises ConfigError for options that the model cannot have."""
        if self.delta_rule is not None and settings.most_proposed > MAX_PROPOSED:
            raise ConfigError(
                f"--speculate {settings.speculate}: {self.architecture} has linear attention, with "
                f"which at most {MAX_PROPOSED} tokens are proposed"
            )
        if settings.kv_dtype != "auto" and (self.latent is not None or self.layer_heads):
            unlike = "latent KV" if self.latent is not None else "heads of several sizes"
            raise ConfigError(
                f"--kv-dtype {settings.kv_dtype}: {self.architecture} has {unlike}, whose rows are "
                "not quantised: leave it out"
            )

    def check_ranks(self, settings: EngineConfig) -> None:
        """Raises ConfigError where the model cannot be split among the several ranks of --tp."""
        ranks, experts = settings.tp, self.experts
        sizes = {"num_attention_heads": self.num_heads}
        if experts is None or not all(experts.layers):
            sizes["intermediate_size"] = self.intermediate_size
        if experts is None and settings.expert_parallel:
            raise ConfigError("--expert-parallel: the model has no experts")
        if experts is not None:
            if not settings.expert_parallel:
                sizes["moe_intermediate_size"] = experts.size
            elif ranks > experts.count:
                raise ConfigError(f"--tp {ranks} is more than the model's {experts.count} experts")
            if experts.shared_size:
                sizes["shared_expert_intermediate_size"] = experts.shared_size
        for name, size in sizes.items():
            if size % ranks:
                remedy = ": add --expert-parallel" if name == "moe_intermediate_size" else ""
                raise ConfigError(
                    f"--tp {ranks} does not divide the model's {name}, {size}{remedy}"
                )
        if self.delta_rule is not None and self.num_kv_heads % ranks:
            raise ConfigError(
                f"--tp {ranks} does not divide the model's {self.num_kv_heads} KV heads, by "
                "which the states of its linear attention are divided"
            )
        for one in self.layer_heads:  # cut as those of the pool are
            if one.num_kv_heads % ranks and one.num_kv_heads != self.num_kv_heads:
                raise ConfigError(
                    f"--tp {ranks} does not divide the {one.num_kv_heads} KV heads that some of "
                    "the model's layers have"
                )
        if self.num_kv_heads % ranks and ranks % self.num_kv_heads:
            raise ConfigError(
                f"--tp {ranks} neither divides the model's {self.num_kv_heads} KV heads nor is a "
                "multiple of them"
            )

    def longest_context(self, settings: EngineConfig) -> int:
        """Most tokens of a sequence by model and settings. Raises ConfigError."""
        if settings.max_context > self.max_context:
            raise ConfigError(
                f"--max-context {settings.max_context} is more than the model's own "
                f"{self.max_context}: lower it, or leave it out"
            )
        return settings.max_context or self.max_context

    def check_device(self, settings: EngineConfig, device: str) -> None:
        """Raises ConfigError for options that the model cannot have there. device: as of
        --device."""
        settings.check_draft_device(device)
        if self.delta_rule is not None and settings.speculate and device.startswith("cuda"):
            raise ConfigError(
                f"--speculate: {self.architecture} has linear attention, whose kernels for GPUs "
                "keep no state before proposed tokens; leave the option out, or add --device cpu"
            )
        most = MAX_LORA_RANK // 3  # of parts that one update joins
        is_joined = self.delta_rule is not None or self.arch.gated_attention
        if is_joined and settings.max_lora_rank > most and device.startswith("cuda"):
            raise ConfigError(
                f"--max-lora-rank {settings.max_lora_rank}: on GPUs adapters of "
                f"{self.architecture} have a rank of at most {most}"
            )

    def draft(self, settings: EngineConfig) -> ModelConfig:
        """The config of the draft model that the settings name for this model.

        Raises CheckpointError, and ConfigError for a draft model that cannot propose.
        """
        option, reason = f"--speculative-model {settings.speculative_model}", ""
        if settings.simulate:
            raise ConfigError(f"{option}: --simulate computes nothing; leave one of them out")
        if settings.is_mtp:
            return self.predictor
        try:
            draft = ModelConfig.load(model_path(settings.speculative_model))
        except ConfigError as error:
            raise ConfigError(f"{option}: {error}") from error
        if draft.delta_rule is not None:
            reason = (
                f"{draft.architecture} has linear attention, whose states cannot go back to before "
                "a rejected token"
            )
        elif draft.vocab_size != self.vocab_size:
            reason = (
                f"config.json has vocab_size {draft.vocab_size}, and that of --model has "
                f"{self.vocab_size}: choose a draft model with the same vocabulary"
            )
        if reason:
            raise ConfigError(f"{option}: {reason}")
        return draft

    @property
    def predictor(self) -> ModelConfig:
        """The config of the layer that predicts further tokens, as a model of one layer.

        Where the checkpoint has several, the first. Raises ConfigError where it has none.
        """
        if not self.predicting_layers:
            raise ConfigError(
                f"--speculative-model mtp: config.json of {self.architecture} names no layer for "
                "multi-token prediction (num_nextn_predict_layers): give the directory of a draft "
                "model, or leave the option out"
            )
        experts = self.experts
        if experts is not None:
            experts = replace(experts, layers=experts.layers[-1:])
        return replace(
            self, num_layers=1, first_layer=self.num_layers, predicting_layers=0,
            ropes=self.ropes[-1:], windows=self.windows[-1:], experts=experts, delta_rule=None,
        )  # fmt: skip

    @property
    def arch(self) -> Architecture:
        """The architecture's differences from Llama."""
        return ARCHITECTURES[self.architecture]

    @cached_property
    def layer_groups(self) -> LayerGroups:
        """The groups of layers, each with a block table."""
        linear = self.delta_rule.layers if self.delta_rule else (False,) * self.num_layers
        kv_layers = [one.kv_layer for one in self.layer_heads] or range(self.num_layers)
        kept = [at for at, kv in enumerate(kv_layers) if at == kv and not linear[at]]
        groups = LayerGroups.from_windows(
            [self.windows[at] for at in kept], [self.shared_by(at) for at in kept]
        )
        places = dict(zip(kept, groups.places, strict=True))
        # Layers with linear attention have no KV, and no place.
        return replace(groups, places=tuple(places.get(at, (0, 0)) for at in kv_layers))

    def layer(self, index: int) -> ModelConfig:
        """The configuration with the heads of one layer."""
        return self._layers[index] if self.layer_heads else self

    @cached_property
    def _layers(self) -> tuple[ModelConfig, ...]:
        return tuple(
            replace(self, num_kv_heads=one.num_kv_heads, head_size=one.head_size)
            for one in self.layer_heads
        )

    def only_reads(self, index: int) -> bool:
        """Whether a layer reads the K and V of another one, and stores none."""
        return bool(self.layer_heads) and self.layer_heads[index].kv_layer != index

    def shared_by(self, index: int) -> int:
        """How many layers like this one store their KV in the place of one."""
        one = self.layer(index)
        return self.num_kv_heads * self.head_size // (one.num_kv_heads * one.head_size)

    @property
    def qk_norm(self) -> QkNorm:
        """The norms of queries and keys."""
        return self.arch.qk_norm if self.has_qk_norm else "none"

    @property
    def kv_parts(self) -> int:
        """Rows that a token stores for each KV head of a layer: K and V, or a latent row."""
        return 1 if self.latent else 2

    @property
    def rope_size(self) -> int:
        """Size of the tables of sines and cosines: of a head, or of its rotated end."""
        return self.latent.rope_size if self.latent else self.head_size

    @property
    def value_size(self) -> int:
        """Elements of a head's value."""
        return self.latent.value_size if self.latent else self.head_size

    @property
    def head_order(self) -> list[int] | None:
        """The checkpoint's index of each element of a query or key head; None: the same.

        The decoder has a rotated pair half a head apart, and in each half the elements that are not
        rotated last.
        """
        if self.latent is not None:
            return None
        rope = next((rope for rope in self.ropes if rope is not None), None)
        size = self.head_size if rope is None else rope.size or self.head_size
        if not self.interleaved_rope and (rope is None or rope.is_in_place(self.head_size)):
            return None
        first, second = range(size // 2), range(size // 2, size)
        if self.interleaved_rope:
            first, second = range(0, size, 2), range(1, size, 2)
        rest = range(size, self.head_size)
        half = len(rest) // 2
        return [*first, *rest[:half], *second, *rest[half:]]


def _architecture(fields: Fields) -> str:
    """The first of `architectures`, which is supported."""
    named = fields.values.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else named
    if isinstance(architecture, str):
        architecture = architecture.replace(CLASSIFIER, "ForCausalLM")
    if isinstance(architecture, str) and (
        architecture in ARCHITECTURES or architecture in WRAPPERS
    ):
        return architecture
    families = ", ".join(name.partition("For")[0] for name in (*ARCHITECTURES, *WRAPPERS))
    lacking = REFUSED.get(architecture) if isinstance(architecture, str) else None
    if str(architecture).startswith(ENCODERS):
        lacking = "attention in both directions, as an encoder"
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
    values = {**TEXT_DEFAULTS.get(kind, {}), **shared, **given}
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
    # "vision": only that of images is.
    fields.read("use_bidirectional_attention", one_of(False, "vision"), False)
    fields.read("is_causal", one_of(True), True)  # false in models made for embeddings
    fields.read("clip_qkv", Check(lambda value: value is None, "null"))
    fields.read("use_bias", one_of(False), False)
    if arch.latent:
        fields.read("attention_bias", one_of(False), False)
        fields.read("rope_interleave", one_of(True), True)
    if arch.experts is not None:
        scores = "sigmoid" if arch.experts.sigmoid else "softmax"
        fields.read("scoring_func", one_of(scores), scores)
        fields.read("moe_layer_freq", one_of(1), 1)
    if "attn_logit_softcapping" not in arch.defaults:  # nor does transformers in Gemma 3
        fields.read("attn_logit_softcapping", Check(lambda value: not value, "null"))


def _latent(fields: Fields) -> LatentConfig:
    q_rank = fields.values["q_lora_rank"]  # null: no such row
    config = LatentConfig(
        q_rank=0 if q_rank is None else fields.read("q_lora_rank", COUNT),
        kv_rank=fields.read("kv_lora_rank", COUNT),
        nope_size=fields.read("qk_nope_head_dim", COUNT),
        rope_size=fields.read("qk_rope_head_dim", COUNT),
        value_size=fields.read("v_head_dim", COUNT),
    )
    if config.rope_size % 2:
        raise fields.error("qk_rope_head_dim", config.rope_size, "an even number")
    return config


def _heads(fields: Fields, arch: Architecture, latent: LatentConfig | None) -> tuple[int, int, int]:
    """Numbers of query and KV heads, and the size of a head."""
    num_heads = fields.read("num_attention_heads", COUNT)
    num_kv_heads = fields.read("num_key_value_heads", COUNT, num_heads)
    if latent is not None:
        if num_kv_heads != num_heads:
            raise fields.error("num_key_value_heads", num_kv_heads, f"{num_heads}, the heads")
        return num_heads, 1, latent.kv_rank + latent.rope_size
    default_size = fields.read("hidden_size", COUNT) // num_heads
    head_size = fields.read("head_dim", COUNT, arch.defaults.get("head_dim", default_size))
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", num_kv_heads, f"a divisor of {num_heads} heads")
    if head_size % 2:
        raise fields.error("head_dim", head_size, "an even number")
    return num_heads, num_kv_heads, head_size


def _layer_heads(
    fields: Fields, arch: Architecture, windows: tuple[int | None, ...], heads: tuple[int, int, int]
) -> tuple[LayerHeads, ...]:
    """The heads of each layer, where those of full attention may differ; else nothing.

    heads: of query and KV heads of other layers, and their size.
    """
    if "global_head_dim" not in arch.defaults:
        return ()
    num_heads, num_kv_heads, head_size = heads
    count, same = len(windows), fields.read("attention_k_eq_v", BOOLEAN, False)
    own = count - fields.read("num_kv_shared_layers", whole(0, count - 1), 0)
    global_heads = {"head_dim": fields.read("global_head_dim", COUNT)}
    if same:
        global_heads["num_key_value_heads"] = fields.values["num_global_key_value_heads"]
    by_layer = fields.inside("per_layer_config")
    found = list[LayerHeads]()
    for index, window in enumerate(windows):
        values = {} if window or by_layer.values else global_heads
        one = by_layer._replace(
            values=by_layer.read(str(index), OBJECT, values), prefix=f"{by_layer.prefix}{index}."
        )
        if unknown := one.values.keys() - {"head_dim", "num_key_value_heads"}:
            key = min(unknown)
            raise one.error(key, one.values[key], "head_dim and num_key_value_heads")
        size = one.read("head_dim", COUNT, head_size)
        kv_heads = one.read("num_key_value_heads", COUNT, num_kv_heads)
        if num_heads % kv_heads or size % 2:
            raise one.error("head_dim", size, f"an even size, and a divisor of {num_heads} heads")
        alike = [at for at in range(min(own, index + 1)) if bool(windows[at]) == bool(window)]
        if not alike:
            supported = "a number that leaves a layer of each attention before those that share KV"
            raise fields.error("num_kv_shared_layers", count - own, supported)
        found.append(LayerHeads(kv_heads, size, same and not window, alike[-1]))
    return tuple(found)


def _check_layer_heads(
    fields: Fields, layers: tuple[LayerHeads, ...], num_kv_heads: int, head_size: int
) -> None:
    """Raises CheckpointError for layers whose K and V do not fit in those of the largest."""
    for one in layers:
        shares, rest = divmod(num_kv_heads * head_size, one.num_kv_heads * one.head_size)
        if rest or num_kv_heads % one.num_kv_heads or (shares > 1 and shares % 2):
            raise fields.error(
                "head_dim", one.head_size,
                f"heads of layers whose KV is 1, 1/2, 1/4, 1/6 ... of the largest, {num_kv_heads} "
                f"of {head_size} elements, and whose number divides theirs",
            )  # fmt: skip


def _query_scaling(fields: Fields, arch: Architecture) -> tuple[float, float] | None:
    # Published configs have 4 for true.
    if not fields.values.get("attn_temperature_tuning") or "floor_scale" not in arch.defaults:
        return None
    return fields.read("floor_scale", NUMBER), fields.read("attn_scale", NUMBER)


def _layer_input_size(fields: Fields, arch: Architecture) -> int:
    """Elements of a token's embedding for each layer; 0: there are none."""
    if "hidden_size_per_layer_input" not in arch.defaults:
        return 0
    size: int = fields.read("hidden_size_per_layer_input", whole(0, MAX_SIZE))
    if size:
        fields.read("vocab_size_per_layer_input", one_of(fields.read("vocab_size", COUNT)))
    return size


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
    if not given:
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
    window, length = None, "attention_chunk_size" if arch.chunked else "sliding_window"
    if kind != "none" and is_on and fields.values.get(length) is not None:
        window = fields.read(length, COUNT)
    windowed = CHUNKED if arch.chunked else SLIDING
    kinds = fields.values.get("layer_types")
    if kinds is not None and kind not in ("none", "always"):
        known = (FULL, windowed) if window else (FULL,)
        is_list = isinstance(kinds, list) and len(kinds) == count
        if not is_list or not all(name in known for name in kinds):
            raise fields.error("layer_types", kinds, f"{count} times {' or '.join(known)}")
        slides = [name == windowed for name in kinds]
    elif isinstance(kind, int):
        period = fields.read("sliding_window_pattern", COUNT, kind)
        slides = [(index + 1) % period != 0 for index in range(count)]
    elif kind == "unrotated":
        slides = [not rotates for rotates in rotated]
    elif kind == "rotated":
        slides = list(rotated)
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
    names = arch.experts
    if names is None or (names.enabled and not fields.read(names.enabled, BOOLEAN, False)):
        return None
    # transformers 5 writes one name of their number for all.
    given = [key for key in (names.count, "num_local_experts") if key in fields.values]
    count = fields.read(given[0] if given else names.count, whole(1, MAX_EXPERTS))
    stored = fields.values.get("quantization_config") if names.stacked else None
    if stored is not None:
        fields.inside("quantization_config").read("quant_method", one_of("mxfp4"))
    size, shared = fields.read(names.size, COUNT), 0
    if names.shared_size:
        shared = fields.read(names.shared_size, whole(0, MAX_SIZE))
        if not names.shared_size.endswith("_size"):  # a number of experts
            shared *= size
    return ExpertsConfig(
        count=count,
        size=size,
        routing=_routing(fields, names, count),
        layers=tuple(_has_experts(fields, arch, index, num_layers) for index in range(num_layers)),
        shared_size=shared,
        mxfp4=stored is not None,
        scales_inputs=names.scales_inputs,
    )


def _routing(fields: Fields, names: ExpertNames, count: int) -> Routing:
    taken = fields.values.get(names.taken)
    if isinstance(taken, list) and taken and taken.count(taken[0]) == len(taken):  # of each layer
        fields = fields._replace(values={**fields.values, names.taken: taken[0]})
    per_token = fields.read(names.taken, whole(1, min(count, MAX_PER_TOKEN)))
    check = BOOLEAN if names.normed is None else one_of(names.normed)
    routing = Routing(
        per_token,
        normed=fields.read("norm_topk_prob", check, bool(names.normed)),
        sigmoid=names.sigmoid,
        scale=float(fields.read(names.scale, NUMBER, 1.0)) if names.scale else 1.0,
    )
    methods = ("noaux_tc",) if names.sigmoid else ("greedy", "group_limited_greedy")
    method = fields.read("topk_method", one_of(*methods), methods[-1])
    if not names.group_top or method == "greedy":
        return routing
    groups = fields.read("n_group", whole(1, count), 1)
    if count % groups or count // groups < names.group_top:
        supported = f"a divisor of {count} experts that leaves {names.group_top} or more to a group"
        raise fields.error("n_group", groups, supported)
    taken = fields.read("topk_group", whole(1, groups), 1)
    if taken * (count // groups) < per_token:
        raise fields.error("topk_group", taken, f"groups of {per_token} experts together")
    return replace(routing, groups=groups, taken_groups=taken, group_top=names.group_top)


def _predicting_layers(fields: Fields, arch: Architecture) -> int:
    """Layers behind the others that predict further tokens; transformers 5 names them anew."""
    if arch.delta_rule:  # a config of Qwen3-Next does not say that there is one
        return int(fields.read("mtp_num_hidden_layers", whole(0, MAX_LAYERS), 1))
    if "num_nextn_predict_layers" not in arch.defaults:
        return 0
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        if found := fields.read(key, whole(0, MAX_LAYERS), 0):
            return int(found)
    return 0


def _has_experts(fields: Fields, arch: Architecture, index: int, num_layers: int) -> bool:
    """Whether a layer has experts, by the keys that the architecture has for it."""
    if "interleave_moe_layer_step" in arch.defaults:
        step = fields.read("interleave_moe_layer_step", COUNT)
        chosen = fields.read("moe_layers", NUMBERS, [*range(step - 1, num_layers, step)])
        return index in chosen
    if "decoder_sparse_step" in arch.defaults:
        step = fields.read("decoder_sparse_step", COUNT)
        return (index + 1) % step == 0 and index not in fields.read("mlp_only_layers", NUMBERS, [])
    if "first_k_dense_replace" in arch.defaults:
        return bool(index >= fields.read("first_k_dense_replace", whole(0, MAX_SIZE)))
    if "mlp_layer_types" in arch.defaults:
        kinds = fields.values["mlp_layer_types"] or ["dense"] + ["sparse"] * (num_layers - 1)
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise fields.error("mlp_layer_types", kinds, f"{num_layers} times dense or sparse")
        return bool(kinds[index] == "sparse")
    if "moe_layer_interval" in arch.defaults:
        first = fields.read("moe_layer_start_index", whole(0, MAX_SIZE))
        last = fields.read("moe_layer_end_index", whole(-1, MAX_SIZE))
        interval = fields.read("moe_layer_interval", COUNT)
        is_within = first <= index <= (num_layers - 1 if last == -1 else last)
        return bool(is_within and (index + 1) % interval == 0)
    return True


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
