"""LoRA adapters in PEFT's format, merged into a model's matrices as they are read.

Each adapted matrix becomes `W + scale * B @ A` before it is quantised or packed, so steps cost no
more than without, and all kernels and formats work. Adapters that are not such a sum (DoRA, trained
embeddings or biases) are refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from baton.engine.checkpoint.fields import BOOLEAN, NOT_NEGATIVE, Fields, one_of
from baton.engine.checkpoint.tensors import (
    FLOATS,
    LORA_CONFIG,
    LORA_FILE,
    StoredTensor,
    file_tensors,
    read_json,
)
from baton.errors import CheckpointError

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


@dataclass(frozen=True)
class LoraAdapter:
    """An adapter. scales: by the name of the model's matrix."""

    file: Path
    scales: Mapping[str, float]

    @classmethod
    def load(cls, path: Path, matrices: Mapping[str, tuple[int, ...]]) -> LoraAdapter:
        """Loads an adapter's directory. matrices: shapes of the model's dense matrices, by name.

        Raises CheckpointError naming the file, and the key or tensor that is wrong.
        """
        fields = Fields(path / LORA_CONFIG, read_json(path / LORA_CONFIG), remedy=_REMEDY)
        fields.read("peft_type", one_of("LORA"))
        for key, values in _PLAIN.items():
            fields.read(key, one_of(*values), values[0])
        file = path / LORA_FILE
        stored = file_tensors(file)
        ranks = {
            name: _rank(file, name, stored, matrices)
            for name in sorted({_target(file, part) for part in stored})
        }
        return cls(file, _scales(fields, ranks))

    def adapted(self, name: str, matrix: Tensor) -> Tensor:
        """The matrix `[out, in]` with the adapter's update, in float32; itself without one."""
        if name not in self.scales:
            return matrix
        with safe_open(self.file, framework="pt", device="cpu") as opened:
            a, b = (opened.get_tensor(part).to(matrix.device).float() for part in _parts(name))
        return matrix.float().addmm(b, a, alpha=self.scales[name])


def _parts(name: str) -> tuple[str, str]:
    first, second = (_PREFIX + name.removesuffix(".weight") + half for half in _HALVES)
    return first, second


def _target(file: Path, name: str) -> str:
    """The model's matrix that a tensor of the adapter belongs to."""
    for half in _HALVES:
        if name.startswith(_PREFIX) and name.endswith(half):
            return name.removeprefix(_PREFIX).removesuffix(half) + ".weight"
    raise CheckpointError(f"{file}: tensor {name} is no half of a LoRA update{_REMEDY}")


def _rank(
    file: Path,
    name: str,
    stored: Mapping[str, StoredTensor],
    matrices: Mapping[str, tuple[int, ...]],
) -> int:
    if name not in matrices:
        raise CheckpointError(f"{file} adapts {name}: no dense matrix of this model{_REMEDY}")
    for part in _parts(name):
        if part not in stored:
            raise CheckpointError(f"{file} lacks tensor {part}")
        if stored[part].dtype not in FLOATS:
            raise CheckpointError(
                f"{file}: tensor {part} has dtype {stored[part].dtype}; supported: "
                f"{', '.join(FLOATS)}"
            )
    a, b = (stored[part].shape for part in _parts(name))
    outputs, inputs = matrices[name]
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
