"""A model's weights: read from safetensors, or random ones for benchmarks.

Query, key and value projections are fused into one matrix, and so are gate and up, while loading:
each part is copied from the mapped file to its place on the device, so memory stays near the
model's size, and a GPU's model takes none of the host's. Matrices that are wanted in another form
are turned into it one by one, as they come, on the device.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from baton.config import EngineConfig
from baton.engine.models.model_config import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    ModelConfig,
    check_tensors,
)
from baton.engine.models.quantization import Shapes, weight_format
from baton.engine.shard import WHOLE, Shard
from baton.engine.weights.checkpoint import ELEMENT_BYTES, FLOATS, StoredTensor, stored_tensors
from baton.engine.weights.lora import LoraAdapter
from baton.engine.weights.quantized_checkpoint import read_mxfp4, read_quantized, read_stacked
from baton.engine.weights.weight import DenseWeight, Weight
from baton.errors import CheckpointError

log = logging.getLogger(__name__)
RANDOM_STD = 0.02
_NOISE = (1 << 24) - 3  # numbers; prime, so that a matrix's rows differ
_GIB = float(1 << 30)
_OF_EXPERT = re.compile(r"\.experts\.(\d+)\.")

Prepare = Callable[[Weight, bool], Weight]
"""What is done to each weight as soon as it is read, told whether it is the output layer's.

What it was read into is then given up.
"""


@dataclass(frozen=True)
class Expert:
    """One of a mixture: an MLP of its own."""

    gate_up: Weight
    down: Weight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True)
class ExpertWeights:
    """A mixture of experts: `router` `[experts, in]` scores them, `shared_gate` `[1, in]` weighs
    the one that all tokens take. `experts` are those that are here.
    """

    router: Weight
    experts: tuple[Expert, ...]
    router_bias: Tensor | None = None
    shared_gate: Weight | None = None


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One decoder layer. Absent biases and norms are None."""

    input_norm: Tensor | None = None
    qkv: Weight
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    o: Weight
    o_bias: Tensor | None = None
    mlp_norm: Tensor | None = None
    gate_up: Weight | None = None  # with experts, of the one that all tokens take
    gate_up_bias: Tensor | None = None
    down: Weight | None = None
    down_bias: Tensor | None = None
    attention_norm: Tensor | None = None  # of what attention adds
    output_norm: Tensor | None = None  # of what the MLP adds
    experts: ExpertWeights | None = None
    sinks: Tensor | None = None  # float32 `[heads]`


@dataclass(frozen=True)
class Weights:
    """A whole model; a tied `lm_head` has `embedding` itself, unless prepared."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Weight

    @property
    def num_bytes(self) -> int:
        """Of everything that a step reads; a tied embedding counts as what scores are made with."""
        return _held_bytes((self.layers, self.final_norm, self.lm_head))


def _held_bytes(part: object) -> int:
    """Of a tensor, a weight, or all that is in a part of a model."""
    if isinstance(part, Tensor):
        return part.nbytes
    if isinstance(part, Weight):
        return part.num_bytes
    if part is None:
        return 0
    return sum(map(_held_bytes, part if isinstance(part, tuple) else vars(part).values()))


Make = Callable[[Shapes], Tensor]
"""Makes one tensor of those with these names and shapes, joined along the first axis."""


def _as_read(weight: Weight, is_output: bool) -> Weight:
    return weight


def load_weights(
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    prepare: Prepare = _as_read,
    lora: Path | None = None,
    shard: Shard = WHOLE,
) -> Weights:
    """The weights in a model directory, converted to dtype and moved to device.

    `lora` is an adapter's directory. `prepare` is applied to what activations are multiplied with;
    embedding, norms, biases and the routers of experts stay: small, they decide much.

    Raises CheckpointError naming the file and the tensor when a file is missing, broken, truncated
    or pickled, or when a tensor is missing, unknown or of another shape than the config says.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a model directory: it has no weights to load")
    stored = stored_tensors(path, config.tie_embeddings)
    if config.tie_embeddings and _has_own_head(stored):
        log.warning(
            "%s has an lm_head.weight of its own, which is used: tie_word_embeddings in "
            "config.json should be false", path,
        )  # fmt: skip
        config = replace(config, tie_embeddings=False)
    check_tensors(path, config, stored)
    expected = config.checkpoint_tensors
    adapter = None
    if lora is not None:
        sizes = {
            name: one.shape
            for name, one in expected.items()
            if len(one.shape) == 2 and one.dtypes == FLOATS
        }
        adapter = LoraAdapter.load(lora, sizes)
    own = shard.experts(config)
    unread = {name for name in stored.keys() & expected.keys() if _is_here(name, own)}
    total, done = sum(_num_bytes(stored[name]) for name in unread), 0
    began = logged = time.monotonic()
    with ExitStack() as stack:
        files = {
            file: stack.enter_context(safe_open(file, framework="pt", device="cpu"))
            for file in {tensor.file for tensor in stored.values()}
        }

        def read(name: str) -> Tensor:
            nonlocal done
            if name in unread:
                unread.remove(name)
                done += _num_bytes(stored[name])
            one = stored[name]
            tensor: Tensor = files[one.file].get_tensor(one.name)  # a view of its mapped file
            return tensor

        def read_to_device(name: str) -> Tensor | None:
            return read(name).to(device) if name in stored else None

        def make(shapes: Shapes) -> Tensor:
            whole = torch.empty(_joined(shapes), dtype=dtype, device=device)
            parts = whole.split([shape[0] for shape in shapes.values()])
            for name, target in zip(shapes, parts, strict=True):
                part = config.stacked_part(name)
                tensor = read_stacked(part, read) if part else read(name)
                target.copy_(adapter.adapted(name, tensor.to(device)) if adapter else tensor)
            report()
            return whole

        def make_weight(shapes: Shapes) -> Weight:
            parts = [part for name in shapes if (part := config.stacked_part(name))]
            if parts and config.experts and config.experts.mxfp4:
                held = read_mxfp4(parts, read, device)
                report()
                return held
            if config.quantization is None or not config.is_quantized(shapes):
                return DenseWeight(make(shapes))
            for bias in (f"{name.removesuffix('weight')}bias" for name in shapes):
                if bias in stored and expected[bias].optional and read(bias).any():
                    raise CheckpointError(
                        f"{stored[bias].file}: tensor {bias} is not part of {config.architecture} "
                        "as config.json describes it"
                    )
            weight = read_quantized(config.quantization, shapes, read_to_device)
            report()
            return weight

        def report() -> None:
            nonlocal logged
            if (now := time.monotonic()) >= logged + 1.0:
                logged, rate = now, done / (now - began)
                log.info(
                    "loading weights: %.2f of %.2f GiB, %.2f GiB/s, %.0f s left",
                    done / _GIB, total / _GIB, rate / _GIB, (total - done) / rate,
                )  # fmt: skip

        return _assemble(config, make, make_weight, lambda shapes: None, prepare, shard)


def _is_here(name: str, experts: range) -> bool:
    """Whether a tensor belongs to one of these experts, or to none."""
    found = _OF_EXPERT.search(name)
    return found is None or int(found[1]) in experts


def _has_own_head(stored: Mapping[str, StoredTensor]) -> bool:
    """Whether a tied model's output layer is another matrix than its embedding, not a copy.

    transformers does not tie them then; of another shape it is no matrix of this model.
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
) -> Weights:
    """Seeded random weights, the same on every machine: for benchmarks that need no real model.

    A GPU's are made there of one set of numbers, moved by one from tensor to tensor: the same on
    every GPU, and made in seconds, but others than a CPU's.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.empty(0 if device.type == "cpu" else _NOISE)
    noise = noise.normal_(std=RANDOM_STD, generator=generator).to(device, dtype)
    shifts = itertools.count()

    def make(shapes: Shapes) -> Tensor:
        shape = _joined(shapes)
        if next(iter(shapes)).endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=device)
        if device.type == "cpu":  # rounded here: torch 2.11 has other numbers for each type
            return torch.empty(shape).normal_(std=RANDOM_STD, generator=generator).to(dtype)
        whole, shifted = torch.empty(shape, dtype=dtype, device=device), noise.roll(next(shifts))
        for piece in whole.view(-1).split(_NOISE):
            piece.copy_(shifted[: len(piece)])
        return whole

    # Also what other ranks have is made: the numbers behind it must be the same on all.
    return _assemble(config, make, lambda shapes: DenseWeight(make(shapes)), make, prepare, shard)


def _assemble(
    config: ModelConfig,
    make: Make,
    make_weight: Callable[[Shapes], Weight],
    skip: Callable[[Shapes], object],
    prepare: Prepare,
    shard: Shard,
) -> Weights:
    """skip: is called instead for an expert's tensors that another rank has."""
    sizes, own_experts = (config.vocab_size, config.hidden_size), shard.experts(config)

    def part(field: str, parts: Shapes, shard: Shard) -> Any:
        if any(len(shape) != 2 for shape in parts.values()):
            return shard.tensor(config, field, _arranged(config, field, make(parts)))
        weight = make_weight(parts)
        if field == "qkv" and config.head_order is not None:
            rows = torch.arange(weight.shape[0])[:, None]
            weight = weight.take_outputs(_arranged(config, field, rows)[:, 0])
        weight = shard.weight(config, field, weight)
        return weight if field in ("router", "shared_gate") else prepare(weight, False)

    def parts_of(tensors: dict[str, Shapes], shard: Shard = shard) -> dict[str, Any]:
        return {field: part(field, parts, shard) for field, parts in tensors.items()}

    def layer(index: int) -> LayerWeights:
        once, each = config.expert_tensors(index)
        fields, experts, own = parts_of(config.layer_tensors(index)), None, list[Expert]()
        for number, tensors in enumerate(each):
            if number in own_experts:
                own.append(Expert(**parts_of(tensors, WHOLE if shard.expert_parallel else shard)))
            else:
                for parts in tensors.values():
                    skip(parts)
        if each:
            experts = ExpertWeights(experts=tuple(own), **parts_of(once))
        return LayerWeights(**fields, experts=experts)

    embedding = shard.tensor(config, "embedding", make({EMBEDDING: sizes}))
    layers = tuple(layer(index) for index in range(config.num_layers))
    norm = _arranged(config, "final_norm", make({FINAL_NORM: sizes[1:]}))
    tied = config.tie_embeddings
    lm_head: Weight = DenseWeight(embedding)
    if not tied:
        lm_head = shard.weight(config, "lm_head", make_weight({LM_HEAD: sizes}))
    return Weights(embedding, layers, norm, prepare(lm_head, True))


def _arranged(config: ModelConfig, field: str, tensor: Tensor) -> Tensor:
    """A tensor of a checkpoint as the decoder takes it."""
    if field.endswith("norm"):
        if config.differs.norm_rounds_once:
            tensor = tensor.float()
        if config.differs.norm_plus_one:
            tensor = tensor + 1
    if field == "sinks":
        return tensor.float()
    order = config.head_order
    if order is not None and field in ("qkv", "qkv_bias", "q_norm", "k_norm"):
        heads = tensor.view(-1, config.head_size, *tensor.shape[1:])
        turned = heads[: config.num_heads + config.num_kv_heads]  # values come behind
        turned.copy_(turned[:, order])
    return tensor


def _joined(shapes: Shapes) -> tuple[int, ...]:
    first, *_ = shapes.values()
    return (sum(shape[0] for shape in shapes.values()), *first[1:])


def _num_bytes(stored: StoredTensor) -> int:
    return math.prod(stored.shape) * ELEMENT_BYTES[stored.dtype]


_CPU_WEIGHTS_SEED, _GPU_WEIGHTS_SEED = 0, 2
_SIMULATED_SEED = -1  # so that no simulated worker is paired with a real one


def weights_of(
    settings: EngineConfig,
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    kernels: str,
    prepare: Prepare = _as_read,
    shard: Shard = WHOLE,
) -> Weights:
    """The weights of the model at `path`, or made-up ones, on the device, prepared one by one.

    kernels: which they are for, to be logged. Raises CheckpointError, and ConfigError.
    """
    started, held = time.monotonic(), weight_format(settings, config.quantization)
    seed = random_seed(settings, device)
    if seed is not None:
        weights = random_weights(config, dtype, device, seed, prepare, shard)
    else:
        weights = load_weights(path, config, dtype, device, prepare, settings.lora, shard)
    log.info(
        "loaded %s%s: %.1f M parameters, %.2f GiB a step, %s%s on %s, %s kernels, %.1f s",
        path.name, f" with {settings.lora.name}" if settings.lora else "",
        config.num_parameters / 1e6, weights.num_bytes / _GIB,
        f"{held} weights, " if held != "none" else "", dtype, device, kernels,
        time.monotonic() - started,
    )  # fmt: skip
    return weights


def random_seed(settings: EngineConfig, device: torch.device) -> int | None:
    """The seed of random weights; None where a checkpoint has them.

    A GPU's are others than a CPU's: workers that hold different ones must never be paired.
    """
    if settings.simulate:
        return _SIMULATED_SEED
    if not settings.random_weights:
        return None
    return _CPU_WEIGHTS_SEED if device.type == "cpu" else _GPU_WEIGHTS_SEED
