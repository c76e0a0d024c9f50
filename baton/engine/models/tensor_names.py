"""The tensors of a checkpoint: their names, shapes and types, as a model's configuration implies.

Some checkpoints have the experts of a layer in one tensor (`StackedExperts`); gpt-oss's also in
MXFP4: `gate_up_proj_blocks` is uint8 `[experts, out, in / 32, 16]`, two numbers of 4 bits a byte,
and `gate_up_proj_scales` uint8 `[experts, out, in / 32]`. `down_proj` is stored alike, and biases
are `[experts, out]`.

Multimodal checkpoints have their text model's names behind a prefix; what belongs to images, video
or audio is skipped. Torch-free.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from baton.engine.checkpoint.tensor_headers import StoredTensor, stored_tensors
from baton.engine.models.architectures import StackedExperts
from baton.engine.models.model_config import ModelConfig
from baton.engine.quantization.config import (
    MXFP4_GROUP,
    AwqConfig,
    GgufConfig,
    GptqConfig,
    QuantizationConfig,
    Shapes,
    TensorSpec,
)
from baton.errors import CheckpointError
from baton.gguf.reader import SUFFIX

STACKED = StackedExperts(transposed=None)  # as transformers names them
EMBEDDING, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
CLASSIFICATION_HEAD = "score.weight"
LAYER_EMBEDDING = "model.embed_tokens_per_layer.weight"
_KEPT = (EMBEDDING, LAYER_EMBEDDING, CLASSIFICATION_HEAD)  # not quantised
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_PART = re.compile(r"(.+)\.experts\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_TEXT_PREFIX = re.compile(r"(?:model\.)?(?:language_model|text_model)\.(?:model\.)?")
_KV_SCALE = re.compile(r".+\.self_attn\.(?:[kv]_proj\.|attn\.)?[kv]_scale")  # of KV in fp8
_KV_PART = re.compile(r"\.self_attn\.[kv]_(?:proj|norm)\.")  # not used where K and V are read only
# Of the layer that predicts further tokens, in models with linear attention: as others name them.
_MTP_NAMES = {
    "mtp.fc.": "eh_proj.",
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "shared_head.norm.",
    "mtp.layers.0.": "",
}
_MTP = re.compile(r"(?:model\.)?mtp[._]")
_NOT_TEXT = re.compile(
    r"(?:model\.)?(?:vis|audio|multi_modal_projector\.|mm_projector\.|embed_(?:vision|audio)\."
    r"|connector\.|image_newline$)"
)


class StackedPart(NamedTuple):
    """The place of an expert's matrix or bias: some outputs of an expert in `tensor`."""

    tensor: str
    expert: int
    outputs: slice
    is_bias: bool
    transposed: bool | None  # None: if its sizes say so

    @classmethod
    def from_name(cls, name: str, stacked: StackedExperts, size: int) -> StackedPart | None:
        """Parses a name such as `….experts.3.up_proj.weight`; None if it is not an expert's.

        size: outputs of an expert's gate.
        """
        if not (found := _PART.fullmatch(name)):
            return None
        module, expert, which, kind = found.groups()
        outputs = slice(None)
        if which != "down":
            at = which == "up"
            outputs = (
                slice(int(at), None, 2)
                if stacked.interleaved
                else slice(at * size, (at + 1) * size)
            )
        tensor = f"{module}.{stacked.down if which == 'down' else stacked.gate_up}"
        return cls(tensor, int(expert), outputs, kind == "bias", stacked.transposed)

    def specs(self, shape: tuple[int, ...], experts: int, mxfp4: bool) -> dict[str, TensorSpec]:
        """The checkpoint's tensors, of all experts, that hold a part of this shape."""
        outputs = shape[0] * (1 if self.outputs == slice(None) else 2)
        if self.is_bias:
            return {f"{self.tensor}_bias": TensorSpec((experts, outputs))}
        inputs = shape[1]
        if not mxfp4:
            plain, swapped = (experts, outputs, inputs), (experts, inputs, outputs)
            if self.transposed is None:
                return {self.tensor: TensorSpec(plain, other=swapped)}
            return {self.tensor: TensorSpec(swapped if self.transposed else plain)}
        if inputs % MXFP4_GROUP:
            raise CheckpointError(
                f"{self.tensor} has {inputs} inputs: in MXFP4 they have to be a multiple of "
                f"{MXFP4_GROUP}"
            )
        blocks, kinds = (experts, outputs, inputs // MXFP4_GROUP), ("U8",)
        return {
            f"{self.tensor}_blocks": TensorSpec((*blocks, MXFP4_GROUP // 2), kinds),
            f"{self.tensor}_scales": TensorSpec(blocks, kinds),
        }


def layer_name(config: ModelConfig, index: int) -> str:
    """The module of a layer in the checkpoint."""
    return f"model.layers.{config.first_layer + index}"


def predictor_tensors(config: ModelConfig) -> dict[str, Shapes]:
    """The parts of `PredictorWeights`; empty but for a layer that predicts further tokens."""
    if not config.first_layer:
        return {}
    layer, size = layer_name(config, 0), config.hidden_size
    return {
        "embedding_norm": {f"{layer}.enorm.weight": (size,)},
        "hidden_norm": {f"{layer}.hnorm.weight": (size,)},
        "projection": {f"{layer}.eh_proj.weight": (size, 2 * size)},
    }


def final_norm(config: ModelConfig) -> Shapes:
    """The norm before the output layer."""
    name = f"{layer_name(config, 0)}.shared_head.norm.weight" if config.first_layer else FINAL_NORM
    return {name: (config.hidden_size,)}


def layer_tensors(config: ModelConfig, index: int) -> dict[str, Shapes]:
    """The parts that each field of a layer's `LayerWeights` is joined from, but absent fields."""
    config = config.layer(index)
    hidden, head = config.hidden_size, config.head_size
    q, kv = config.num_heads * head, config.num_kv_heads * head
    layer = layer_name(config, index)
    attention = f"{layer}.self_attn"
    arch, tensors = config.arch, dict[str, Shapes]()
    for field in ("input_norm", "attention_norm", "mlp_norm", "output_norm"):
        if name := getattr(arch, field):
            tensors[field] = {f"{layer}.{name}.weight": (hidden,)}
    linear = config.delta_rule is not None and config.delta_rule.layers[index]
    if config.qk_norm in ("head", "row") and not linear:
        sizes = (head, head) if config.qk_norm == "head" else (q, kv)
        taken = 1 if config.only_reads(index) else 2
        for field, name, size in zip("qk"[:taken], arch.qk_norms, sizes, strict=False):
            tensors[f"{field}_norm"] = {f"{attention}.{name}.weight": (size,)}
    if arch.sinks and not linear:
        tensors["sinks"] = {f"{attention}.sinks": (config.num_heads,)}
    queries = 2 * q if arch.gated_attention else q  # each with its gate
    projections = {"self_attn.q_proj": queries, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
    if config.layer_heads:
        taken = 1 if config.only_reads(index) else 3 - config.layer_heads[index].keys_as_values
        projections = dict(list(projections.items())[:taken])
    if arch.layer_scale:
        tensors["layer_scale"] = {f"{layer}.layer_scalar": (1,)}
    if (latent := config.latent) is not None:
        projections = {
            **(
                {"self_attn.q_a_proj": latent.q_rank}
                if latent.q_rank
                else {"self_attn.q_proj": config.num_heads * latent.query_size}
            ),
            "self_attn.kv_a_proj_with_mqa": head,
        }
    values = config.num_heads * config.value_size
    attention_fields = (
        ("qkv", projections, hidden, config.qkv_bias),
        ("o", {"self_attn.o_proj": hidden}, values, config.o_bias),
    )
    for field, outputs, inputs, biased in (
        *(() if linear else attention_fields),
        *((field, *matrix) for field, matrix in _mlp(config, index).items()),
    ):
        parts = {f"{layer}.{name}": size for name, size in outputs.items()}
        if field in arch.joined:
            module = next(iter(outputs)).partition(".")[0]
            parts = {f"{layer}.{module}.{field}_proj": sum(outputs.values())}
        tensors[field] = {f"{name}.weight": (size, inputs) for name, size in parts.items()}
        if biased:
            tensors[f"{field}_bias"] = {f"{name}.bias": (size,) for name, size in parts.items()}
    return tensors


def delta_rule_tensors(config: ModelConfig, index: int) -> dict[str, Shapes]:
    """The parts that each field of a layer's `DeltaRuleWeights` is joined from; empty without."""
    if config.delta_rule is None or not config.delta_rule.layers[index]:
        return {}
    delta, hidden = config.delta_rule.shape, config.hidden_size
    module, names = f"{layer_name(config, index)}.linear_attn", config.arch.delta_rule
    values, heads = delta.value_heads * delta.value_size, delta.value_heads
    channels = delta.key_heads * delta.head_channels
    sizes = {"qkvz": channels + values, "qkv": channels, "z": values} | {
        "ba": 2 * heads, "b": heads, "a": heads
    }  # fmt: skip
    parts = {f"{module}.{name}.weight": (sizes[name.rpartition("_")[2]], hidden) for name in names}
    half = len(names) // 2
    return {
        "delta_in": dict(list(parts.items())[:half]),
        "delta_gates": dict(list(parts.items())[half:]),
        "delta_out": {f"{module}.out_proj.weight": (hidden, values)},
        "conv": {f"{module}.conv1d.weight": (channels, 1, delta.kernel)},
        "log_decay": {f"{module}.A_log": (heads,)},
        "decay_bias": {f"{module}.dt_bias": (heads,)},
        "head_scale": {f"{module}.norm.weight": (delta.value_size,)},
    }


def _mlp(config: ModelConfig, index: int) -> dict[str, tuple[dict[str, int], int, bool]]:
    """The matrices of a layer's MLP, or of the expert that all tokens take."""
    hidden, inner, module = config.hidden_size, config.intermediate_size, config.arch.mlp
    names = config.arch.experts
    if names is not None and config.experts is not None and config.experts.layers[index]:
        inner, module = config.experts.shared_size, f"{names.module}.{names.shared}".lstrip(".")
    if not inner:
        return {}
    if config.has_wide_mlps and config.only_reads(index):
        inner *= 2
    gate_up = {f"{module}.{name}_proj": inner for name in ("gate", "up")}
    return {
        "gate_up": (gate_up, hidden, config.mlp_bias),
        "down": ({f"{module}.down_proj": hidden}, inner, config.mlp_bias),
    }


def layer_input_tensors(config: ModelConfig, index: int) -> dict[str, Shapes]:
    """The parts of a layer's `LayerInputWeights`; empty without."""
    if not (size := config.layer_input_size):
        return {}
    layer, hidden = layer_name(config, index), config.hidden_size
    return {
        "input_gate": {f"{layer}.per_layer_input_gate.weight": (size, hidden)},
        "input_up": {f"{layer}.per_layer_projection.weight": (hidden, size)},
        "layer_input_norm": {f"{layer}.post_per_layer_input_norm.weight": (hidden,)},
    }


def token_input_tensors(config: ModelConfig) -> dict[str, Shapes]:
    """The parts of `TokenInputWeights`; empty without."""
    if not (size := config.layer_input_size):
        return {}
    outputs, hidden = config.num_layers * size, config.hidden_size
    return {
        "embedding": {LAYER_EMBEDDING: (config.vocab_size, outputs)},
        "projection": {"model.per_layer_model_projection.weight": (outputs, hidden)},
        "norm": {"model.per_layer_projection_norm.weight": (size,)},
    }


def latent_tensors(config: ModelConfig, index: int) -> dict[str, Shapes]:
    """The parts of a layer's `LatentWeights`; `kv_b` is what its projections are cut from."""
    if (latent := config.latent) is None:
        return {}
    attention, heads = f"{layer_name(config, index)}.self_attn", config.num_heads
    tensors: dict[str, Shapes] = {
        "kv_a_norm": {f"{attention}.kv_a_layernorm.weight": (latent.kv_rank,)},
        "kv_b": {
            f"{attention}.kv_b_proj.weight": (
                heads * (latent.nope_size + latent.value_size),
                latent.kv_rank,
            )
        },
    }
    if latent.q_rank:
        tensors["q_a_norm"] = {f"{attention}.q_a_layernorm.weight": (latent.q_rank,)}
        q_b = (heads * latent.query_size, latent.q_rank)
        tensors["q_b"] = {f"{attention}.q_b_proj.weight": q_b}
    return tensors


def expert_tensors(
    config: ModelConfig, index: int
) -> tuple[dict[str, Shapes], list[dict[str, Shapes]]]:
    """The parts of a layer's `MoeWeights`, and of each of its `ExpertWeights`."""
    names, experts = config.arch.experts, config.experts
    if names is None or experts is None or not experts.layers[index]:
        return {}, []
    layer, hidden = layer_name(config, index), config.hidden_size
    module = f"{layer}.{names.module}".rstrip(".")
    router = f"{module}.{names.router}"
    shared: dict[str, Shapes] = {"router": {f"{router}.weight": (experts.count, hidden)}}
    if names.biased:
        shared["router_bias"] = {f"{router}.bias": (experts.count,)}
    if names.correction:
        # ERNIE's has two axes.
        shape = (1,) * names.correction.startswith("moe_statics") + (experts.count,)
        shared["correction"] = {f"{module}.{names.correction}": shape}
    if experts.shared_size and names.shared_gate:
        shared["shared_gate"] = {f"{module}.shared_expert_gate.weight": (1, hidden)}
    if names.share_scale:
        shared["share_scale"] = {f"{module}.{names.share_scale}": (experts.count,)}
    if names.input_norm:
        shared["input_norm"] = {f"{layer}.{names.input_norm}.weight": (hidden,)}
        shared["router_norm"] = {f"{module}.router.scale": (hidden,)}
        for field, norm in (("dense_norm", 1), ("expert_norm", 2)):
            name = f"{layer}.{config.arch.output_norm}_{norm}.weight"
            shared[field] = {name: (hidden,)}
    each: list[dict[str, Shapes]] = []
    for number in range(experts.count):
        prefix, tensors = f"{module}.experts.{number}", dict[str, Shapes]()
        for field, modules, outputs, inputs in (
            ("gate_up", names.gate_up, experts.size, hidden),
            ("down", (names.down,), hidden, experts.size),
        ):
            parts = [f"{prefix}.{name}" for name in modules]
            tensors[field] = {f"{name}.weight": (outputs, inputs) for name in parts}
            if names.biased:
                tensors[f"{field}_bias"] = {f"{name}.bias": (outputs,) for name in parts}
        each.append(tensors)
    return shared, each


def _parts(config: ModelConfig) -> Iterator[Shapes]:
    """All tensors of a model, those that are joined together; a tied `lm_head` is left out."""
    yield {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for index in range(config.num_layers):
        shared, each = expert_tensors(config, index)
        delta, latent = delta_rule_tensors(config, index), latent_tensors(config, index)
        once = layer_tensors(config, index), layer_input_tensors(config, index)
        for fields in (*once, latent, delta, shared, *each):
            yield from fields.values()
    yield from token_input_tensors(config).values()
    yield from predictor_tensors(config).values()
    yield final_norm(config)
    if not config.tie_embeddings:
        yield {LM_HEAD: (config.vocab_size, config.hidden_size)}
    if config.num_labels:
        yield {CLASSIFICATION_HEAD: (config.num_labels, config.hidden_size)}


def checkpoint_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """The tensors that a checkpoint must have. Raises CheckpointError for unsupported shapes."""
    found: dict[str, TensorSpec] = {}
    for parts in _parts(config):
        scheme = scheme_of(config, parts)
        for name, shape in parts.items():
            if scheme is not None:
                found |= scheme.tensors(name.removesuffix(".weight"), shape)
            elif (part := stacked_part(config, name)) is not None:
                assert config.experts is not None
                found |= part.specs(shape, config.experts.count, config.experts.mxfp4)
            else:
                found[name] = TensorSpec(shape)
    return found


def stacked_part(config: ModelConfig, name: str) -> StackedPart | None:
    """The place of an expert's tensor, where the checkpoint stacks experts; else None."""
    names, experts = config.arch.experts, config.experts
    if names is None or experts is None:
        return None
    stacked = names.stacked or (STACKED if experts.stacked else None)
    return StackedPart.from_name(name, stacked, experts.size) if stacked else None


def as_stored(config: ModelConfig, stored: Mapping[str, StoredTensor]) -> ModelConfig:
    """The configuration with what names of tensors say, and config.json does not.

    Whether experts are stored together, as some of Qwen3.5's are, and which modules AWQ and GPTQ
    left dense, as GPTQ leaves routers.
    """
    if config.experts is not None and any(name.endswith(f".{STACKED.down}") for name in stored):
        config = replace(config, experts=replace(config.experts, stacked=True))
    if isinstance(quantization := config.quantization, AwqConfig | GptqConfig):
        modules = {name.removesuffix(".weight") for name in stored if name.endswith(".weight")}
        dense = {_named_module(config, one) for one in modules if f"{one}.qweight" not in stored}
        ignored = quantization.ignored._replace(names=quantization.ignored.names | dense)
        config = replace(config, quantization=replace(quantization, ignored=ignored))
    return config


def scheme_of(config: ModelConfig, parts: Shapes) -> QuantizationConfig | None:
    """How the checkpoint has this matrix quantised; None if it is not.

    Raises CheckpointError if its parts differ, unless it is a GGUF file.
    """
    is_gguf = isinstance(config.quantization, GgufConfig)
    is_kept = any(name in _KEPT or name.endswith(".eh_proj.weight") for name in parts)
    if config.quantization is None or (is_kept and not is_gguf):
        return None
    modules = [name.removesuffix(".weight") for name, shape in parts.items() if len(shape) == 2]
    found = {
        module: config.quantization.scheme(_named_module(config, module)) for module in modules
    }
    if is_gguf:
        return config.quantization if any(found.values()) else None
    if len(set(found.values())) > 1:
        raise CheckpointError(
            f"quantization_config ignores some of {', '.join(found)}, or has them in several "
            "formats: they are multiplied together, and have to be quantised alike, all or none"
        )
    return next(iter(found.values()), None)


def is_float32(config: ModelConfig, name: str) -> bool:
    """Whether a tensor is float32 whatever the model's type: of a router that needs it."""
    names = config.arch.experts
    if names is None:
        return False
    return name.endswith(names.correction or "?") or (
        names.float32_router and name.endswith(f"{names.module}.{names.router}.weight")
    )


def num_parameters(config: ModelConfig) -> int:
    """Weights and biases; tied embeddings count once."""
    return sum(math.prod(shape) for parts in _parts(config) for shape in parts.values())


def text_tensors(path: Path, config: ModelConfig) -> tuple[dict[str, StoredTensor], int, int]:
    """The tensors of the text model in a directory, by the names that this package uses.

    Of a layer that predicts further tokens those, without its copies of what the model has. Also
    the number and bytes of those of a multimodal model's other parts. Raises CheckpointError.
    """
    text, others = stored_tensors(path, config.tie_embeddings), list[StoredTensor]()
    if config.wrapper:
        others = [tensor for name, tensor in text.items() if _NOT_TEXT.match(name)]
        text = {text_name(name): one for name, one in text.items() if not _NOT_TEXT.match(name)}
    if (quantization := config.quantization) is not None:
        text = {quantization.canonical(name): one for name, one in text.items()}
    if config.arch.delta_rule:
        text = {_mtp_name(config, name): one for name, one in text.items()}
    if config.first_layer:
        own = f"{layer_name(config, 0)}."
        copies = f"{own}embed_tokens.", f"{own}shared_head.head."
        text = {
            name: one
            for name, one in text.items()
            if name in (EMBEDDING, LM_HEAD)
            or (name.startswith(own) and not name.startswith(copies))
        }
    return text, len(others), sum(tensor.num_bytes for tensor in others)


def text_name(name: str) -> str:
    """The name in a text model of `model.language_model.…`, `language_model.model.…` and others."""
    rest = _TEXT_PREFIX.sub("", name, count=1)
    return rest if rest in (name, LM_HEAD) else f"model.{rest}"


def _mtp_name(config: ModelConfig, name: str) -> str:
    for prefix, inner in _MTP_NAMES.items():
        if name.startswith(prefix):
            number = config.first_layer or config.num_layers
            return f"model.layers.{number}.{inner}{name.removeprefix(prefix)}"
    return name


def _named_module(config: ModelConfig, module: str) -> str:
    """The name of a module in the checkpoint's quantization_config."""
    own = f"{layer_name(config, 0)}."
    if config.first_layer and config.arch.delta_rule and module.startswith(own):
        return f"mtp.layers.0.{module.removeprefix(own)}"
    return module


def check_tensors(path: Path, config: ModelConfig, stored: Mapping[str, StoredTensor]) -> None:
    """Raises CheckpointError unless a checkpoint's tensors are those that its config implies."""
    expected = checkpoint_tensors(config)
    source = "metadata" if path.suffix == SUFFIX else "config.json"
    for name, (shape, dtypes, optional, other) in expected.items():
        if name not in stored:
            if optional:
                continue
            raise CheckpointError(f"{path} lacks tensor {name}, which its {source} implies")
        found = stored[name]
        if found.dtype not in dtypes:
            raise CheckpointError(
                f"{found.file}: tensor {name} has dtype {found.dtype}; supported: "
                f"{', '.join(dtypes)}"
            )
        if (found.shape or (1,)) not in (shape, other):
            raise CheckpointError(
                f"{found.file}: tensor {name} has shape {list(found.shape)}; {source} implies "
                f"{list(shape)}"
            )
    unused = config.num_layers, config.num_layers + config.predicting_layers
    for name in sorted(stored.keys() - expected.keys()):
        layer = _LAYER.match(name)
        if layer and unused[0] <= int(layer[1]) < unused[1]:
            continue  # layers that predict further tokens
        if layer and config.only_reads(int(layer[1])) and _KV_PART.search(name):
            continue
        # Old exports saved rotary tables, and copies of a tied embedding.
        tied_copy = config.tie_embeddings and name == LM_HEAD
        # Of layers that predict further tokens, which are not used.
        further = _MTP.match(name)
        kv_scale = config.quantization is not None and _KV_SCALE.fullmatch(name)
        if not (tied_copy or further or kv_scale or name.endswith("rotary_emb.inv_freq")):
            raise CheckpointError(
                f"{stored[name].file}: tensor {name} is not part of {config.architecture} as "
                f"{source} describes it"
            )
