"""Loads a model's weights from safetensors, or makes random ones for benchmarks.

Query, key and value projections are joined into one matrix, and so are gate and up: each part is
copied from the mapped file to its place on the device, so that memory stays near the model's size
and a GPU's model needs none of the host's. Weights are converted one by one as they are read.
"""

from __future__ import annotations

import itertools
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from baton.config import EngineConfig
from baton.engine.checkpoint.tensor_headers import StoredTensor, stored_tensors
from baton.engine.models.lora import LoraSlots
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.output_order import arranged, latent_order
from baton.engine.models.shard import WHOLE, Shard
from baton.engine.models.tensor_names import (
    CLASSIFICATION_HEAD,
    EMBEDDING,
    LM_HEAD,
    StackedPart,
    as_stored,
    check_tensors,
    checkpoint_tensors,
    delta_rule_tensors,
    expert_tensors,
    final_norm,
    is_float32,
    latent_tensors,
    layer_input_tensors,
    layer_tensors,
    num_parameters,
    predictor_tensors,
    scheme_of,
    stacked_part,
    text_tensors,
    token_input_tensors,
)
from baton.engine.models.weights import (
    DeltaRuleWeights,
    ExpertWeights,
    HeadWeights,
    LatentWeights,
    LayerInputWeights,
    LayerWeights,
    ModelWeights,
    MoeWeights,
    PredictorWeights,
    TokenInputWeights,
)
from baton.engine.quantization.config import GgufConfig, Shapes, weight_format
from baton.engine.quantization.gguf import QUANTIZED, GgufTensors, join_weights, read_gguf
from baton.engine.quantization.linear_weight import DenseWeight, LinearWeight
from baton.engine.quantization.methods import read_weight
from baton.engine.quantization.mxfp4 import Mxfp4Weight
from baton.errors import CheckpointError
from baton.gguf.reader import SUFFIX

log = logging.getLogger(__name__)
RANDOM_STD = 0.02
_NOISE = (1 << 24) - 3  # numbers; prime, so that a matrix's rows differ
_GIB = float(1 << 30)
_SCALE = re.compile(r"(norm|norm_[12])\.weight$|(layer_scalar|router\.scale|expert_scale)$")
_EXPERT_NUMBER = re.compile(r"\.experts\.(\d+)\.")

Prepare = Callable[[LinearWeight, bool], LinearWeight]
"""Converts a weight as soon as it is read; the flag says that it is the output layer's."""


MakeTensor = Callable[[Shapes], Tensor]
"""Makes the tensor that these parts of the checkpoint, by name, join to along the first axis."""

MakeWeight = Callable[[Shapes], LinearWeight]


def _as_read(weight: LinearWeight, is_output: bool) -> LinearWeight:
    return weight


def load_weights(
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    prepare: Prepare = _as_read,
    shard: Shard = WHOLE,
    shared: ModelWeights | None = None,
) -> ModelWeights:
    """The weights in a model directory, converted to dtype and moved to device.

    prepare: applied to every weight but routers; embedding, norms and biases stay as they are ·
    shared: of the model whose embedding and output layer are taken instead of read.

    Raises CheckpointError naming the file and the tensor when a file is missing, broken, truncated
    or pickled, or when a tensor is missing, unknown or of another shape than the config implies.
    """
    if not path.is_dir() and path.suffix != SUFFIX:
        raise CheckpointError(f"{path} is not a model directory: it has no weights to load")
    stored, others, other_bytes = text_tensors(path, config)
    if others:
        log.info(
            "%s: %d tensors (%.2f GiB) of images, video or audio are not loaded: text only",
            path.name, others, other_bytes / _GIB,
        )  # fmt: skip
    if config.tie_embeddings and _has_own_head(stored):
        log.warning(
            "%s has an lm_head.weight of its own, which is used: tie_word_embeddings in "
            "config.json should be false", path,
        )  # fmt: skip
        config = replace(config, tie_embeddings=False)
    config = as_stored(config, stored)
    check_tensors(path, config, stored)
    with ExitStack() as stack:
        files = {
            file: GgufTensors(file, stored)
            if file.suffix == SUFFIX
            else stack.enter_context(safe_open(file, framework="pt", device="cpu"))
            for file in {tensor.file for tensor in stored.values()}
        }
        reader = _Reader(config, stored, files, dtype, device, shard)
        make = reader.tensor, reader.weight, lambda shapes: None
        return _assemble(config, *make, prepare, shard, shared)


def load_classification_head(path: Path, config: ModelConfig) -> Tensor | None:
    """The weight of a classification head, float32 `[labels, hidden_size]`, applied to the last
    token's hidden state; None if the model has none.

    The checkpoint's tensors have been checked.
    """
    if not config.num_labels or not path.is_dir():
        return None
    stored = stored_tensors(path, config.tie_embeddings)[CLASSIFICATION_HEAD]
    with safe_open(stored.file, framework="pt", device="cpu") as file:
        weight: Tensor = file.get_tensor(stored.name)
    return weight.float()


class _Reader:
    """Reads the tensors of a checkpoint, which have been checked, and logs progress."""

    def __init__(
        self,
        config: ModelConfig,
        stored: Mapping[str, StoredTensor],
        files: Mapping[Path, Any],
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard,
    ) -> None:
        """files: `safe_open` results, or `GgufTensors`, by path."""
        self._config, self._stored, self._files = config, stored, files
        self._dtype, self._device = dtype, device
        self._specs = specs = checkpoint_tensors(config)
        own = shard.experts(config)
        self._unread = {name for name in stored.keys() & specs.keys() if _is_here(name, own)}
        self._total_bytes = sum(stored[name].num_bytes for name in self._unread)
        self._read_bytes = 0
        self._began = self._logged = time.monotonic()

    def tensor(self, shapes: Shapes) -> Tensor:
        """The tensor that these parts join to."""
        dtype = torch.float32 if is_float32(self._config, next(iter(shapes))) else self._dtype
        result = torch.empty(_joined_shape(shapes), dtype=dtype, device=self._device)
        parts = result.split([shape[0] for shape in shapes.values()])
        for name, target in zip(shapes, parts, strict=True):
            part = stacked_part(self._config, name)
            if self._is_ggml(name):
                read_gguf(self._stored[name].dtype, self._read(name)).dequantize_into(target)
                continue
            read = self._read
            target.copy_(_read_stacked(part, shapes[name], read) if part else read(name))
        self._log_progress()
        return result

    def weight(self, shapes: Shapes) -> LinearWeight:
        """The weight that these parts join to, in the checkpoint's format."""
        config = self._config
        parts = [part for name in shapes if (part := stacked_part(config, name))]
        if parts and config.experts and config.experts.mxfp4:
            weight: LinearWeight = _read_mxfp4(parts, self._read, self._device)
        elif (scheme := scheme_of(config, shapes)) is None:
            return DenseWeight(self.tensor(shapes))
        elif isinstance(config.quantization, GgufConfig):
            weight = join_weights([self._ggml_weight(*part) for part in shapes.items()])
        else:
            modules = {name.removesuffix(".weight"): shape for name, shape in shapes.items()}
            self._check_absent_biases(modules)
            weight = read_weight(scheme, modules, self._read_to_device)
        self._log_progress()
        return weight

    def _is_ggml(self, name: str) -> bool:
        return name in self._stored and self._stored[name].dtype in QUANTIZED

    def _ggml_weight(self, name: str, shape: tuple[int, ...]) -> LinearWeight:
        """A part in a GGUF file's format, which may be none."""
        if not self._is_ggml(name):
            return DenseWeight(self.tensor({name: shape}))
        return read_gguf(self._stored[name].dtype, self._read(name).to(self._device))

    def _check_absent_biases(self, modules: Shapes) -> None:
        """Raises CheckpointError for a bias that the model does not have, unless it is zeros."""
        for bias in (f"{module}.bias" for module in modules):
            if bias in self._stored and self._specs[bias].optional and self._read(bias).any():
                raise CheckpointError(
                    f"{self._stored[bias].file}: tensor {bias} is not part of "
                    f"{self._config.architecture} as config.json describes it"
                )

    def _read(self, name: str) -> Tensor:
        """A view of a mapped file."""
        stored = self._stored[name]
        if name in self._unread:
            self._unread.remove(name)
            self._read_bytes += stored.num_bytes
        tensor: Tensor = self._files[stored.file].get_tensor(stored.name)
        return tensor

    def _read_to_device(self, name: str) -> Tensor | None:
        return self._read(name).to(self._device) if name in self._stored else None

    def _log_progress(self) -> None:
        """Logs at most once a second."""
        if (now := time.monotonic()) < self._logged + 1.0:
            return
        self._logged, rate = now, self._read_bytes / (now - self._began)
        left = self._total_bytes - self._read_bytes
        log.info(
            "loading weights: %.2f of %.2f GiB, %.2f GiB/s, %.0f s left",
            self._read_bytes / _GIB, self._total_bytes / _GIB, rate / _GIB, left / rate,
        )  # fmt: skip


def _read_stacked(
    part: StackedPart, shape: tuple[int, ...], get: Callable[[str], Tensor]
) -> Tensor:
    """An expert's matrix `[out, in]` or bias `[out]` of this shape that is not quantised."""
    if part.is_bias:
        return get(f"{part.tensor}_bias")[part.expert, part.outputs]
    matrix = get(part.tensor)[part.expert]
    transposed = part.transposed
    if transposed is None:
        transposed = matrix.shape[-1] != shape[-1]
    return (matrix.T if transposed else matrix)[part.outputs]


def _read_mxfp4(
    parts: Sequence[StackedPart], get: Callable[[str], Tensor], device: torch.device
) -> Mxfp4Weight:
    """An expert's matrix in MXFP4, whose parts are joined along the outputs."""

    def read(kind: str) -> list[Tensor]:
        return [
            get(f"{part.tensor}_{kind}")[part.expert, part.outputs].to(device) for part in parts
        ]

    return Mxfp4Weight.from_blocks(read("blocks"), read("scales"))


def _is_here(name: str, experts: range) -> bool:
    """Whether a tensor belongs to one of these experts, or to no expert."""
    found = _EXPERT_NUMBER.search(name)
    return found is None or int(found[1]) in experts


def _has_own_head(stored: Mapping[str, StoredTensor]) -> bool:
    """Whether a tied model's output layer differs from its embedding, so that it is not tied.

    So does transformers. A tensor of another shape does not belong to this model.
    """
    embedding, head = stored.get(EMBEDDING), stored.get(LM_HEAD)
    if embedding is None or head is None or head.shape != embedding.shape:
        return False
    with ExitStack() as stack:
        values, others = (
            stack.enter_context(safe_open(one.file, framework="pt")).get_tensor(one.name)
            for one in (embedding, head)
        )
        return not torch.equal(values, others.to(values.dtype))


def random_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    prepare: Prepare = _as_read,
    shard: Shard = WHOLE,
    shared: ModelWeights | None = None,
) -> ModelWeights:
    """Seeded random weights, equal on every machine: for benchmarks that need no real model.

    On a GPU each tensor is filled from one set of numbers, shifted by one from tensor to tensor:
    equal on every GPU and made in seconds, but different from a CPU's.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.empty(0 if device.type == "cpu" else _NOISE)
    noise = noise.normal_(std=RANDOM_STD, generator=generator).to(device, dtype)
    shifts = itertools.count()

    def make(shapes: Shapes) -> Tensor:
        shape = _joined_shape(shapes)
        name = next(iter(shapes))
        kind = torch.float32 if is_float32(config, name) else dtype
        if _SCALE.search(name):
            return torch.ones(shape, dtype=kind, device=device)
        if device.type == "cpu":  # rounded last: torch 2.11 makes other numbers for each type
            return torch.empty(shape).normal_(std=RANDOM_STD, generator=generator).to(kind)
        result, shifted = torch.empty(shape, dtype=kind, device=device), noise.roll(next(shifts))
        for piece in result.view(-1).split(_NOISE):
            piece.copy_(shifted[: len(piece)])
        return result

    # Other ranks' experts are made, too: the numbers that follow must be equal on all ranks.
    made = make, lambda shapes: DenseWeight(make(shapes)), make
    return _assemble(config, *made, prepare, shard, shared)


def _assemble(
    config: ModelConfig,
    make: MakeTensor,
    make_weight: MakeWeight,
    skip: Callable[[Shapes], object],
    prepare: Prepare,
    shard: Shard,
    shared: ModelWeights | None,
) -> ModelWeights:
    """A rank's weights. skip: called in place of `make` for the tensors of other ranks' experts."""
    sizes, own_experts = (config.vocab_size, config.hidden_size), shard.experts(config)

    def part(config: ModelConfig, field: str, parts: Shapes, shard: Shard) -> Any:
        if field == "correction":
            return make(parts).flatten()
        if any(len(shape) != 2 for shape in parts.values()):
            return shard.tensor(config, field, arranged(config, field, make(parts)))
        weight = make_weight(parts)
        rearranged = config.arch.gated_attention or config.head_order or config.layer_heads
        if (field == "qkv" and rearranged) or field in ("delta_in", "delta_gates"):
            rows = torch.arange(weight.shape[0])[:, None]
            weight = weight.take_outputs(arranged(config, field, rows)[:, 0])
        if (order := latent_order(config, field, weight.shape[0])) is not None:
            weight = weight.take_outputs(order)
        weight = shard.weight(config, field, weight)
        is_kept = field in ("router", "shared_gate", "kv_b")
        return weight if is_kept else prepare(weight, False)

    def parts_of(
        tensors: dict[str, Shapes], shard: Shard = shard, config: ModelConfig = config
    ) -> dict[str, Any]:
        return {field: part(config, field, parts, shard) for field, parts in tensors.items()}

    def latent(index: int) -> LatentWeights | None:
        if not (tensors := latent_tensors(config, index)):
            return None
        fields = parts_of(tensors)
        keys, values = (
            HeadWeights(tuple(prepare(DenseWeight(one), False) for one in heads))
            for heads in _by_head(config, fields.pop("kv_b"), fields["kv_a_norm"])
        )
        return LatentWeights(**fields, keys=keys, values=values)

    def layer(index: int) -> LayerWeights:
        once, each = expert_tensors(config, index)
        fields = parts_of(layer_tensors(config, index), config=config.layer(index))
        if config.qk_norm == "unit" and config.ropes[index] is not None:
            one = torch.ones(config.head_size, dtype=embedding.dtype, device=embedding.device)
            fields |= {"q_norm": one, "k_norm": one}
        experts, own = None, list[ExpertWeights]()
        for number, tensors in enumerate(each):
            if number in own_experts:
                own.append(
                    ExpertWeights(**parts_of(tensors, WHOLE if shard.expert_parallel else shard))
                )
            else:
                for parts in tensors.values():
                    skip(parts)
        if each:
            experts = MoeWeights(experts=tuple(own), **parts_of(once))
        delta = delta_rule_tensors(config, index)
        rule = DeltaRuleWeights(**parts_of(delta)) if delta else None
        inputs = parts_of(layer_input_tensors(config, index))
        return LayerWeights(
            **fields, experts=experts, latent=latent(index), delta=rule,
            layer_input=LayerInputWeights(**inputs) if inputs else None,
        )  # fmt: skip

    if shared is None:
        embedding = shard.tensor(config, "embedding", make({EMBEDDING: sizes}))
    layers = tuple(layer(index) for index in range(config.num_layers))
    norm = arranged(config, "final_norm", make(final_norm(config)))
    predictor = _predictor(parts_of(predictor_tensors(config)))
    if shared is not None:
        return ModelWeights(shared.embedding, layers, norm, shared.lm_head, predictor=predictor)
    token_inputs = None
    if tensors := token_input_tensors(config):
        table = shard.tensor(config, "embedding", make(tensors.pop("embedding")))
        token_inputs = TokenInputWeights(embedding=table, **parts_of(tensors))
    lm_head: LinearWeight = DenseWeight(embedding)
    stored_head: Shapes = {EMBEDDING if config.tie_embeddings else LM_HEAD: sizes}
    if not config.tie_embeddings or scheme_of(config, stored_head):
        lm_head = shard.weight(config, "lm_head", make_weight(stored_head))
    head = prepare(lm_head, True)
    return ModelWeights(embedding, layers, norm, head, None, token_inputs, predictor)


def _predictor(fields: dict[str, Any]) -> PredictorWeights | None:
    return PredictorWeights(**fields) if fields else None


def _by_head(config: ModelConfig, kv_b: LinearWeight, like: Tensor) -> Iterator[list[Tensor]]:
    """Each head's projection of queries to where latent rows are, and of rows to values.

    Of `like`'s type, whatever the checkpoint's format.
    """
    latent = config.latent
    assert latent is not None
    one = torch.eye(latent.kv_rank, dtype=like.dtype, device=like.device)
    heads = kv_b.apply(one).T.unflatten(0, (-1, latent.nope_size + latent.value_size))
    yield [head[: latent.nope_size].T.contiguous() for head in heads]
    yield [head[latent.nope_size :].contiguous() for head in heads]


def _joined_shape(shapes: Shapes) -> tuple[int, ...]:
    first, *_ = shapes.values()
    return (sum(shape[0] for shape in shapes.values()), *first[1:])


_CPU_WEIGHTS_SEED, _GPU_WEIGHTS_SEED = 0, 2
_SIMULATED_SEED = -1  # so that simulated workers are never paired with real ones


def load_or_make_weights(
    settings: EngineConfig,
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    kernels: str,
    prepare: Prepare = _as_read,
    shard: Shard = WHOLE,
    shared: ModelWeights | None = None,
) -> ModelWeights:
    """The weights of the model at `path`, or random ones if the settings say so.

    kernels: their name, for the log · shared: as of `load_weights`. Raises CheckpointError, and
    ConfigError.
    """
    started, held = time.monotonic(), weight_format(settings, config.quantization)
    seed = random_seed(settings, device)
    if seed is not None:
        weights = random_weights(config, dtype, device, seed, prepare, shard, shared)
    else:
        weights = load_weights(path, config, dtype, device, prepare, shard, shared)
    log.info(
        "loaded %s: %.1f M parameters, %.2f GiB a step, %s%s on %s, %s kernels, %.1f s",
        path.name,
        num_parameters(config) / 1e6, weights.num_bytes / _GIB,
        f"{held} weights, " if held != "none" else "", dtype, device, kernels,
        time.monotonic() - started,
    )  # fmt: skip
    if not (count := settings.lora_slots):
        return weights
    slots = LoraSlots(config, count, settings.max_lora_rank, dtype, device, shard)
    log.info("memory for %d adapters: %.2f GiB", count, slots.num_bytes / _GIB)
    return replace(weights, lora=slots)


def random_seed(settings: EngineConfig, device: torch.device) -> int | None:
    """The seed of random weights; None where a checkpoint is read.

    It is part of the model's fingerprint: a GPU's weights differ from a CPU's, and workers with
    different weights must not be paired.
    """
    if settings.simulate:
        return _SIMULATED_SEED
    if not settings.random_weights:
        return None
    return _CPU_WEIGHTS_SEED if device.type == "cpu" else _GPU_WEIGHTS_SEED
