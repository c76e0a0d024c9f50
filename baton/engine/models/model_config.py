"""What a model is: its config.json, read once, checked, and made uniform.

Supported are the architectures of `baton.engine.models.architectures`, as Hugging Face transformers
writes them (before and since version 5). Whatever would change the computation in a way that
`baton.engine.models.decoder` does not follow is refused here, by name. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

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
from baton.engine.checkpoint.tensors import StoredTensor, read_json
from baton.engine.kernels.activation import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation
from baton.engine.models.architectures import ARCHITECTURES, Architecture
from baton.engine.models.stacked_experts import StackedPart
from baton.engine.quantization.config import (
    QuantizationConfig,
    Shapes,
    TensorSpec,
    parse_quantization_config,
)
from baton.errors import CheckpointError

MAX_LAYERS = 1024
MAX_EXPERTS, MAX_PER_TOKEN = 4096, 64
# Of a context that is stretched: its logarithm is divided by.
TOKENS = Check(
    lambda value: NUMBER.holds(value) and 2 <= value <= MAX_SIZE, f"a number from 2 to {MAX_SIZE}"
)
EMBEDDING, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
FULL, SLIDING = "full_attention", "sliding_attention"
# What transformers knows inside `rope_parameters`, of whichever kind; it reads no other key.
_ROPE_KEYS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "finetuned"),
    *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "truncate", "short_factor", "long_factor"),
    *("low_freq_factor", "high_freq_factor"),
}


_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: frequencies, one for each pair of dimensions that is turned.

    factor: of every kind but "default" and "longrope" · size: dimensions that are turned; 0: all ·
    attention_factor: of sines and cosines · original_context: tokens; for "yarn" and "llama3".
    """

    theta: float
    scaling: Literal["none", "linear", "llama3", "dynamic", "yarn", "longrope"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    size: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0  # of "yarn", with what follows
    beta_slow: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] = ()  # of "longrope", one for each pair


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of the MLP.

    count: experts, of which each token takes `per_token` · size: of an expert's inner layer ·
    normed: the taken ones' weights add up to 1 · layers: which have experts, others an MLP ·
    shared_size: of the inner layer of an expert that all tokens take besides; 0: there is none ·
    mxfp4: the checkpoint has them in MXFP4.
    """

    count: int
    per_token: int
    size: int
    normed: bool
    layers: tuple[bool, ...]
    shared_size: int = 0
    mxfp4: bool = False

    @property
    def counts(self) -> tuple[int, int]:
        """`(layers with experts, experts)`: the shape of what is counted of them."""
        return sum(self.layers), self.count


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer; sizes count elements, contexts and windows count tokens.

    `windows` has, for each layer, how many tokens a token sees, itself included, or None for all;
    `ropes` how the layer turns queries and keys, or None where it does not.
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
    score_scale: float  # of products of queries and keys
    activation: Activation = "silu"
    attention_softcap: float = 0.0  # scaled products s become c * tanh(s / c); 0: they stay
    logit_softcap: float = 0.0  # the same of logits
    logit_scale: float = 1.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add
    experts: ExpertsConfig | None = None
    quantization: QuantizationConfig | None = None

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
        fields = Fields(file, read_json(file))
        named = fields.values.get("architectures")
        architecture = named[0] if isinstance(named, list) and named else named
        if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
            families = ", ".join(name.removesuffix("ForCausalLM") for name in ARCHITECTURES)
            raise fields.error("architectures", named, f"ForCausalLM of {families}")
        arch = ARCHITECTURES[architecture]
        fields = fields._replace(values={**arch.defaults, **fields.values})

        def own(key: str, check: Check, without: Any) -> Any:
            """Of a key that only some architectures have."""
            return fields.read(key, check, without) if key in arch.defaults else without

        def bias(key: bool | str) -> bool:
            return bool(fields.read(key, BOOLEAN, False)) if isinstance(key, str) else key

        # What would change the computation and is followed nowhere.
        fields.read("pretraining_tp", one_of(1), 1)
        fields.read("use_bidirectional_attention", one_of(False), False)
        fields.read("is_causal", one_of(True), True)  # false in models made for embeddings
        fields.read("clip_qkv", Check(lambda value: value is None, "null"))
        if "attn_logit_softcapping" not in arch.defaults:  # nor does transformers in Gemma 3
            fields.read("attn_logit_softcapping", Check(lambda value: not value, "null"))
        act = "hidden_activation" if "hidden_activation" in arch.defaults else "hidden_act"
        num_heads = fields.read("num_attention_heads", COUNT)
        hidden_size = fields.read("hidden_size", COUNT)
        num_kv_heads = fields.read("num_key_value_heads", COUNT, num_heads)
        head_size = fields.read(
            "head_dim", COUNT, arch.defaults.get("head_dim", hidden_size // num_heads)
        )
        if num_heads % num_kv_heads:
            supported = f"a divisor of {num_heads} heads"
            raise fields.error("num_key_value_heads", num_kv_heads, supported)
        if head_size % 2:
            raise fields.error("head_dim", head_size, "an even number")
        num_layers = fields.read("num_hidden_layers", whole(1, MAX_LAYERS))
        rotated = _rotated(fields, arch, num_layers)
        windows = _windows(fields, arch, rotated)
        rope, sliding_rope, max_context = _ropes(fields, arch, head_size)
        of_windows = (sliding_rope if window else rope for window in windows)
        query_scalar = own("query_pre_attn_scalar", NUMBER, head_size)
        dtype_key = "torch_dtype" if fields.values.get("dtype") is None else "dtype"
        activation = _ACTIVATIONS[fields.read(act, one_of(*_ACTIVATIONS), "silu")]
        if "swiglu_limit" in arch.defaults:
            fields.read("swiglu_alpha", one_of(SWIGLU_ALPHA))
            fields.read("swiglu_limit", one_of(SWIGLU_LIMIT))
            activation = "swigluoai"
        experts = _experts(fields, arch, num_layers)
        is_mxfp4 = experts is not None and experts.mxfp4
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
                rope if turns else None for rope, turns in zip(of_windows, rotated, strict=True)
            ),
            windows=windows,
            tie_embeddings=fields.read("tie_word_embeddings", BOOLEAN, False),
            qkv_bias=bias(arch.qkv_bias),
            o_bias=bias(arch.o_bias),
            mlp_bias=bias(arch.mlp_bias),
            max_context=max_context,
            eos_token_ids=_eos_token_ids(fields),
            dtype=fields.read(dtype_key, one_of("bfloat16", "float32", "float16"), "float32"),
            activation=activation,
            score_scale=float(own("attention_multiplier", NUMBER, query_scalar**-0.5)),
            attention_softcap=float(own("attn_logit_softcapping", NOT_NEGATIVE, 0.0)),
            logit_softcap=float(own("final_logit_softcapping", NOT_NEGATIVE, 0.0)),
            logit_scale=1 / float(own("logits_scaling", NUMBER, 1.0)),
            embedding_scale=hidden_size**0.5
            if arch.scaled_embedding
            else float(own("embedding_multiplier", NUMBER, 1.0)),
            residual_scale=float(own("residual_multiplier", NUMBER, 1.0)),
            experts=experts,
            quantization=None if is_mxfp4 else parse_quantization_config(fields),
        )

    @property
    def arch(self) -> Architecture:
        """How its architecture differs from Llama's."""
        return ARCHITECTURES[self.architecture]

    @property
    def head_order(self) -> list[int] | None:
        """Where each element of a head of queries and keys lies in the checkpoint; None: there.

        Elements that turn together are put half a head apart, and those that do not turn behind the
        turned ones of each half, so that every model is turned alike.
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

    def layer_tensors(self, index: int) -> dict[str, Shapes]:
        """Of a layer: what each field of its `LayerWeights` is joined of; none that is absent."""
        hidden, head = self.hidden_size, self.head_size
        q, kv = self.num_heads * head, self.num_kv_heads * head
        layer, attention = f"model.layers.{index}", f"model.layers.{index}.self_attn"
        arch, tensors = self.arch, dict[str, Shapes]()
        for field in ("input_norm", "attention_norm", "mlp_norm", "output_norm"):
            if name := getattr(arch, field):
                tensors[field] = {f"{layer}.{name}.weight": (hidden,)}
        if arch.qk_norm != "none":
            sizes = (head, head) if arch.qk_norm == "head" else (q, kv)
            for name, size in zip("qk", sizes, strict=True):
                tensors[f"{name}_norm"] = {f"{attention}.{name}_norm.weight": (size,)}
        if arch.sinks:
            tensors["sinks"] = {f"{attention}.sinks": (self.num_heads,)}
        for field, outputs, inputs, biased in (
            (
                "qkv",
                {"self_attn.q": q, "self_attn.k": kv, "self_attn.v": kv},
                hidden,
                self.qkv_bias,
            ),
            ("o", {"self_attn.o": hidden}, q, self.o_bias),
            *((field, *matrix) for field, matrix in self._mlp(index).items()),
        ):
            parts = {f"{layer}.{name}_proj": size for name, size in outputs.items()}
            if field in arch.joined:
                module = next(iter(outputs)).partition(".")[0]
                parts = {f"{layer}.{module}.{field}_proj": sum(outputs.values())}
            tensors[field] = {f"{name}.weight": (size, inputs) for name, size in parts.items()}
            if biased:
                tensors[f"{field}_bias"] = {f"{name}.bias": (size,) for name, size in parts.items()}
        return tensors

    def _mlp(self, index: int) -> dict[str, tuple[dict[str, int], int, bool]]:
        """The matrices of a layer's MLP, or of the expert that all tokens take."""
        hidden, inner, module = self.hidden_size, self.intermediate_size, "mlp"
        if self.experts is not None and self.experts.layers[index]:
            inner, module = self.experts.shared_size, "mlp.shared_expert"
        if not inner:
            return {}
        return {
            "gate_up": ({f"{module}.gate": inner, f"{module}.up": inner}, hidden, self.mlp_bias),
            "down": ({f"{module}.down": hidden}, inner, self.mlp_bias),
        }

    def expert_tensors(self, index: int) -> tuple[dict[str, Shapes], list[dict[str, Shapes]]]:
        """Of a layer with experts: what `ExpertWeights` has once, and what it has of each."""
        names, experts = self.arch.experts, self.experts
        if names is None or experts is None or not experts.layers[index]:
            return {}, []
        module, hidden = f"model.layers.{index}.{names.module}", self.hidden_size
        router = f"{module}.{names.router}"
        once: dict[str, Shapes] = {"router": {f"{router}.weight": (experts.count, hidden)}}
        if names.biased:
            once["router_bias"] = {f"{router}.bias": (experts.count,)}
        if experts.shared_size:
            once["shared_gate"] = {f"{module}.shared_expert_gate.weight": (1, hidden)}
        each: list[dict[str, Shapes]] = []
        for number in range(experts.count):
            of, tensors = f"{module}.experts.{number}", dict[str, Shapes]()
            for field, modules, outputs, inputs in (
                ("gate_up", names.gate_up, experts.size, hidden),
                ("down", (names.down,), hidden, experts.size),
            ):
                parts = [f"{of}.{name}" for name in modules]
                tensors[field] = {f"{name}.weight": (outputs, inputs) for name in parts}
                if names.biased:
                    tensors[f"{field}_bias"] = {f"{name}.bias": (outputs,) for name in parts}
            each.append(tensors)
        return once, each

    def _parts(self) -> Iterator[Shapes]:
        """Every tensor; those that are joined to one together. A tied `lm_head` is none."""
        yield {EMBEDDING: (self.vocab_size, self.hidden_size)}
        for index in range(self.num_layers):
            once, each = self.expert_tensors(index)
            for fields in (self.layer_tensors(index), once, *each):
                yield from fields.values()
        yield {FINAL_NORM: (self.hidden_size,)}
        if not self.tie_embeddings:
            yield {LM_HEAD: (self.vocab_size, self.hidden_size)}

    @property
    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        """What a checkpoint has to hold. Raises CheckpointError for what its format cannot."""
        found: dict[str, TensorSpec] = {}
        for parts in self._parts():
            for name, shape in parts.items():
                if self.is_quantized(parts):
                    assert self.quantization is not None
                    found |= self.quantization.tensors(name.removesuffix(".weight"), shape)
                elif (part := self.stacked_part(name)) is not None:
                    assert self.experts is not None
                    found |= part.specs(shape, self.experts.count, self.experts.mxfp4)
                else:
                    found[name] = TensorSpec(shape)
        return found

    def stacked_part(self, name: str) -> StackedPart | None:
        """Where a tensor lies that the checkpoint has in one with those of other experts."""
        names = self.arch.experts
        return StackedPart.from_name(name) if names is not None and names.stacked else None

    def is_quantized(self, parts: Shapes) -> bool:
        """Whether the checkpoint holds this matrix quantised. Raises CheckpointError if in part."""
        if self.quantization is None or EMBEDDING in parts:
            return False
        modules = [name.removesuffix(".weight") for name, shape in parts.items() if len(shape) == 2]
        found = {module: self.quantization.is_quantized(module) for module in modules}
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


def _ropes(fields: Fields, arch: Architecture, head_size: int) -> tuple[Rope, Rope, int]:
    """Of layers that see all and of those that slide, and the longest context, in tokens.

    From `rope_parameters` (transformers 5), which may have both by name, or from `rope_theta` and
    `rope_scaling` (before), which goes first: guides to longer contexts tell users to add it.
    """
    key = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    default = arch.defaults.get("rope_parameters", {})
    inside = Fields(fields.file, fields.read(key, OBJECT, default), f"{key}.")
    theta = fields.read("rope_theta", NUMBER, 10000.0)
    if "rope_local_base_freq" not in arch.defaults:
        rope, context = _rope(fields, arch, inside, theta, head_size)
        return rope, rope, context
    full, sliding = inside, inside._replace(values={})  # the old form scales the first only
    if FULL in inside.values or SLIDING in inside.values:
        full, sliding = (
            Fields(fields.file, inside.read(kind, OBJECT, {}), f"{inside.prefix}{kind}.")
            for kind in (FULL, SLIDING)
        )
    rope, context = _rope(fields, arch, full, theta, head_size)
    local = fields.read("rope_local_base_freq", NUMBER)
    return rope, _rope(fields, arch, sliding, local, head_size)[0], context


def _rope(
    fields: Fields, arch: Architecture, inside: Fields, theta: float, head_size: int
) -> tuple[Rope, int]:
    """One rope, as the object `inside` describes it, and the longest context."""
    for key in inside.values.keys() - _ROPE_KEYS:
        inside.read(key, Check(lambda value: not value, "null, for what it does is not followed"))
    context = fields.read("max_position_embeddings", COUNT)
    rope = Rope(
        float(inside.read("rope_theta", NUMBER, theta)),
        size=_turned(fields, arch, inside, head_size),
    )
    kinds = ("default", "linear", "llama3", "dynamic", "yarn", "longrope")
    kind = inside.read("rope_type", one_of(*kinds), inside.values.get("type", "default"))
    if kind == "default":
        return rope, context
    # Where the original context is not given, transformers takes the current one.
    key = "original_max_position_embeddings"
    original = int(fields.read(key, TOKENS, inside.read(key, TOKENS, context)))
    stretched = context / original if kind == "longrope" else None
    factor = float(inside.read("factor", NUMBER, stretched))
    rope = replace(rope, scaling=kind, factor=factor, original_context=original)
    if kind == "llama3":
        low, high = (float(inside.read(f"{end}_freq_factor", NUMBER)) for end in ("low", "high"))
        rope = replace(rope, low_freq_factor=low, high_freq_factor=high)
    elif kind == "dynamic":
        if (rope.size or head_size) == 2:
            raise fields.error("head_dim", head_size, "more than two dimensions that are turned")
        # For the longest context, whatever a sequence's length: what the KV cache has stays right.
        context = int(context * factor)
    elif kind == "yarn":
        if rope.theta == 1:
            raise inside.error("rope_theta", rope.theta, "a number other than 1")
        rope = replace(
            rope,
            attention_factor=_yarn_attention(inside, factor),
            beta_fast=float(inside.read("beta_fast", NUMBER, 32)),
            beta_slow=float(inside.read("beta_slow", NUMBER, 1)),
            truncate=inside.read("truncate", BOOLEAN, True),
        )
        context = max(context, int(original * factor))
    elif kind == "longrope":
        pairs = (rope.size or head_size) // 2
        numbers = Check(
            lambda value: (
                isinstance(value, list) and len(value) == pairs and all(map(NUMBER.holds, value))
            ),
            f"{pairs} numbers above 0",
        )
        # By the model's context, whatever a sequence's length.
        which = "long_factor" if context > original else "short_factor"
        wider = math.sqrt(1 + math.log(max(1.0, factor)) / math.log(original))
        rope = replace(
            rope,
            attention_factor=float(inside.read("attention_factor", NUMBER, wider)),
            factors=tuple(inside.read(which, numbers)),
        )
    if not COUNT.holds(context):
        supported = f"what makes a context of 1 to {MAX_SIZE} tokens"
        raise inside.error("factor", factor, supported)
    return rope, context


def _yarn_attention(inside: Fields, factor: float) -> float:
    """By what sines and cosines grow."""

    def wider(scale: float) -> float:
        return 0.1 * scale * math.log(max(1.0, factor)) + 1

    scales = [inside.read(key, NOT_NEGATIVE, 0) for key in ("mscale", "mscale_all_dim")]
    own = wider(scales[0]) / wider(scales[1]) if all(scales) else wider(1)
    return float(inside.read("attention_factor", NUMBER, own))


def _turned(fields: Fields, arch: Architecture, inside: Fields, head_size: int) -> int:
    """Dimensions of a head that are turned; 0: all."""
    key, check = "partial_rotary_factor", one_of(1)
    if key in arch.defaults:
        check = Check(
            lambda value: NUMBER.holds(value) and value <= 1 and int(head_size * value) % 2 == 0,
            f"a number up to 1, by which an even number of {head_size} dimensions is turned",
        )
    share = inside.read(key, check, fields.read(key, check, 1))
    return 0 if share == 1 else int(head_size * share)


def _rotated(fields: Fields, arch: Architecture, num_layers: int) -> tuple[bool, ...]:
    """Of each layer: whether it turns queries and keys."""
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
    """Of each layer."""
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
        slides = [not turns for turns in rotated]
    elif kind in ("from", "alternate"):
        first = fields.read("max_window_layers", whole(0, MAX_SIZE))
        slides = [index >= first for index in range(count)]
        if kind == "alternate":
            slides = [index % 2 == 0 and not behind for index, behind in enumerate(slides)]
    else:
        slides = [True] * count
    return tuple(window if slide else None for slide in slides)


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
