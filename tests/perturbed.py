"""Variants of the demo model that say something else: other weights, and a LoRA adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from baton.config import DEMO_MODEL
from baton.engine.models.lora import LORA_CONFIG, LORA_FILE

_WEIGHTS = "model.safetensors"
_RANK, _ALPHA = 4, 8
_NOISE = 0.3  # in standard deviations of the weights


def perturbed_model(directory: Path) -> None:
    """Writes the demo model with noise on its weights."""
    weights, dice = load_file(DEMO_MODEL / _WEIGHTS), torch.Generator().manual_seed(1)
    for name, tensor in weights.items():
        if tensor.ndim > 1:
            noise = torch.randn(tensor.shape, generator=dice) * tensor.float().std()
            weights[name] = (tensor.float() + _NOISE * noise).to(tensor.dtype)
    _write(directory, weights)


def random_adapter(directory: Path, merged: Path) -> None:
    """Writes an adapter of the demo model in PEFT's format, and the model with it merged in."""
    weights, dice, stored = (
        load_file(DEMO_MODEL / _WEIGHTS),
        torch.Generator().manual_seed(2),
        dict[str, torch.Tensor](),
    )
    for name in [one for one in weights if one.endswith("_proj.weight")]:
        outputs, inputs = weights[name].shape
        scale = (_NOISE * weights[name].float().std() / _ALPHA).sqrt()
        a = scale * torch.randn(_RANK, inputs, generator=dice)
        b = scale * torch.randn(outputs, _RANK, generator=dice)
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        stored |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
        weights[name] = weights[name].float() + _ALPHA / _RANK * b @ a
    directory.mkdir()
    save_file(stored, directory / LORA_FILE)
    fields = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _ALPHA, "bias": "none"}
    (directory / LORA_CONFIG).write_text(json.dumps(fields))
    _write(merged, weights)


def _write(directory: Path, weights: dict[str, torch.Tensor]) -> None:
    shutil.copytree(DEMO_MODEL, directory)
    save_file(weights, directory / _WEIGHTS, metadata={"format": "pt"})
