"""LoRA adapters in PEFT's format, and the memory in which a model holds those that it serves.

A step adds `x @ A.T @ B` to the products of the rows that use an adapter: rows of several adapters
and of none share a step. Adapters that are not such a sum (DoRA, trained embeddings or biases) are
refused by name.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from baton.engine.adapters import LoraAdapter, Update
from baton.engine.checkpoint.fields import BOOLEAN, NOT_NEGATIVE, Fields, one_of
from baton.engine.checkpoint.tensor_headers import FLOATS, StoredTensor, file_tensors, read_json
from baton.engine.kernels.torch.lora import LoraMatrices
from baton.engine.models.model_config import ModelConfig
from baton.engine.models.output_order import arranged
from baton.engine.models.shard import BY_INPUTS, WHOLE, Shard
from baton.engine.models.tensor_names import delta_rule_tensors, layer_tensors, text_name
from baton.engine.quantization.config import Shapes
from baton.engine.quantization.linear_weight import DenseWeight
from baton.errors import CheckpointError

LORA_CONFIG = "adapter_config.json"  # PEFT's names
LORA_FILE = "adapter_model.safetensors"
FIELDS = ("qkv", "o", "gate_up", "down")  # of `LayerWeights`, which adapters may change
DELTA_FIELDS = ("delta_in", "delta_gates", "delta_out")  # of `DeltaRuleWeights`
_PREFIX = "base_model.model."
_HALVES = (".lora_A.weight", ".lora_B.weight")
_REMEDY = "; merge it with PEFT: model.merge_and_unload().save_pretrained(DIR)"
# Keys of other kinds of adapters, and the values with which they have no effect.
_PLAIN: dict[str, tuple[object, ...]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "use_qalora": (False,),
    "modules_to_save": ([],),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
    "layer_replication": ([],),
    "alora_invocation_tokens": ([],),
    "use_bdlora": ([],),
    "arrow_config": ([],),
    # Others ("pissa", "olora", "corda", "loftq") change the base weights.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    "kasa_config": ([],),
}


class _Place(NamedTuple):
    """A matrix of the checkpoint: its section of a layer's field, and its `[out, in]`."""

    layer: int
    field: str
    section: int
    shape: tuple[int, ...]


def load_lora(path: Path, config: ModelConfig, max_rank: int) -> LoraAdapter:
    """Loads an adapter's directory for a model.

    Raises CheckpointError naming the file, and the key or tensor that is wrong.
    """
    file, places = path / LORA_FILE, adapted_tensors(config)
    fields = Fields(path / LORA_CONFIG, read_json(path / LORA_CONFIG), remedy=_REMEDY)
    fields.read("peft_type", one_of("LORA"))
    for key, values in _PLAIN.items():
        fields.read(key, one_of(*values), values[0])
    stored = file_tensors(file)
    names = _targets(file, stored)
    ranks = {name: _rank(file, name, stored, places.get(text_name(name))) for name in names}
    if not ranks:
        raise CheckpointError(f"{file} has no tensors")
    if (rank := max(ranks.values())) > max_rank:
        raise CheckpointError(
            f"{path} has rank {rank}, and this worker holds adapters up to rank {max_rank}: "
            f"start workers with --max-lora-rank {rank}"
        )
    updates, scales = dict[tuple[int, str], Update](), _scales(fields, ranks)
    with safe_open(file, framework="pt", device="cpu") as opened:
        for name in names:
            layer, field, section, _ = places[text_name(name)]
            if (layer, field) not in updates:
                updates[layer, field] = empty_update(config, layer, field, rank)
            whole_a, whole_b = updates[layer, field]
            a, b = (opened.get_tensor(part).float() for part in _parts(name))
            outputs = _outputs(config, layer, field)[section]
            whole_a[section, : len(a)] = a
            whole_b[: len(a), outputs.start : outputs.stop] = b.T * scales[name]
    return LoraAdapter(identity_of(path), rank, updates)


class LoraSlots:
    """The memory of `count` adapters on one rank, allocated once.

    layers: for each layer by field; fields that adapters cannot change are absent.
    """

    def __init__(
        self, config: ModelConfig, count: int, max_rank: int, dtype: torch.dtype,
        device: torch.device, shard: Shard = WHOLE,
    ) -> None:  # fmt: skip
        """config: of the unsharded model."""
        self.config, self._shard = config, shard
        # By the number of updates that one matrix holds.
        self._ranks = {n: torch.zeros(count, dtype=torch.int32, device=device) for n in (1, 2, 3)}
        self.count, self.max_rank = count, max_rank
        layers = list[dict[str, LoraMatrices]]()
        for layer in range(config.num_layers):
            layers.append({})
            for field in adapted_fields(config, layer):
                a, b, ends = self._sharded(layer, field, empty_update(config, layer, field, 1))
                rank = max_rank * len(b)
                layers[-1][field] = LoraMatrices(
                    torch.zeros(count, len(a) * rank, a.shape[2], dtype=dtype, device=device),
                    torch.zeros(count, rank, b.shape[1], dtype=dtype, device=device),
                    ends,
                    self._ranks[len(b)],
                )
        self.layers = tuple(layers)

    @property
    def num_bytes(self) -> int:
        """Size of all slots."""
        return sum(one.a.nbytes + one.b.nbytes for fields in self.layers for one in fields.values())

    @torch.inference_mode()
    def write(self, slot: int, adapter: LoraAdapter) -> None:
        """Writes an adapter of the unsharded model to a slot that no row uses."""
        updates = adapter.updates
        for times, ranks in self._ranks.items():
            ranks[slot] = adapter.rank * times
        for layer, fields in enumerate(self.layers):
            for field, matrices in fields.items():
                matrices.a[slot].zero_()
                matrices.b[slot].zero_()
                if (update := updates.get((layer, field))) is not None:
                    a, b, _ = self._sharded(layer, field, update)
                    by_section = matrices.a[slot].view(len(a), matrices.max_rank, -1)
                    by_section[:, : len(b)] = a.to(matrices.a)
                    matrices.b[slot, : len(b)] = b.to(matrices.b)

    def _sharded(
        self, layer: int, field: str, update: Update
    ) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """This rank's part of an update, and where its sections end."""
        (a, b), shard = update, self._shard
        config, sections = self.config.layer(layer), _outputs(self.config, layer, field)
        if field in BY_INPUTS:
            whole = a.flatten(0, 1)
            part = shard.weight(config, field, DenseWeight(whole))
            assert isinstance(part, DenseWeight)
            return part.tensor.unflatten(0, a.shape[:2]), b, (b.shape[1],)
        if _is_mixed(config, field):
            a, b, sections = _as_one_section(a, b, sections)
        # A further column has the section of each output.
        numbers = torch.repeat_interleave(
            torch.arange(len(sections)), torch.tensor([len(one) for one in sections])
        )
        columns = arranged(config, field, torch.cat([b.T, numbers[:, None].float()], dim=1))
        part = shard.weight(config, field, DenseWeight(columns))
        assert isinstance(part, DenseWeight)
        counts = part.tensor[:, -1].long().bincount(minlength=len(sections))
        return a, part.tensor[:, :-1].T, tuple(counts.cumsum(0).tolist())


def identity_of(path: Path) -> str:
    """The hash of an adapter's content, whatever its name and place. Raises CheckpointError."""
    digest = hashlib.blake2b(digest_size=16)
    for name in (LORA_CONFIG, LORA_FILE):
        try:
            with (path / name).open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
        except OSError as error:
            raise CheckpointError(f"{path / name} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def adapted_fields(config: ModelConfig, layer: int) -> list[str]:
    """The fields of a layer that adapters may change: not those of experts."""
    has_experts = config.experts is not None and config.experts.layers[layer]
    fixed = {*FIELDS[2:]} if has_experts else set[str]()
    if config.latent is not None:
        fixed.add("qkv")
    tensors = _tensors(config, layer)
    return [one for one in (*FIELDS, *DELTA_FIELDS) if one in tensors and one not in fixed]


def _tensors(config: ModelConfig, layer: int) -> dict[str, Shapes]:
    return layer_tensors(config, layer) | delta_rule_tensors(config, layer)


def _is_mixed(config: ModelConfig, field: str) -> bool:
    """Whether the decoder's order of outputs mixes sections."""
    gated = config.arch.gated_attention and field == "qkv"
    return gated or field in ("delta_in", "delta_gates")


def _as_one_section(
    a: Tensor, b: Tensor, sections: list[range]
) -> tuple[Tensor, Tensor, list[range]]:
    """An update of several sections as that of one, whose rank is the sum of theirs."""
    rank, outputs = b.shape
    whole = b.new_zeros(len(sections), rank, outputs)
    for number, one in enumerate(sections):
        whole[number, :, one.start : one.stop] = b[:, one.start : one.stop]
    return a.flatten(0, 1)[None], whole.flatten(0, 1), [range(outputs)]


def adapted_tensors(config: ModelConfig) -> dict[str, _Place]:
    """Where each matrix that adapters may change belongs."""
    return {
        name: _Place(layer, field, section, shape)
        for layer in range(config.num_layers)
        for field in adapted_fields(config, layer)
        for section, (name, shape) in enumerate(_tensors(config, layer)[field].items())
    }


def _outputs(config: ModelConfig, layer: int, field: str) -> list[range]:
    """The outputs of each section of a field."""
    outputs, start = list[range](), 0
    for shape in _tensors(config, layer)[field].values():
        outputs.append(range(start, start := start + shape[0]))
    return outputs


def empty_update(config: ModelConfig, layer: int, field: str, rank: int) -> Update:
    """An update of a field that changes nothing."""
    shapes = list(_tensors(config, layer)[field].values())
    outputs, inputs = sum(shape[0] for shape in shapes), shapes[0][1]
    return torch.zeros(len(shapes), rank, inputs), torch.zeros(rank, outputs)


def _parts(name: str) -> tuple[str, str]:
    first, second = (_PREFIX + name.removesuffix(".weight") + half for half in _HALVES)
    return first, second


def _targets(file: Path, stored: Iterable[str]) -> list[str]:
    """The matrices that an adapter changes, as it names them: `text_name` has the model's names."""
    found = dict[str, str]()
    for name in sorted({_target(file, part) for part in stored}):
        if (other := found.setdefault(text_name(name), name)) != name:
            raise CheckpointError(f"{file} adapts {other} and {name}, which are one matrix")
    return list(found.values())


def _target(file: Path, name: str) -> str:
    for half in _HALVES:
        if name.startswith(_PREFIX) and name.endswith(half):
            return name.removeprefix(_PREFIX).removesuffix(half) + ".weight"
    raise CheckpointError(f"{file}: tensor {name} is no half of a LoRA update{_REMEDY}")


def _rank(file: Path, name: str, stored: Mapping[str, StoredTensor], place: _Place | None) -> int:
    if place is None:
        raise CheckpointError(
            f"{file} adapts {name}, which is no projection of attention or of a dense MLP of this "
            f"model's text layers{_REMEDY}"
        )
    for part in _parts(name):
        if part not in stored:
            raise CheckpointError(f"{file} lacks tensor {part}")
        if stored[part].dtype not in FLOATS:
            raise CheckpointError(
                f"{file}: tensor {part} has dtype {stored[part].dtype}; supported: "
                f"{', '.join(FLOATS)}"
            )
    a, b = (stored[part].shape for part in _parts(name))
    outputs, inputs = place.shape
    if len(a) != 2 or a[0] == 0 or a[1] != inputs or b != (outputs, a[0]):
        raise CheckpointError(
            f"{file}: {name} is [{outputs}, {inputs}], and its update {list(b)} by {list(a)}: the "
            "adapter was made for another model"
        )
    return a[0]


def _scales(fields: Fields, ranks: Mapping[str, int]) -> dict[str, float]:
    """The scale of each matrix: alpha / rank, changed by `alpha_pattern` and `use_rslora`."""
    alpha = fields.read("lora_alpha", NOT_NEGATIVE, 8)
    is_stabilized = fields.read("use_rslora", BOOLEAN, False)
    own = fields.inside("alpha_pattern")
    alphas = {pattern: own.read(pattern, NOT_NEGATIVE) for pattern in own.values}

    def alpha_of(name: str) -> float:
        module = name.removesuffix(".weight")
        for pattern, one in alphas.items():
            try:  # as PEFT does: the end of the module's name, from a dot on
                if re.fullmatch(rf"(.*\.)?({pattern})", module):
                    return float(one)
            except re.error:
                supported = "regular expressions of modules' names"
                raise fields.error("alpha_pattern", pattern, supported) from None
        return float(alpha)

    return {
        name: alpha_of(name) / (math.sqrt(rank) if is_stabilized else rank)
        for name, rank in ranks.items()
    }
